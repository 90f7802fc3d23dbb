"""The planner's arithmetic of memory against numbers worked out by hand. Against real engines: tests/distributed/test_plan.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model.config import PRESETS, ComputeConfig, GRTConfig
from pretrain.memory import (
    GIB,
    Layout,
    activations,
    block_inside,
    choose_residency,
    gathered_elements,
    keep_last_for_budget,
    memory,
    settle,
)
from pretrain.parameters import count
from tests.distributed.runs import small_run

MODEL = GRTConfig(vocab_size=128, hidden_size=8, num_heads=2, max_depth=4, max_positions=4)
# 2 sequences of 4 tokens: a state is 8 x 8 numbers, 256 bytes.
SMALL = Layout(MODEL, ComputeConfig(), "fp32", sequence_length=4, micro_batch_size=2)
LARGE = Layout(PRESETS["grt-1b"], ComputeConfig("recurrence"), "bf16", sequence_length=2048, micro_batch_size=4, data_parallel=8)


def test_a_block_keeps_what_its_operations_need() -> None:
    # Normed inputs of attention and MLP, state between them: 3 x 256; mean and deviation of two norms: 2 x 64; q, k, v, attention's
    # output: 4 x 256; 8 tokens x 2 heads of sums: 64; before and after GELU: 2 x 1024.
    assert block_inside(SMALL) == 3 * 256 + 2 * 64 + 4 * 256 + 64 + 2 * 1024


def test_under_sequence_parallelism_a_rank_keeps_its_part_except_of_gathered_inputs() -> None:
    split = replace(SMALL, tensor_parallel=2, splits_sequence=True)
    assert block_inside(split) == 2 * 256 + 128 + 2 * 32 + 4 * 128 + 32 + 2 * 512


def test_tensor_parallelism_alone_repeats_the_residual_stream() -> None:
    assert block_inside(replace(SMALL, tensor_parallel=2)) == 3 * 256 + 2 * 64 + 4 * 128 + 32 + 2 * 512


def test_variants_of_a_block() -> None:
    def difference(**change: Any) -> int:
        return block_inside(replace(SMALL, model=replace(MODEL, **change))) - block_inside(SMALL)

    assert difference(num_kv_heads=1) == -256  # half of keys and values
    assert difference(mlp="swiglu", ffn_hidden_size=32) == 2 * 1024  # four states of the MLP's width instead of two
    assert difference(norm="rmsnorm") == 0
    assert block_inside(replace(SMALL, model=replace(MODEL, norm="rmsnorm"), composite_rms_norm=True)) - block_inside(SMALL) == 2 * 256


def kept(checkpointing: Any, depth: int, precision: Any = "bf16", **other: Any) -> int:
    return activations(replace(SMALL, compute=ComputeConfig(checkpointing, **other), precision=precision), depth).kept


def test_a_checkpointed_recurrence_keeps_2_d_bytes_a_token() -> None:
    for mode in ("recurrence", "nested"):
        assert kept(mode, 4) - kept(mode, 3) == 2 * 8 * 8


def test_a_recurrence_keeps_its_blocks_gate_and_projection() -> None:
    # bf16, a state is 128 bytes. Hoisted, gate: normed state, W1's product, the same scaled, SiLU, and sigmoid in fp32 (256); projection:
    # noisy state; blend: 1 - g in fp32, candidate; the state and the block's input.
    block = block_inside(replace(SMALL, precision="bf16"))
    assert kept("none", 3) - kept("none", 2) == block + (4 * 128 + 256) + 128 + (256 + 128) + 2 * 128
    # Plain: the gate has the concatenation, it normed (2 states each), W1's product, SiLU; the projection a concatenation.
    assert kept("none", 3, hoist=False) - kept("none", 2, hoist=False) == block + (6 * 128 + 256) + 2 * 128 + (256 + 128) + 2 * 128
    # By block: without what is inside the block.
    assert kept("block", 3) - kept("block", 2) == kept("none", 3) - kept("none", 2) - block


def test_the_last_recurrences_may_be_kept_whole() -> None:
    whole = kept("none", 3) - kept("none", 2)
    assert kept("recurrence", 4, keep_last=2) - kept("recurrence", 4, keep_last=1) == whole - 128
    assert kept("recurrence", 4, keep_last=4) == kept("none", 4)


def test_recurrences_without_gradient_keep_nothing() -> None:
    truncated = replace(SMALL, model=replace(MODEL, backprop_depth=2))
    assert activations(truncated, 4).kept == activations(SMALL, 2).kept


def test_partitions_and_optimizer_take_18_bytes_a_parameter_in_bf16_and_20_in_fp32() -> None:
    parameters = count(SMALL.parameters)
    assert memory(replace(SMALL, precision="bf16"), 1, reduce_bucket=0).resident == 18 * parameters
    assert memory(SMALL, 1, reduce_bucket=1000).resident == 20 * parameters + 4000
    shares = sum(-(-p.numel // 3) for p in SMALL.parameters)  # the last rank's partition is filled up
    assert memory(replace(SMALL, data_parallel=3), 1, reduce_bucket=0).optimizer == 12 * shares


def test_gathered_weights_by_residency() -> None:
    gathered = {
        residency: gathered_elements(replace(LARGE, core_residency=residency)) for residency in ("step", "fwd_bwd", "loop", "every_use")
    }
    assert gathered["step"] == gathered["fwd_bwd"] == count(LARGE.parameters)
    assert gathered["loop"] < gathered["every_use"] < gathered["step"]
    assert memory(replace(LARGE, data_parallel=1), 1, 0).gathered == 0  # the partition of one rank is the whole


def test_the_largest_keep_last_that_stays_within_the_budget() -> None:
    def peak(keep: int) -> float:
        return activations(replace(LARGE, compute=ComputeConfig("recurrence", keep_last=keep)), 4).peak * 1.05 / GIB

    # The last recurrence is the first to go back, so to keep it whole needs no more than to compute it again.
    assert [keep_last_for_budget(LARGE, peak(k) + 0.001) for k in range(5)] == [1, 1, 2, 3, 4]
    assert keep_last_for_budget(LARGE, peak(2) - 0.001) == 1


def test_a_budget_that_nothing_fits_is_refused_with_what_is_needed() -> None:
    with pytest.raises(ValueError, match=r"compute.activation_budget_gib is 1.5, but activations need [0-9.]+ GiB at depth 4 .*recurrence"):
        keep_last_for_budget(LARGE, 1.5)


def test_residency_auto_is_the_first_that_fits() -> None:
    needed = memory(LARGE, 4, 0).total
    assert choose_residency(LARGE, int(needed * 1.2), 0) == "step"
    assert choose_residency(LARGE, int(needed * 0.9), 0) == "loop"


def test_residency_is_step_at_the_stages_that_free_no_weights() -> None:
    run = small_run(Path("unused"), core_residency="auto")
    chosen = [settle(run, 1, device_bytes=0, reduce_bucket=0, stage=stage).parallel.core_residency for stage in (1, 2, 3)]
    assert chosen == ["step", "step", "loop"]


def test_memory_is_planned_for_the_deepest_step() -> None:
    assert MODEL.deepest == 4
    assert replace(MODEL, depth_sampler="poisson").deepest == 16
