"""`kill -9` of any rank at any moment loses nothing: the other rank ends, no half checkpoint is accepted, and the resumed run ends with the
weights of an uninterrupted one, bit for bit.

Of the random kills half fall after any step or in the start, half in the writing of a random checkpoint. Each draws from a generator of
its own: `pytest -m nightly 'tests/faults/test_kills.py::test_a_rank_killed_at_a_random_moment_costs_nothing[17]'` repeats one.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import yaml

from pretrain.checkpoint_reader import CheckpointReader, find_newest
from tests.distributed.launching import MARK, end_what_is_left, launcher, write_run
from tests.faults.runs import Process, same_state, start_ranks
from tests.ranks import REPOSITORY, SETTING

KILLS = 50
STEPS, SAVE_EVERY = 20, 4
LAST = f"step_{STEPS:08d}"
OTHER_ENDS = 60  # seconds, within which the other rank does


@dataclass
class Whole:
    """The uninterrupted run, and what became of the kills that are compared with it."""

    run_dir: Path
    starting: float  # seconds until it said that it trains
    stepping: float  # seconds a step, all in all
    writing: float  # seconds from the first to the last trace of a checkpoint being written
    kills: Counter[str] = field(default_factory=Counter)


def options(folder: Path, dataset: Path) -> list[str]:
    """A run of random depth on two ranks, whose checkpoints are large for its steps."""
    command = write_run(folder, dataset)
    path = folder / "run.yaml"
    config = yaml.safe_load(path.read_text())
    config["model"] |= {"hidden_size": 128, "core_blocks": 2, "max_depth": 3}
    config["schedule"] |= {"total_tokens": STEPS * 4 * 32, "warmup_tokens": 5 * 4 * 32}
    config["optim"]["precision"] = "bf16"
    config["checkpoint"]["every_steps"] = SAVE_EVERY
    config["eval"]["every_steps"] = 100
    path.write_text(yaml.safe_dump(config))
    return command


def is_being_written(folder: Path, step: int | None = None) -> bool:
    return any((folder / "run" / "checkpoints").glob(".tmp_step_*" if step is None else f".tmp_step_{step:08d}"))


def losses(run_dir: Path) -> list[tuple[int, float]]:
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def whole(dataset: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Whole]:
    folder = tmp_path_factory.mktemp("whole")
    begin = time.monotonic()
    ranks = start_ranks(options(folder, dataset), folder)
    written: list[float] = []
    ranks[0].wait_for("fresh start")
    training = time.monotonic()
    while ranks[0].process.poll() is None:
        if is_being_written(folder, SAVE_EVERY):
            written.append(time.monotonic())
        time.sleep(0.001)
    assert [rank.end() for rank in ranks] == [0, 0]
    whole = Whole(folder / "run", training - begin, (time.monotonic() - training) / STEPS, written[-1] - written[0])
    yield whole
    if whole.kills:
        with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(
                f"\na start took {whole.starting:.1f} s, a step {whole.stepping:.3f}, a checkpoint {whole.writing:.3f}; {dict(whole.kills)}"
            )


def check_resumed(command: list[str], folder: Path, whole: Whole) -> None:
    """Started again, it goes on from the newest checkpoint, all of which are whole, to the end of the uninterrupted run."""
    checkpoints = folder / "run" / "checkpoints"
    for checkpoint in checkpoints.glob("step_*"):
        CheckpointReader(checkpoint).verify()
    newest = find_newest(checkpoints)
    ranks = start_ranks(command, folder)
    assert [rank.end() for rank in ranks] == [0, 0], ranks[0].text + ranks[1].text
    assert (f"resumed from {newest}: " if newest else "fresh start: ") in ranks[0].text and "warning" not in ranks[0].text
    assert not is_being_written(folder)
    assert same_state(checkpoints / LAST, whole.run_dir / "checkpoints" / LAST)
    assert losses(folder / "run") == losses(whole.run_dir)


def test_a_launcher_ends_the_other_rank_of_one_that_is_killed(whole: Whole, dataset: Path, tmp_path: Path) -> None:
    command = options(tmp_path, dataset)
    mark = uuid.uuid4().hex
    with (tmp_path / "output").open("w") as output:
        job = subprocess.Popen(
            [*launcher("torchrun", 2), "pretrain/train.py", *command],
            cwd=REPOSITORY,
            env=os.environ | SETTING | {MARK: mark},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while not losses(tmp_path / "run"):
            assert job.poll() is None, (tmp_path / "output").read_text()[-4000:]
            time.sleep(0.01)
        ranks = [process for process in psutil.Process(job.pid).children() if "pretrain/train.py" in process.cmdline()]
        ranks[1].kill()
        assert job.wait(OTHER_ENDS) != 0
    finally:
        job.kill()
        assert not end_what_is_left(mark)
    check_resumed(command, tmp_path, whole)


def test_a_checkpoint_that_all_ranks_were_killed_in_is_none(whole: Whole, dataset: Path, tmp_path: Path) -> None:
    command = options(tmp_path, dataset)
    ranks = start_ranks(command, tmp_path)
    ranks[0].wait_until(lambda: is_being_written(tmp_path, 2 * SAVE_EVERY))
    for rank in ranks:
        rank.process.kill()
    assert [rank.end() for rank in ranks] == [-signal.SIGKILL] * 2
    assert is_being_written(tmp_path, 2 * SAVE_EVERY)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == [f"step_{SAVE_EVERY:08d}"]
    check_resumed(command, tmp_path, whole)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(KILLS))
def test_a_rank_killed_at_a_random_moment_costs_nothing(whole: Whole, dataset: Path, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for attempt in itertools.count():
        folder = tmp_path / str(attempt)
        command = options(folder, dataset)
        ranks = start_ranks(command, folder)
        victim = draw.randrange(2)
        wait_for_a_random_moment(ranks[0], folder, whole, draw)
        training, writing = "fresh start" in ranks[0].text, is_being_written(folder)
        ranks[victim].process.kill()
        if ranks[victim].end() == -signal.SIGKILL:
            break  # it had not come to its end before
    check_other_ends(ranks[1 - victim], folder, training)
    whole.kills += Counter(kills=1, in_training=training, in_a_write=writing, left_half_written=is_being_written(folder))
    check_resumed(command, folder, whole)


def wait_for_a_random_moment(rank: Process, folder: Path, whole: Whole, draw: random.Random) -> None:
    """In the writing of a checkpoint, or after any step, or while the ranks start. By what they have done and not by the clock: how much
    other work the machine has changes within minutes."""
    if draw.random() < 0.5:
        step = draw.randrange(SAVE_EVERY, STEPS + 1, SAVE_EVERY)
        complete = folder / "run" / "checkpoints" / f"step_{step:08d}"
        rank.wait_until(lambda: is_being_written(folder, step) or complete.exists())
        time.sleep(draw.uniform(0, whole.writing))
        return
    step = draw.randrange(-3, STEPS)
    if step < 0:
        time.sleep(draw.uniform(0, whole.starting))
    else:
        rank.wait_until(lambda: f"step {step}/" in rank.text or rank.process.poll() is not None)
        time.sleep(draw.uniform(0, whole.stepping))


def check_other_ends(other: Process, folder: Path, training: bool) -> None:
    """By itself, with an error unless the run was over; while the ranks have not met yet, it is the launcher that ends it."""
    if training:
        code = other.end(OTHER_ENDS)
        assert code != 0 or (folder / "run" / "checkpoints" / LAST).exists(), other.text
    else:
        other.kill_what_is_left()
        other.end()
