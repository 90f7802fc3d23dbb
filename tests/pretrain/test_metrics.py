"""metrics.jsonl and TensorBoard: what is written, what a resume cuts, and that only rank 0 writes."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from model.config import GRTConfig
from pretrain.config import LogConfig, OptimConfig, RunConfig
from pretrain.metrics import MetricsLog, Speedometer
from pretrain.resume import Progress
from pretrain.schedule import ScheduleConfig
from pretrain.sources import DataConfig


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    (tmp_path / "run").mkdir()
    return RunConfig(
        run_dir=tmp_path / "run",
        model=GRTConfig(vocab_size=512, hidden_size=32, num_heads=2, max_depth=2, max_positions=64),
        data=DataConfig(path="unused", sequence_length=32),
        schedule=ScheduleConfig(total_tokens=4096),
        optim=OptimConfig(global_batch_size=8),
        log=LogConfig(tensorboard=True),
    )


def write_steps(run: RunConfig, start: int, stop: int, loss: float, rank: int = 0, applied: bool = True) -> None:
    """Logs the validation of a fresh start and the steps start + 1 ... stop."""
    with MetricsLog(run, rank, start, total_steps=16) as log:
        if start == 0:
            log.validation(0, {0: 5.0, 1: 4.0, 2: 3.5}, {}, full_depth=2)
        for step in range(start + 1, stop + 1):
            log.advance(step, applied=applied, spike=False)
            speed = {"tokens_per_second": 100.0, "data_wait": 0.02}
            log.train_step(Progress(step, 8 * step, 256 * step), loss, 2, 1e-3, 0.25, speed, torch.tensor([[0.9, 0.1], [0.8, 0.2]]))


def rows(run: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]


def steps(run: RunConfig) -> list[tuple[int, float | None]]:
    return [(row["step"], row.get("loss")) for row in rows(run)]


def test_a_row_holds_everything_about_its_step(run: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(run, 0, 1, loss=2.5)
    validation, train = rows(run)
    assert validation == {
        "step": 0,
        "validation_loss/depth_0": 5.0,
        "validation_loss/depth_1": 4.0,
        "validation_loss/depth_2": 3.5,
        "core_gain": 1.5,
        "depth_gain": 0.5,
    }
    assert train.pop("memory_gib") > 0
    gates = {key: pytest.approx(train.pop(key)) for key in list(train) if "/" in key}
    assert gates == {
        "gate_mean/recurrence_1": 0.9,
        "update_size/recurrence_1": 0.1,
        "gate_mean/recurrence_2": 0.8,
        "update_size/recurrence_2": 0.2,
    }
    assert train == {
        "step": 1,
        "tokens": 256,
        "loss": 2.5,
        "depth": 2,
        "learning_rate": 1e-3,
        "gradient_norm": 0.25,
        "skipped_steps": 0,
        "tokens_per_second": 100.0,
        "data_wait": 0.02,
    }
    shown = capsys.readouterr().out
    assert "step 0/16  validation loss  depth 0: 5.0000" in shown and "core gain 1.5000  depth gain 0.5000" in shown
    assert "step 1/16  loss 2.5000  depth 2  lr 1.00e-03  grad norm 0.250  100 tokens/s  data wait 2.0%" in shown


def test_a_dense_model_has_no_gains(run: RunConfig) -> None:
    with MetricsLog(run, 0, 0, total_steps=16) as log:
        log.validation(0, {0: 5.0}, {}, full_depth=0)
    assert rows(run) == [{"step": 0, "validation_loss/depth_0": 5.0}]


def test_a_skipped_step_is_said_and_counted(run: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(run, 0, 1, loss=2.5, applied=False)
    assert rows(run)[1]["skipped_steps"] == 1
    assert "step 1/16  SKIPPED: the gradients are not finite" in capsys.readouterr().out


def test_skipped_steps_between_rows_are_counted_once(run: RunConfig) -> None:
    with MetricsLog(run, 0, 0, total_steps=16) as log:
        for step, skipped in ((1, True), (2, True), (3, False), (4, False)):
            log.advance(step, applied=not skipped, spike=False)
            if step in (3, 4):
                log.train_step(Progress(step), 2.0, 0, 1e-3, 0.25, {"tokens_per_second": 1.0, "data_wait": 0.0}, torch.zeros(0, 2))
    assert [row["skipped_steps"] for row in rows(run)] == [2, 0]


def test_a_loss_that_is_not_finite_leaves_valid_json(run: RunConfig) -> None:
    write_steps(run, 0, 1, loss=float("nan"))
    assert "NaN" not in (run.run_dir / "metrics.jsonl").read_text()
    assert rows(run)[1]["loss"] is None


def test_rows_later_than_the_checkpoint_are_cut_at_a_resume(run: RunConfig) -> None:
    write_steps(run, 0, 5, loss=1.0)
    write_steps(run, 3, 4, loss=2.0)
    assert steps(run) == [(0, None), (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]


def test_a_half_written_last_row_is_cut(run: RunConfig) -> None:
    write_steps(run, 0, 3, loss=1.0)
    with (run.run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    write_steps(run, 3, 4, loss=2.0)
    assert steps(run) == [(0, None), (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]


@pytest.mark.parametrize("damage", [b"garbage\n\x00\xff\n", b"5\n", b"[1]\n", b'{"loss": 1.0}\n', b'{"step": "1"}\n'])
def test_lines_that_are_no_rows_are_left_out_and_rows_kept(run: RunConfig, damage: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(run, 0, 3, loss=1.0)
    path = run.run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + damage + b"".join(lines[2:]))
    write_steps(run, 3, 4, loss=2.0)
    assert [step for step, _ in steps(run)] == [0, 1, 2, 3, 4]
    assert "unreadable lines left out" in capsys.readouterr().err


def test_a_last_row_without_its_newline_is_kept_whole(run: RunConfig) -> None:
    write_steps(run, 0, 3, loss=1.0)
    path = run.run_dir / "metrics.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    write_steps(run, 3, 4, loss=2.0)
    assert [step for step, _ in steps(run)] == [0, 1, 2, 3, 4]


def test_a_second_fresh_start_leaves_no_row_of_the_first(run: RunConfig) -> None:
    write_steps(run, 0, 2, loss=1.0)  # died before its first checkpoint
    write_steps(run, 0, 1, loss=2.0)
    assert steps(run) == [(0, None), (1, 2.0)]


def test_tensorboard_forgets_the_steps_that_are_run_again(run: RunConfig) -> None:
    write_steps(run, 0, 5, loss=1.0)
    time.sleep(1.1)  # event files are ordered by the second in their names
    write_steps(run, 3, 4, loss=2.0)
    events = EventAccumulator(str(run.run_dir / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]
    assert [event.step for event in events.Scalars("core_gain")] == [0]


def test_other_ranks_write_nothing(run: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(run, 0, 1, loss=1.0, rank=1)
    assert list(run.run_dir.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_speed_counts_the_tokens_and_the_time_in_training_only(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    speed = Speedometer(run, world_size=1)
    speed.peak = 1e9
    speed.step(depth=2, sequences=8)
    clock[0] += 1
    with speed.paused():
        clock[0] += 100
    with speed.waiting_for_data():
        clock[0] += 0.5
    speed.step(depth=0, sequences=8)
    clock[0] += 0.5
    flops = 3 * 256 * (run.model.forward_flops_per_token(32, 2) + run.model.forward_flops_per_token(32, 0))
    assert speed.read() == {"tokens_per_second": 256.0, "mfu": pytest.approx(flops / 2 / 1e9), "data_wait": 0.25}
    speed.step(depth=1, sequences=8)
    clock[0] += 2
    assert speed.read()["tokens_per_second"] == 128.0  # since the last reading


def test_a_full_disk_under_the_metrics_ends_no_run(run: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    with open("/dev/full", "a", buffering=1) as full, MetricsLog(run, 0, 0, total_steps=16) as log:  # every write: no space left on device
        log.file.close()
        log.file = full
        log.validation(0, {0: 5.0}, {}, full_depth=0)
    assert "step 0/16  NOT LOGGED: /dev/full cannot be written: No space left on device" in capsys.readouterr().out
