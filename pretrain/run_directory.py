"""The directory of a run, before anything expensive: it can be written, and no other run is at work in it."""

import fcntl
import os
import tempfile
from pathlib import Path


def make_run_dir(run_dir: Path) -> None:
    """Makes it with its folder of checkpoints, which may lie on a disk of its own. Called by every rank: nodes mount disks apart.

    Raises:
        ValueError: this process cannot write there.
    """
    checkpoints = run_dir / "checkpoints"
    for directory in (run_dir, checkpoints):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise ValueError(f"{directory} cannot be written ({error.strerror}). Mend that, or choose another: --run_dir DIR.") from error


def hold_run_dir(run_dir: Path) -> None:
    """Keeps a second run out of the directory until this process ends, however it ends.

    A POSIX lock: unlike flock's, it is not inherited by data workers, which outlive a killed trainer by seconds.

    Raises:
        ValueError: another run holds it.
    """
    descriptor = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT)  # closed with the process
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise ValueError(f"Another run is at work in {run_dir}. Wait for its end or stop it, or choose another: --run_dir DIR.") from error
