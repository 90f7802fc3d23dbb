"""The plan's command: what it prints, what it refuses, and the arithmetic of its time."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from model.config import PRESETS, ComputeConfig
from pretrain.config import RunConfig, parse_run_config
from pretrain.memory import GIB, Layout
from tools.plan import DS_CONFIG, gpu_counts, main, number
from tools.planning import Machine, depths, estimate, executed_flops, search

RUN: dict[str, Any] = {
    "run_dir": "runs/x",
    "model": {"vocab_size": 512, "hidden_size": 128, "num_heads": 4, "core_blocks": 2, "max_depth": 4, "max_positions": 128},
    "data": {"path": "no/such/dataset", "sequence_length": 128},
    "schedule": {"total_tokens": 10**9, "learning_rate": 1e-3, "min_learning_rate": 1e-4},
    "optim": {"global_batch_size": 64},
    "parallel": {"micro_batch_size": 2},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(RUN))
    return file


@pytest.fixture
def config(path: Path) -> RunConfig:
    return parse_run_config(["--config", str(path)])


def run(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> tuple[int, str, str]:
    code = main(["--config", str(path), *options])
    return code, *capsys.readouterr()


def test_it_prints_a_run_without_its_dataset(path: Path, config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, path, "--gpus", "8", "--budget-tokens", "26e9")
    assert code == 0
    stored = config.model.parameter_count
    assert f"parameters stored          {stored:,}" in out
    assert f"executed at depth 4        {stored + 3 * config.model.core_parameter_count:,}" in out
    for text in (
        "fp32 gradients",
        "activations by checkpointing: none",
        "26,000,000,000 tokens",
        "Recommended",
        "Assumptions",
        "60% of 989 TFLOP/s",
    ):
        assert text in out
    for residency in ("step", "fwd_bwd", "loop", "every_use"):
        assert re.search(rf"{residency} +data +all-gather +\d+", out)


def test_settings_of_the_run_may_be_given(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--parallel.tensor_parallel", "2", "--compute.checkpointing", "nested", "--compute.keep_last", "1")
    _, out, _ = run(capsys, path, "--gpus", "8", *options)
    assert "TP 2 x DP 4" in out
    assert "checkpointing nested but for the last 1" in out


def test_a_sweep_prints_a_row_for_each_number_of_gpus(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, path, "--sweep", "1,8,48")
    rows = out.split("\n\n")[0].splitlines()[1:]
    assert code == 0
    assert [int(row.split()[0]) for row in rows] == [1, 8, 48]
    assert "does not divide" in rows[2]  # 64 sequences on 48 GPUs


def test_a_search_prints_settings_that_yaml_reads(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, path, "--gpus", "4", "--search")
    settings = yaml.safe_load("\n".join(out.split("\n\n")[0].splitlines()[1:]))
    assert settings["parallel"]["core_residency"] in ("step", "fwd_bwd", "loop")
    assert settings["compute"]["checkpointing"] == "none"  # everything fits


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpus", "3"], "multiple of parallel.micro_batch_size"),
        (["--gpus", "8", "--parallel.tensor_parallel", "3"], "does not divide"),
        (["--model.hidden_siz", "5"], "hidden_siz"),
        (
            ["--gpus", "8", "--compute.checkpointing", "recurrence", "--compute.activation_budget_gib", "0.001"],
            "activations need",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(path: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = run(capsys, path, *options)
    assert code == 2
    assert errors.startswith("error: ") and words in errors and errors.count("\n") == 1


def test_the_plan_is_of_stage_3_and_says_so(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ds_config = path.parent / "ds.json"
    ds_config.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    for mode in (["--gpus", "8"], ["--gpus", "8", "--search"], ["--sweep", "8"]):
        code, out, errors = run(capsys, path, *mode, "--ds_config", str(ds_config))
        assert (code, out) == (2, "") and "has zero_optimization.stage 2. Memory, communication and time are planned for stage 3" in errors


def test_a_machine_that_is_too_small_is_said(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, path, "--gpus", "4", "--gpu-memory", "3MiB")
    assert "DOES NOT FIT" in out
    assert "No layout fits" in out


def test_numbers_have_units() -> None:
    assert [number(text) for text in ("80GiB", "50GB/s", "989T", "20e-6")] == [80 * GIB, 50e9, 989e12, 20e-6]
    assert gpu_counts("8,64") == [8, 64]
    with pytest.raises(Exception, match="not a number with a unit"):
        number("eighty")
    with pytest.raises(Exception, match="not a list of GPU counts"):
        gpu_counts("8,,64")


def test_executed_flops_are_the_nominal_ones_but_for_causal_attention_hoisting_and_computing_again() -> None:
    model = replace(PRESETS["grt-1b"], vocab_size=50304)
    d, length = model.hidden_size, 2048
    plain = Layout(model, ComputeConfig(hoist=False), "bf16", length)
    blocks = 2 + 20 * 4 + 2
    nominal = 3 * (model.forward_flops_per_token(length, 4) - blocks * 2 * length * d)
    assert executed_flops(plain, 4) == nominal
    hoisted = executed_flops(replace(plain, compute=ComputeConfig()), 4)
    assert hoisted == nominal - 3 * (4 - 1) * 4 * d * d
    core = 20 * (24 * d * d + 2 * length * d) + 6 * d * d
    assert executed_flops(replace(plain, compute=ComputeConfig("recurrence", keep_last=1)), 4) == hoisted + 3 * core


def test_time_is_computing_and_communicating(config: RunConfig) -> None:
    machine = Machine()
    one, eight = (estimate(config, gpus, machine, DS_CONFIG) for gpus in (1, 8))
    assert one.communication_seconds == 0
    assert one.mfu == one.mfu_bound > 0.5
    assert eight.compute_seconds == pytest.approx(one.compute_seconds / 8)
    assert eight.step_seconds == eight.compute_seconds + eight.communication_seconds
    assert one.days(10**9) == pytest.approx(10**9 / config.tokens_per_step * one.step_seconds / 86400)


def test_auto_residency_and_a_budget_become_settings(config: RunConfig) -> None:
    budgeted = replace(config, compute=ComputeConfig("nested", activation_budget_gib=0.05))
    found = estimate(budgeted, 8, Machine(), DS_CONFIG)
    assert found.config.parallel.core_residency == "step"
    assert found.config.compute.activation_budget_gib is None
    assert found.config.compute.keep_last > 0


def test_the_search_checkpoints_only_when_memory_is_short(config: RunConfig) -> None:
    roomy = search(config, 8, Machine(), DS_CONFIG)
    assert roomy is not None and roomy.config.compute.checkpointing == "none"
    tight = search(config, 8, replace(Machine(), memory=int(roomy.memory.resident + 30e6)), DS_CONFIG)
    assert tight is not None and tight.fits
    assert tight.memory.total < roomy.memory.total
    assert tight.step_seconds >= roomy.step_seconds


def test_depths_are_those_of_the_sampler(config: RunConfig) -> None:
    assert depths(config.model) == [1, 2, 3, 4]
    assert depths(replace(config.model, depth_sampler="fixed")) == [4]
