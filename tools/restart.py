"""What a command needs to go on after it was killed: a work folder with a lock, the job that was begun, and states saved on the way.

The one fact to know: a state is replaced atomically, after everything that it speaks of is synced. A folder with a state holds work
that is worth keeping.
"""

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

from pretrain.shards import DatasetError, canonical_json
from tools.tasks import Position

PARTIAL = ".partial"  # folder of the output that is being written
WORK = ".work"  # folder of what a restart needs
START_OVER = f"remove {WORK} and {PARTIAL} there to start from the beginning"


def write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class WorkFolder:
    """A folder beside the result, held by one command at a time.

    Raises:
        DatasetError: another command holds it.
    """

    STATES = ("hashing.state", "encoding.state")

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = open(path / "lock", "wb")  # noqa: SIM115, held as long as this object lives
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise DatasetError(f"another command is at work in {path.parent}: wait for it, or choose another --output") from None
        except OSError:  # a file system without locks
            pass

    @property
    def has_state(self) -> bool:
        return any((self.path / name).exists() for name in self.STATES)

    def save(self, name: str, state: dict[str, Any], payload: bytes = b"") -> None:
        """Replaces the state of this name."""
        unfinished = self.path / f"{name}.partial"
        write_synced(unfinished, canonical_json(state) + payload)
        os.replace(unfinished, self.path / name)

    def load(self, name: str) -> tuple[dict[str, Any], bytes] | None:
        try:
            data = (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        header, _, payload = data.partition(b"\n")
        return json.loads(header), payload

    def begin(self, settings: dict[str, Any], files: list[tuple[str, int, str]]) -> None:
        """Goes on with the job of a command that was killed, or begins a new one where it left no state.

        Args:
            files: name, size and stamp of each.

        Raises:
            DatasetError: that job had other settings, or a file that it has read differs.
        """
        job = self.path / "job.json"
        if self.has_state:
            self._check_same(json.loads(job.read_bytes()), settings, files)
        else:
            self.clear()
        write_synced(self.path / "job.json.partial", canonical_json({"settings": settings, "files": files}))
        os.replace(self.path / "job.json.partial", job)

    def _check_same(self, job: dict[str, Any], settings: dict[str, Any], files: list[tuple[str, int, str]]) -> None:
        directory = self.path.parent
        way_on = f"run it as before, or remove {self.path} to start from the beginning"
        for name in sorted(settings.keys() | job["settings"].keys()):
            old, new = job["settings"].get(name), settings.get(name)
            if old != new:
                raise DatasetError(f"a command was stopped in {directory} with {name} {old!r}, and now it is {new!r}: {way_on}")
        hashing, encoding = self.load("hashing.state"), self.load("encoding.state")
        read = max(Position(*state[0]["position"]).files_touched for state in (hashing, encoding) if state)
        if hashing and hashing[0]["complete"]:
            read = max(len(files), len(job["files"]))
        old_files, new_files = job["files"][:read], [list(file) for file in files[:read]]
        if old_files != new_files:
            name = next((name for name, *_ in (file for file in old_files if file not in new_files)), None)
            what = f"{name} was changed or removed" if name else "files were added"
            raise DatasetError(f"a command was stopped in {directory} after it had read the corpus, and since then {what}: {way_on}")

    def clear(self) -> None:
        """Forgets the job, its states first."""
        for path in sorted(self.path.iterdir(), key=lambda path: path.name not in self.STATES):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def release(self) -> None:
        """Leaves the folder for the next command."""
        self._lock.close()
