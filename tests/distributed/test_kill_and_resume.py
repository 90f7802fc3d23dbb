"""`kill -9` at any moment loses nothing: the resumed run ends with the weights of an uninterrupted one, bit for bit."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from pretrain.checkpoint_reader import CheckpointReader
from tests.ranks import REPOSITORY

STEPS, SAVE_EVERY = 30, 6
LIMIT = 240  # seconds


def write_configs(folder: Path, dataset: Path) -> list[str]:
    """Options of a run of 30 random-depth steps on 2 data-parallel ranks."""
    run = {
        "run_dir": str(folder / "run"),
        "model": {"vocab_size": 512, "hidden_size": 128, "num_heads": 4, "core_blocks": 2, "max_depth": 3, "max_positions": 32},
        "data": {"path": str(dataset), "sequence_length": 32},
        "schedule": {"total_tokens": STEPS * 8 * 32, "warmup_tokens": 5 * 8 * 32},
        "optim": {"global_batch_size": 8, "precision": "bf16"},
        "parallel": {"micro_batch_size": 2},
        "checkpoint": {"every_steps": SAVE_EVERY},
        "eval": {"every_steps": 10, "max_sequences": 8},
        "log": {"every_steps": 1, "tensorboard": False},
    }
    folder.mkdir()
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    return ["--config", str(folder / "run.yaml"), "--ds_config", str(folder / "ds.json")]


def launch(options: list[str], output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "pretrain/train.py", *options]
    with output.open("ab") as file:
        return subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


def kill_everything(job: subprocess.Popen[bytes]) -> None:
    """The launcher, both ranks and their data workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    assert isinstance(job.args, list)
    for process in psutil.process_iter(["cmdline"]):  # torchrun gives the ranks sessions of their own
        if job.args[-1] in (process.info["cmdline"] or []):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    job.wait()


def kill_one_rank(job: subprocess.Popen[bytes]) -> None:
    """One rank only; the launcher must end the other."""
    ranks = [process for process in psutil.Process(job.pid).children() if "pretrain/train.py" in process.cmdline()]
    ranks[-1].kill()
    assert job.wait(timeout=60) != 0
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in ranks)


def last_step(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def wait_until(condition: Callable[[], bool], job: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert job.poll() is None, output.read_text()[-4000:]
        assert time.monotonic() < deadline, output.read_text()[-4000:]
        time.sleep(0.001)


def finish(options: list[str], output: Path) -> None:
    job = launch(options, output)
    try:
        assert job.wait(timeout=LIMIT) == 0, output.read_text()[-4000:]
    finally:
        kill_everything(job)


def state(run_dir: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(run_dir / "checkpoints" / f"step_{STEPS:08d}")
    return {f"{kind}/{name}": reader.read(name, kind) for name in reader.names() for kind in ("master", "exp_avg", "exp_avg_sq")}


def losses(run_dir: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def uninterrupted(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "job"
    finish(write_configs(folder, dataset), folder.parent / "output")
    return folder / "run"


def test_killed_run_ends_as_if_nothing_had_happened(dataset: Path, uninterrupted: Path, tmp_path: Path) -> None:
    folder, output = tmp_path / "job", tmp_path / "output"
    options = write_configs(folder, dataset)
    run_dir, checkpoints = folder / "run", folder / "run" / "checkpoints"

    def being_written(step: int) -> bool:
        return any(checkpoints.glob(f".tmp_step_{step:08d}*"))

    def kill_in_the_write(job: subprocess.Popen[bytes]) -> None:
        kill_everything(job)
        assert being_written(12)
        assert not (checkpoints / f"step_{12:08d}").exists()

    moments: list[tuple[Callable[[], bool], Callable[[subprocess.Popen[bytes]], None]]] = [
        (lambda: last_step(run_dir) >= 2, kill_one_rank),  # before any checkpoint
        (lambda: being_written(12), kill_in_the_write),
        (lambda: last_step(run_dir) >= 15, kill_one_rank),
        (lambda: (checkpoints / f"step_{18:08d}").exists(), kill_everything),  # just after one is complete
    ]
    for condition, kill in moments:
        job = launch(options, output)
        try:
            wait_until(condition, job, output)
            kill(job)
        finally:
            kill_everything(job)
    finish(options, output)

    assert "resumed from" in output.read_text()
    expected, found = state(uninterrupted), state(run_dir)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert losses(run_dir) == losses(uninterrupted)
