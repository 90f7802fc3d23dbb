"""Signals and a wall-clock budget end a step, save and exit with the code on which a batch script requeues; the rest is as if nothing had
happened."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from pretrain.stopping import REQUEUE, SAME_SIGNAL, parse_duration
from tests.distributed.launching import write_run
from tests.faults.runs import Process, same_state, start_ranks
from tests.ranks import REPOSITORY

STEPS = 12


def options(folder: Path, dataset: Path) -> list[str]:
    command = write_run(folder, dataset)
    path = folder / "run.yaml"
    config = yaml.safe_load(path.read_text())
    config["schedule"]["total_tokens"] = STEPS * 4 * 32
    config["checkpoint"]["every_steps"] = 5
    path.write_text(yaml.safe_dump(config))
    return command


@pytest.fixture(scope="module")
def whole(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    assert Process(options(folder, dataset), folder / "output").end() == 0
    return folder / "run" / "checkpoints" / f"step_{STEPS:08d}"


def last_checkpoint(folder: Path) -> str:
    return (folder / "run" / "checkpoints" / "latest").read_text().strip()


def test_a_run_whose_time_is_up_or_that_is_signalled_saves_and_goes_on(whole: Path, dataset: Path, tmp_path: Path) -> None:
    command, output = options(tmp_path, dataset), tmp_path / "output"
    run = Process([*command, "--stop_before", "0:00:00"], output)
    assert run.end() == REQUEUE
    assert "stopped after step 1 of 12, and saved: TIME_IS_UP" in run.text

    run = Process(command, output)
    run.wait_for("step 6/12  loss")
    run.process.send_signal(signal.SIGUSR1)
    assert run.end() == REQUEUE
    assert "SIGUSR1: the step under way is ended and saved" in run.text
    stopped = int(last_checkpoint(tmp_path).removeprefix("step_"))
    assert 6 <= stopped < STEPS and f"stopped after step {stopped} of 12, and saved: SIGNAL" in run.text

    run = Process(command, output)
    assert run.end() == 0
    assert f"step_{stopped:08d}: step {stopped} of 12" in run.text
    assert same_state(tmp_path / "run" / "checkpoints" / whole.name, whole)


def test_ranks_stop_after_the_same_step_when_one_of_them_is_signalled(dataset: Path, tmp_path: Path) -> None:
    command = options(tmp_path, dataset)
    ranks = start_ranks(command, tmp_path)
    ranks[0].wait_for("step 2/12  loss")
    os.killpg(ranks[1].process.pid, signal.SIGINT)  # Ctrl-C: its data worker gets it too
    assert [rank.end() for rank in ranks] == [REQUEUE, 0]  # one says so: srun would end the others of a rank that fails
    assert "stopped after step" in ranks[0].text
    assert (tmp_path / "run" / "checkpoints" / last_checkpoint(tmp_path) / "manifest.json").exists()


BLOCKED = """
import sys, threading
from pretrain.stopping import StopRequest

StopRequest(None).listen()
print("listening", flush=True)
lock = threading.Lock(); lock.acquire(); lock.acquire()
"""


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_ends_a_process_at_once_that_waits_in_c(first: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", BLOCKED], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "listening\n"
    process.send_signal(first)
    time.sleep(0.3)
    process.send_signal(first)  # Slurm sends several for one cause
    time.sleep(SAME_SIGNAL)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == REQUEUE
    assert "second signal (SIGTERM): ended without saving" in process.communicate()[1]


@pytest.mark.parametrize(("text", "seconds"), [("0:00:30", 30), ("23:50:00", 85800), ("100:00:00", 360000), ("2-01:00:00", 176400)])
def test_durations_are_those_of_slurm(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "1:60:00", "1:00", "-1:00:00", "1 day", "1-1"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="stop_before is .*; it must be hours:minutes:seconds"):
        parse_duration(text)
