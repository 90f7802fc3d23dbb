"""Runs of the trainer that something happens to while they are at work."""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from pretrain.checkpoint_reader import KINDS, CheckpointReader
from tests.distributed.launching import end_what_is_left
from tests.ranks import REPOSITORY

LIMIT = 240  # seconds


class Process:
    """One rank of the trainer, or all of a run of one. Its output is in `output`."""

    def __init__(self, options: list[str], output: Path, environment: dict[str, str] | None = None) -> None:
        self.output = output
        self._seen = output.stat().st_size if output.exists() else 0
        variables = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GRT_TEST_RUN": str(output)} | (environment or {})
        with output.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "pretrain/train.py", *options],
                cwd=REPOSITORY,
                env=os.environ | variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.output.read_bytes()[self._seen :].decode(errors="replace")

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + LIMIT
        while text not in self.text:
            assert self.process.poll() is None and time.monotonic() < deadline, self.text[-4000:]
            time.sleep(0.01)

    def end(self) -> int:
        """The exit code; no process is left."""
        try:
            return self.process.wait(timeout=LIMIT)
        finally:
            self.process.kill()
            assert not end_what_is_left(str(self.output))


def state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Masters and moments."""
    reader = CheckpointReader(checkpoint)
    reader.verify()
    return {f"{kind}/{name}": reader.read(name, kind) for name in reader.names() for kind in KINDS}


def same_state(first: Path, second: Path) -> bool:
    """Bit for bit."""
    a, b = state(first), state(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
