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


def flip_a_byte(checkpoint: Path) -> None:
    path = next(checkpoint.glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_signalled_run_saves_and_goes_on_also_from_the_one_before_a_damaged_checkpoint(
    whole: Path, dataset: Path, tmp_path: Path
) -> None:
    command, output = options(tmp_path, dataset), tmp_path / "output"
    run = Process(command, output)
    run.wait_for("step 6/12  loss")
    run.process.send_signal(signal.SIGUSR1)
    assert run.end() == REQUEUE
    assert "SIGUSR1: the step under way is ended and saved" in run.text
    stopped = int(last_checkpoint(tmp_path).removeprefix("step_"))
    assert 6 <= stopped < STEPS and f"stopped after step {stopped} of 12, and saved: SIGNAL" in run.text

    flip_a_byte(tmp_path / "run" / "checkpoints" / f"step_{stopped:08d}")
    run = Process([*command, "--stop_before", "0:00:00"], output)
    assert run.end() == REQUEUE
    assert f"step_{stopped:08d}" in run.text and "does not match its sha256; going on from step_00000005" in run.text
    assert "stopped after step 6 of 12, and saved: TIME_IS_UP" in run.text

    run = Process(command, output)
    assert run.end() == 0
    assert "resumed from" in run.text and "step 6 of 12" in run.text
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


def test_a_full_disk_does_not_end_a_run_and_the_last_step_is_saved_when_there_is_room(dataset: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=50m", "tmpfs", str(disk)], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        command = [*options(tmp_path, dataset), "--run_dir", str(disk / "run"), "--checkpoint.every_steps", "1"]
        filler = disk / "filler"
        room = 64 << 10
        filler.write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - room))
        run = Process([*command, "--eval.every_steps", "100"], tmp_path / "output")
        run.wait_for("NOT SAVED: cannot save")
        assert "No space left on device" in run.text
        filler.unlink()
        assert run.end() == 0
        assert f"step {STEPS}/{STEPS}  loss" in run.text
        assert (disk / "run" / "checkpoints" / "latest").read_text().strip() == f"step_{STEPS:08d}"
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
