"""The planner's arithmetic of collectives against counts worked out by hand. Against real ranks: tests/distributed/test_plan.py."""

from dataclasses import replace
from typing import Any

import pytest

from model.config import ComputeConfig, GRTConfig
from pretrain.communication import GATHER, SCATTER, TP_GATHER, TP_REDUCE, TP_SCATTER, micro_step, optimizer_step, reductions
from pretrain.memory import Layout
from pretrain.parameters import count
from pretrain.zero_replay import ZeroSettings

MODEL = GRTConfig(vocab_size=128, hidden_size=8, num_heads=2, max_depth=4, max_positions=4)  # 1+1x4+1
LAYOUT = Layout(MODEL, ComputeConfig(), "bf16", sequence_length=4, micro_batch_size=2, data_parallel=2, accumulation_steps=4)
SETTINGS = ZeroSettings(
    prefetch_bucket=0, max_live=10**9, max_reuse_distance=10**9, persistence_threshold=16, reduce_bucket=10**9, sequential=False
)
SMALL = 3 * 2 + 4 + 1  # parameters: norms of three blocks, the gate's three norms and bias, the last norm
SMALL_NUMBERS = 8 * SMALL + 8  # one of the gate's norms is over both halves
TOKENS, POSITIONS, BLOCK = 128 * 8, 4 * 8, 12 * 8 * 8  # numbers in the large ones
CORE = BLOCK + 5 * 8 * 8


def gathered(residency: Any, depth: int = 3, first: bool = True, **change: Any) -> tuple[int, int]:
    layout = replace(LAYOUT, core_residency=residency)
    reuse = 0 if residency in ("loop", "every_use") else SETTINGS.max_reuse_distance
    settings = replace(SETTINGS, max_reuse_distance=reuse, **change)
    return micro_step(layout, depth, settings, first)[GATHER][:2]


def test_step_gathers_core_and_embedding_in_the_first_micro_step_only() -> None:
    # Five gathers: tokens, positions, prelude, core, coda. Later ones without tokens and core.
    assert gathered("step") == (5, TOKENS + POSITIONS + 2 * BLOCK + CORE)
    assert gathered("step", first=False) == (3, POSITIONS + 2 * BLOCK)


def test_fwd_bwd_gathers_everything_once_a_micro_step() -> None:
    assert gathered("fwd_bwd") == gathered("fwd_bwd", first=False) == (5, TOKENS + POSITIONS + 2 * BLOCK + CORE)


def test_loop_gathers_again_for_the_backward_pass() -> None:
    # Also the tied embedding twice more: the head reads it forward, and DeepSpeed fetches it for the head's backward pass.
    assert gathered("loop") == (12, 4 * TOKENS + 2 * (POSITIONS + 2 * BLOCK + CORE))


def test_sequential_gathers_take_a_call_a_parameter() -> None:
    assert gathered("step", sequential=True)[0] == 1 + 1 + 3 * 6 + 3  # matrices of three blocks, projection and gate
    assert gathered("step", sequential=True)[1] == gathered("step")[1]


@pytest.mark.parametrize("residency", ["step", "fwd_bwd", "loop"])
def test_gathers_do_not_depend_on_depth(residency: str) -> None:
    assert gathered(residency, 1) == gathered(residency, 2) == gathered(residency, 8)


def test_every_use_gathers_more_with_depth() -> None:
    assert gathered("loop")[0] < gathered("every_use", 1)[0] < gathered("every_use", 4)[0] < gathered("every_use", 8)[0]


def test_an_optimizer_step_is_its_micro_steps_and_the_gathers_of_small_parameters() -> None:
    planned = optimizer_step(replace(LAYOUT, core_residency="step"), 3, SETTINGS)
    calls, elements, size = planned[GATHER]
    assert calls == 5 + 3 * 3 + SMALL
    assert elements == (TOKENS + CORE) + 4 * (POSITIONS + 2 * BLOCK) + SMALL_NUMBERS
    assert size == 2 * elements
    assert planned[SCATTER][:2] == (4, 4 * count(LAYOUT.parameters))


def test_partitions_are_filled_up_to_equal_sizes() -> None:
    three = micro_step(replace(LAYOUT, data_parallel=3), 1, SETTINGS, first=False)
    assert three[SCATTER].elements == sum(-(-p.numel // 3) * 3 for p in LAYOUT.parameters) > count(LAYOUT.parameters)


def test_one_data_parallel_rank_communicates_nothing() -> None:
    assert not optimizer_step(replace(LAYOUT, data_parallel=1), 3, SETTINGS)


def test_gradients_are_reduced_when_the_bucket_overflows() -> None:
    assert reductions(LAYOUT, 10**9) == 1
    assert reductions(LAYOUT, 1) == len(LAYOUT.parameters)


def test_tensor_parallel_collectives_of_a_micro_step() -> None:
    split = replace(LAYOUT, tensor_parallel=2, splits_sequence=True)
    blocks, hidden = 1 + 3 + 1, 8 * 8
    planned = micro_step(split, 3, SETTINGS, first=True)
    # Two of each a block and direction; embedding and head one of each.
    assert planned[TP_GATHER][:2] == planned[TP_SCATTER][:2] == (4 * blocks + 2, (4 * blocks + 2) * hidden)
    replicated = [p for p in split.parameters if not p.sharded]
    assert planned[TP_REDUCE][:2] == (len(replicated) + 2, count(replicated) + 3 * 8)  # and two a chunk of the loss, 3 numbers a token
    plain = micro_step(replace(split, splits_sequence=False), 3, SETTINGS, first=True)
    assert TP_GATHER not in plain
    assert plain[TP_REDUCE][:2] == (4 * blocks + 2 + 2, (4 * blocks + 2) * hidden + 3 * 8)


def test_computing_again_communicates_again() -> None:
    def calls(compute: ComputeConfig) -> tuple[int, int]:
        planned = micro_step(replace(LAYOUT, tensor_parallel=2, splits_sequence=True, compute=compute), 3, SETTINGS, first=True)
        return planned[TP_GATHER].calls, planned[TP_SCATTER].calls

    gathers, scatters = calls(ComputeConfig())
    assert calls(ComputeConfig("recurrence")) == (gathers + 2 * 3, scatters + 2 * 3)
    assert calls(ComputeConfig("recurrence", keep_last=2)) == (gathers + 2, scatters + 2)
    assert calls(ComputeConfig("block")) == (gathers + 2 * 5, scatters + 5)  # a block's last collective is not repeated
    assert calls(ComputeConfig("nested")) == (gathers + 2 * (5 + 3), scatters + 5 + 2 * 3)
