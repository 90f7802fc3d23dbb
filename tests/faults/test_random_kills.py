"""`kill -9` of any rank at any moment loses nothing: the other rank ends by itself, no half checkpoint is accepted, and the resumed run
ends with the weights of an uninterrupted one, bit for bit.

Half of the kills fall at a random time, half of them in the writing of a random checkpoint. A trial draws from a generator of its own:
`pytest -m nightly 'tests/faults/test_random_kills.py::test_a_killed_run_ends_as_if_nothing_had_happened[17]'` repeats one.
"""

import itertools
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from pretrain.checkpoint_reader import CheckpointReader, find_newest
from tests.distributed.launching import write_run
from tests.faults.runs import Process, same_state, start_ranks

KILLS = 50
STEPS, SAVE_EVERY = 20, 4
LAST = f"step_{STEPS:08d}"
OTHER_ENDS = 30  # seconds, within which the other rank does


@dataclass
class Trials:
    whole: Path  # run_dir of the uninterrupted run
    seconds: float  # that it took
    writing: float  # seconds from the first to the last trace of a checkpoint being written
    counts: Counter[str] = field(default_factory=Counter)


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


def finish(command: list[str], folder: Path) -> Process:
    ranks = start_ranks(command, folder)
    assert [rank.end() for rank in ranks] == [0, 0], ranks[0].text + ranks[1].text
    return ranks[0]


def losses(run_dir: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def trials(dataset: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Trials]:
    folder = tmp_path_factory.mktemp("whole")
    begin = time.monotonic()
    ranks = start_ranks(options(folder, dataset), folder)
    written: list[float] = []
    while ranks[0].process.poll() is None:
        if is_being_written(folder, SAVE_EVERY):
            written.append(time.monotonic())
        time.sleep(0.001)
    assert [rank.end() for rank in ranks] == [0, 0]
    trials = Trials(folder / "run", time.monotonic() - begin, written[-1] - written[0])
    yield trials
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nan uninterrupted run took {trials.seconds:.1f} s, a checkpoint {trials.writing:.3f} s; {dict(trials.counts)}")


def wait_for_the_moment(rank: Process, folder: Path, trials: Trials, draw: random.Random) -> None:
    checkpoints = folder / "run" / "checkpoints"
    if draw.random() < 0.5:
        step = draw.randrange(SAVE_EVERY, STEPS + 1, SAVE_EVERY)
        rank.wait_until(lambda: is_being_written(folder, step) or (checkpoints / f"step_{step:08d}").exists())
        time.sleep(draw.uniform(0, trials.writing))
    else:
        time.sleep(draw.uniform(0, trials.seconds))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(KILLS))
def test_a_killed_run_ends_as_if_nothing_had_happened(trials: Trials, dataset: Path, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for attempt in itertools.count():
        folder = tmp_path / str(attempt)
        command = options(folder, dataset)
        ranks = start_ranks(command, folder)
        victim = draw.randrange(2)
        wait_for_the_moment(ranks[0], folder, trials, draw)
        training, writing = ranks[0].text != "", is_being_written(folder)
        ranks[victim].process.kill()
        if ranks[victim].end() == -signal.SIGKILL:
            break  # it had not come to its end before
    check_other_ends(ranks[1 - victim], folder, training)
    trials.counts += Counter(kills=1, in_training=training, in_a_write=writing, left_half_written=is_being_written(folder))

    checkpoints = folder / "run" / "checkpoints"
    for checkpoint in checkpoints.glob("step_*"):
        CheckpointReader(checkpoint).verify()
    newest = find_newest(checkpoints)
    resumed = finish(command, folder)
    assert resumed.text.startswith(f"resumed from {newest}" if newest else "fresh start")
    assert same_state(checkpoints / LAST, trials.whole / "checkpoints" / LAST)
    assert losses(folder / "run") == losses(trials.whole)


def check_other_ends(other: Process, folder: Path, training: bool) -> None:
    """By itself, with an error unless the run was over; while the ranks have not met yet, it is the launcher that ends it."""
    if training:
        code = other.end(OTHER_ENDS)
        assert code != 0 or (folder / "run" / "checkpoints" / LAST).exists(), other.text
    else:
        other.kill_what_is_left()
        other.end()
