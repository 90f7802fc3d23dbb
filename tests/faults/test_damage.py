"""Disks that take nothing and checkpoints that are not as they were written: nothing is lost, and the user is told."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.distributed.launching import write_run
from tests.faults.runs import Process, same_state, start_ranks

STEPS, SAVE_EVERY = 12, 4
LAST = f"step_{STEPS:08d}"


def options(folder: Path, dataset: Path) -> list[str]:
    """Checkpoints of the steps 4, 8 and 12."""
    command = write_run(folder, dataset)
    path = folder / "run.yaml"
    config = yaml.safe_load(path.read_text())
    config["schedule"]["total_tokens"] = STEPS * 4 * 32
    config["checkpoint"]["every_steps"] = SAVE_EVERY
    config["eval"]["every_steps"] = 100
    path.write_text(yaml.safe_dump(config))
    return command


def finish(ranks: list[Process]) -> None:
    assert [rank.end() for rank in ranks] == [0, 0], ranks[0].text + ranks[1].text


@pytest.fixture(scope="module")
def whole(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run on two ranks that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    finish(start_ranks(options(folder, dataset), folder))
    return folder / "run" / "checkpoints"


# ---- disks ----


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system for the checkpoints of the run in tmp_path."""
    directory = tmp_path / "run" / "checkpoints"
    directory.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=50m", "tmpfs", str(directory)], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small file system")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def remount(disk: Path, how: str, ranks: list[Process]) -> None:
    """Read-only ("ro") or not ("rw"), while training rests; with a file open for writing, it is refused."""
    deadline = time.monotonic() + 60
    while True:
        ranks[0].process.send_signal(signal.SIGSTOP)
        ended = subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], capture_output=True, text=True, check=False)
        ranks[0].process.send_signal(signal.SIGCONT)
        if ended.returncode == 0:
            return
        assert time.monotonic() < deadline, ended.stderr


def test_a_disk_that_is_read_only_for_a_while_ends_no_run_and_loses_nothing(whole: Path, dataset: Path, tmp_path: Path, disk: Path) -> None:
    ranks = start_ranks(options(tmp_path, dataset), tmp_path)
    ranks[0].wait_until((disk / "step_00000004").exists)
    remount(disk, "ro", ranks)
    ranks[0].wait_for("NOT SAVED: cannot save")
    remount(disk, "rw", ranks)
    finish(ranks)
    (line,) = {line for line in ranks[0].text.splitlines() if "NOT SAVED" in line}
    assert "earlier checkpoints are intact" in line and "Read-only file system" in line
    assert f"step {STEPS}/{STEPS}  loss" in ranks[0].text
    for name in ("step_00000004", LAST):
        assert same_state(disk / name, whole / name)


def test_a_run_is_refused_at_once_whose_checkpoints_cannot_be_written(dataset: Path, tmp_path: Path, disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    run = Process(options(tmp_path, dataset), tmp_path / "output")
    assert run.end() == 2
    assert run.text == f"error: {disk} cannot be written (Read-only file system). Mend that, or choose another: --run_dir DIR.\n"


def fill(disk: Path) -> Path:
    """The file to remove for room; 64 KiB are left."""
    filler = disk / "filler"
    filler.write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - (64 << 10)))
    return filler


def test_a_full_disk_ends_no_run_and_the_last_step_is_saved_when_there_is_room(
    whole: Path, dataset: Path, tmp_path: Path, disk: Path
) -> None:
    filler = fill(disk)
    ranks = start_ranks(options(tmp_path, dataset), tmp_path)
    ranks[0].wait_for("NOT SAVED: cannot save")
    assert "No space left on device" in ranks[0].text
    filler.unlink()
    finish(ranks)
    assert f"step {STEPS}/{STEPS}  loss" in ranks[0].text
    assert same_state(disk / LAST, whole / LAST)


def test_a_disk_that_stays_full_is_an_error_in_the_end_and_costs_the_steps_since_the_last_checkpoint(
    whole: Path, dataset: Path, tmp_path: Path, disk: Path
) -> None:
    command = options(tmp_path, dataset)
    interrupt(whole, tmp_path)
    filler = fill(disk)
    ranks = start_ranks(command, tmp_path)
    assert [rank.end() for rank in ranks] == [2, 2]
    *_, said, error = ranks[0].text.splitlines()
    reason = f"cannot save {disk / LAST} (earlier checkpoints are intact): "
    assert said.startswith(f"NOT SAVED: {reason}") and said.endswith("That was the last attempt.")
    assert error.startswith(f"error: {reason}") and "No space left on device" in error
    assert "error" not in ranks[1].text
    assert sorted(path.name for path in disk.iterdir()) == ["filler", "latest", "step_00000004", "step_00000008"]

    filler.unlink()
    ranks = start_ranks(command, tmp_path)
    finish(ranks)
    assert f"{disk}/step_00000008: step 8 of 12" in ranks[0].text
    assert same_state(disk / LAST, whole / LAST)


