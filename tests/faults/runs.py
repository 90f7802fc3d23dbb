"""Runs of the trainer that something happens to while they are at work.

Their processes are forked from one that has imported the trainer, and lead a session, by which those are found that outlive them.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pretrain.checkpoint_reader import KINDS, CheckpointReader
from tests.ranks import SETTING, free_port, run_trainer, trainer_processes

LIMIT = 240  # seconds
GRACE = 15  # seconds: data workers look for their parent every 5


class Started:
    """A process of the trainer; the names are subprocess.Popen's."""

    def __init__(self, options: list[str], environment: dict[str, str], output: Path) -> None:
        self._process = trainer_processes().Process(target=run_trainer, args=(options, environment, output))
        self._process.start()
        assert self._process.pid
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("pretrain/train.py", timeout)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


class Process:
    """One rank of the trainer, or all of a run of one. Its output is in `output`, after that of those before."""

    started: "list[Process]" = []  # in this test; conftest.py ends them

    def __init__(self, options: list[str], output: Path, environment: dict[str, str] | None = None) -> None:
        self._output = output
        self._seen = output.stat().st_size if output.exists() else 0
        output.touch()
        self.process = Started(options, os.environ | SETTING | (environment or {}), output)
        self.started.append(self)

    @property
    def text(self) -> str:
        return self._output.read_bytes()[self._seen :].decode(errors="replace")

    def wait_for(self, text: str) -> None:
        self.wait_until(lambda: text in self.text)

    def wait_until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not true():
            assert self.process.poll() is None and time.monotonic() < deadline, self.text[-4000:]
            time.sleep(0.005)

    def end(self, limit: float = LIMIT) -> int:
        """The exit code; no process is left."""
        code = self.process.wait(limit)
        deadline = time.monotonic() + GRACE
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, left
        return code

    def left(self) -> dict[int, str]:
        """Processes that live of its session, itself and its data workers: id to command line."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or is not ours
                if os.getsid(int(folder.name)) == self.process.pid and (folder / "environ").read_bytes():  # a zombie has none
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return found

    def kill_what_is_left(self) -> None:
        self.process.kill()
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def start_ranks(options: list[str], folder: Path, size: int = 2) -> list[Process]:
    """A run of several ranks without a launcher: nobody ends the others of one that dies. Outputs in folder/output0, ..."""
    world = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [Process(options, folder / f"output{rank}", world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(size)]


def state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Masters and moments."""
    reader = CheckpointReader(checkpoint)
    reader.verify()
    return {f"{kind}/{name}": reader.read(name, kind) for name in reader.names() for kind in KINDS}


def same_state(first: Path, second: Path) -> bool:
    """Bit for bit."""
    a, b = state(first), state(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
