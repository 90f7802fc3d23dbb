"""The GPU check on a CPU: every check that needs no GPU to run, that the checks see errors, and what is reported."""

import json
import os
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from model.config import GRTConfig
from model.ops import fused
from tools import gpu_check
from tools.gpu import attention, operators, speed, training
from tools.gpu.runner import Check, Row, Setting, run

MODEL = GRTConfig(vocab_size=128, hidden_size=32, num_heads=2, max_depth=2, max_positions=16)
SETTING = Setting(device="cpu", tokens=48, width=64, repeats=2, training_steps=3, model=MODEL, micro_batch=2, peak_flops=1e12)


def failed(rows: Any) -> list[Row]:
    return [row for row in rows if not row.ok]


@pytest.mark.usefixtures("fused_operators")
@pytest.mark.parametrize(
    "check", [gpu_check.about_device, operators.philox, operators.noise_field, operators.determinism, operators.compiled]
)
def test_operators_pass_on_a_cpu(check: Any) -> None:
    rows = list(check(SETTING))
    assert rows and not failed(rows)


@pytest.mark.usefixtures("fused_operators")
@pytest.mark.parametrize("dtype", operators.DTYPES)
def test_operators_are_precise_on_a_cpu(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "SIZES", [(1, 1, 2048), (37, 3, 257)])
    rows = list(operators.precision(SETTING, dtype))
    assert len(rows) == 3 and not failed(rows)


@pytest.mark.usefixtures("fused_operators")
def test_wrong_operators_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = fused.tail, 0

    def wrong(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        updated, gate_mean = right(*arguments, **options)
        return updated * (1 + 1e-2 * calls), gate_mean

    monkeypatch.setattr(fused, "tail", wrong)
    row = operators.errors(SETTING, "fp32", 37, 3, 257, "cpu")
    assert not row.ok
    assert "updated" in row.value or "gradient of" in row.value
    (row,) = operators.determinism(SETTING)
    assert not row.ok


def test_attention_that_leaves_a_document_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not failed(attention.inside_documents(SETTING))
    right = attention.causal_attention
    monkeypatch.setattr(
        attention, "causal_attention", lambda q, k, v, documents: right(q, k, v, documents if q.dtype == torch.double else None)
    )
    assert len(failed(attention.inside_documents(SETTING))) == 2


@pytest.mark.usefixtures("fused_operators")
def test_not_a_number_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fused.tail
    monkeypatch.setattr(fused, "tail", lambda *a, **options: tuple(x * float("nan") for x in right(*a, **options)))
    assert not operators.errors(SETTING, "fp32", 3, 1, 8, "cpu").ok


@pytest.mark.usefixtures("fused_operators")
def test_a_graph_that_does_not_read_its_counters_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a one is a stand-in for CUDA's, whose replay does nothing."""
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    assert [row.ok for row in operators.graph(SETTING)] == [True, False, False]


@pytest.mark.usefixtures("fused_operators")
@pytest.mark.parametrize("check", [speed.bandwidth, speed.training_gate, speed.decoding_gate])
def test_speeds_are_measured(check: Any) -> None:
    with torch.compiler.set_stance("force_eager"):
        rows = list(check(SETTING))
    assert rows and not failed(rows)
    assert all(value > 0 for row in rows for value in row.numbers.values())


@pytest.mark.usefixtures("fused_operators")
def test_training_agrees_and_its_step_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    checks = [
        Check("training", partial(training.same_losses, gate_ops="fused"), 100),
        Check("training twice", training.same_twice, 100),
        Check("step", partial(training.step_speed, gate_ops="ref", compile_="none"), 100),
    ]
    rows = list(run(checks, SETTING, time.monotonic() + 200, tmp_path / "log"))
    assert [row.ok for row in rows] == [True] * 6, rows
    assert rows[1].numbers["difference"] < 1e-5
    assert rows[2].value != rows[3].value  # inside documents, attention is another
    assert rows[5].numbers["mfu"] == pytest.approx(rows[5].numbers["tokens_per_second"] * 3 * MODEL.forward_flops_per_token(16, 2) / 1e12)


def test_the_largest_micro_batch_that_fits_is_taken() -> None:
    """A CPU counts as 2 GiB."""
    sizes = []
    for model in (MODEL, GRTConfig(max_depth=4)):
        config, planned = training.fitting(Setting(device="cpu", model=model), training.ComputeConfig())
        sizes.append(config.parallel.micro_batch_size)
    assert sizes[0] == 16 > sizes[1]


def test_losses_that_differ_fail() -> None:
    assert training.agreement("", [4.0, 3.0], [4.0, 3.0003], 1.1e-4).ok
    assert not training.agreement("", [4.0, 3.0], [4.0, 3.0004], 1.1e-4).ok
    assert not training.agreement("", [4.0, float("nan")], [4.0, 3.0], 1.1e-4).ok


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA Z9", None)]
)
def test_the_peak_follows_from_the_gpus_name(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert training.peak_flops(Setting()) == peak
    assert training.peak_flops(Setting(peak_flops=1e12)) == 1e12


@pytest.mark.parametrize(("verdicts", "code"), [([True, True], 0), ([True, False], 1), ([True, None], 1)])
def test_the_exit_code_is_0_only_if_every_check_ran_and_passed(verdicts: list[bool | None], code: int, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "check.json"
    rows = [Row(f"check {i}", "value", "expected", ok, {"seconds": 1.5}) for i, ok in enumerate(verdicts)]
    assert gpu_check.report(rows, output) == code
    lines = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines() if "|" in line]
    word = {True: "ok", False: "FAILED", None: "skipped"}
    assert lines == [
        ["check", "value", "expected", "ok"],
        *([f"check {i}", "value", "expected", word[ok]] for i, ok in enumerate(verdicts)),
    ]
    written = json.loads(output.read_text())
    assert written["passed"] == (code == 0)
    assert [row["ok"] for row in written["rows"]] == verdicts
    assert written["rows"][0]["numbers"] == {"seconds": 1.5}


def test_a_build_that_fails_is_a_failed_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:

    monkeypatch.setattr(gpu_check.sys, "executable", "/bin/false")
    assert gpu_check.build(time.monotonic() + 60).ok is False


def test_without_a_gpu_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--output", str(tmp_path / "check.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())