# ---- checkpoints ----


def flip_a_byte(checkpoints: Path) -> None:
    path = checkpoints / "step_00000008" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose_a_shard(checkpoints: Path) -> None:
    (checkpoints / "step_00000008" / "__1_0.distcp").unlink()


def write_latest(content: bytes) -> Callable[[Path], None]:
    def write(checkpoints: Path) -> None:
        (checkpoints / "latest").write_bytes(content)

    return write


def interrupt(whole: Path, folder: Path) -> Path:
    """A copy of the whole run as it was after step 8; its checkpoints."""
    shutil.copytree(whole.parent, folder / "run", dirs_exist_ok=True)
    checkpoints = folder / "run" / "checkpoints"
    shutil.rmtree(checkpoints / LAST)
    (checkpoints / "latest").write_text("step_00000008\n")
    return checkpoints


# What is said of each damage, with the folder of the checkpoints.
FLIPPED = "warning: cannot load {0}/step_00000008: the checkpoint is damaged: {0}/step_00000008/__0_0.distcp does not match its sha256"
LOST = "warning: {0}/step_00000008 is passed over: the checkpoint is incomplete: {0}/step_00000008/__1_0.distcp is missing"
LATEST_DAMAGED = "warning: {}/latest is damaged and names no checkpoint: the one of the highest step is taken for the newest"


@pytest.mark.parametrize(
    ("damage", "start", "warning"),
    [
        (flip_a_byte, 4, FLIPPED),
        (lose_a_shard, 4, LOST),
        (write_latest(b"step_0000"), 8, LATEST_DAMAGED),
        pytest.param(write_latest(b""), 8, LATEST_DAMAGED, marks=pytest.mark.nightly),
        pytest.param(write_latest(b"\xff\0\0"), 8, LATEST_DAMAGED, marks=pytest.mark.nightly),
    ],
    ids=["flipped byte", "missing shard", "half a latest", "empty latest", "latest of garbage"],
)
def test_a_run_goes_on_from_the_newest_whole_checkpoint(
    whole: Path, dataset: Path, tmp_path: Path, damage: Callable[[Path], None], start: int, warning: str
) -> None:
    command = options(tmp_path, dataset)
    checkpoints = interrupt(whole, tmp_path)
    damage(checkpoints)
    ranks = start_ranks(command, tmp_path)
    finish(ranks)
    assert f"resumed from {checkpoints}/step_{start:08d}: step {start} of {STEPS}\n" in ranks[0].text
    assert ranks[0].text.count("warning") == ranks[0].text.count(warning.format(checkpoints)) == 1, ranks[0].text
    assert "warning" not in ranks[1].text
    for name in ("step_00000008", LAST):
        assert same_state(checkpoints / name, whole / name)
    assert (checkpoints / "latest").read_text() == f"{LAST}\n"


def test_a_run_without_a_whole_checkpoint_is_not_begun_again_unasked(whole: Path, dataset: Path, tmp_path: Path) -> None:
    command = options(tmp_path, dataset)
    checkpoints = interrupt(whole, tmp_path)
    for checkpoint in checkpoints.glob("step_*"):
        (checkpoint / "__0_0.distcp").unlink()
    run = Process(command, tmp_path / "output")
    assert run.end() == 2
    assert run.text.startswith(f"error: {checkpoints} holds no whole checkpoint: {checkpoints}/step_00000008 is passed over: ")
    assert "or move this directory away to start again from step 0" in run.text


def test_a_run_whose_checkpoints_are_all_damaged_says_what_to_do(whole: Path, dataset: Path, tmp_path: Path) -> None:
    checkpoints = interrupt(whole, tmp_path)
    for checkpoint in checkpoints.glob("step_*"):
        with (checkpoint / "__0_0.distcp").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
    run = Process(options(tmp_path, dataset), tmp_path / "output")
    assert run.end() == 2
    (error,) = [line for line in run.text.splitlines() if line.startswith("error")]
    assert f"cannot load {checkpoints}/step_00000004: " in error
    assert f"no checkpoint before it is whole and of these settings: restore one, or move {checkpoints} away" in error
