"""Starts `pretrain/train.py` as a user does, in real processes, and says how it ended and what it left running.

Every process of a run inherits a mark in its environment, by which those are found that outlive it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.ranks import REPOSITORY, free_port

LIMIT = 240  # seconds for a run of a few steps, on a machine that has other work too
MARK = "GRT_TEST_RUN"
SHOWN = 6000  # characters at the end of the output of a run that ended as it should not


@dataclass(frozen=True)
class Ended:
    """A run that is over. Its processes are gone; `left_over` are the command lines of those that had to be killed."""

    code: int
    output: str
    left_over: list[str]

    @property
    def errors(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("error")]

    def check_succeeded(self) -> None:
        assert self.code == 0 and not self.left_over, self.output[-SHOWN:]

    def check_refused(self, *words: str) -> None:
        """Exit status not 0, one error line with all of `words`, no traceback of ours, and no process left."""
        assert self.code != 0, self.output[-SHOWN:]
        assert len(self.errors) == 1, self.output[-SHOWN:]
        for word in words:
            assert word in self.errors[0], f"{word!r} is not in: {self.errors[0]}"
        assert "Traceback" not in self.output, self.output[-SHOWN:]
        assert not self.left_over


def write_run(folder: Path, dataset: Path) -> list[str]:
    """Options of a run of 4 steps of 4 sequences of 32 tokens, on a dataset with 512 pieces: folder/run.yaml and folder/ds.json."""
    run: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "model": {"vocab_size": 512, "hidden_size": 32, "num_heads": 2, "max_depth": 2, "max_positions": 32},
        "data": {"path": str(dataset), "sequence_length": 32},
        "schedule": {"total_tokens": 4 * 4 * 32, "learning_rate": 1e-3, "min_learning_rate": 1e-4},
        "optim": {"global_batch_size": 4, "precision": "fp32"},
        "checkpoint": {"every_steps": 2},
        "eval": {"every_steps": 4, "max_sequences": 4},
        "log": {"every_steps": 1, "tensorboard": False},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    return ["--config", str(folder / "run.yaml"), "--ds_config", str(folder / "ds.json")]


def launcher(name: str, ranks: int, port: int | None = None) -> list[str]:
    """The command line up to `pretrain/train.py`; a free port unless one is given."""
    port = port or free_port()
    return {
        "plain": [sys.executable],
        "deepspeed": [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), "--master_port", str(port)],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(port)],
        "srun": ["srun", "--ntasks", str(ranks), "--kill-on-bad-exit=1", sys.executable],
    }[name]


def run(start: list[str], options: list[str], environment: dict[str, str] | None = None) -> Ended:
    """Runs `start pretrain/train.py options` to its end, or for LIMIT seconds."""
    mark = uuid.uuid4().hex
    variables = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", MARK: mark} | (environment or {})
    process = subprocess.Popen(
        [*start, "pretrain/train.py", *options],
        cwd=REPOSITORY,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT)
    finally:
        left_over = end_what_is_left(mark)
        process.wait()
    return Ended(process.returncode, output, left_over)


def end_what_is_left(mark: str, grace: float = 15) -> list[str]:
    """Kills the processes with this mark that do not end by themselves in `grace` seconds (data workers look for their parent every
    5 seconds); their command lines."""
    deadline = time.monotonic() + grace
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return list(left.values())


def _marked(mark: str) -> dict[int, str]:
    """Processes that live with this mark in their environment: id to command line. Zombies have no environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def train_losses(run_dir: Path) -> list[float]:
    """The training losses in metrics.jsonl, by step."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]
