"""What a step communicates: counted, for every residency of the core, at depths that change from step to step."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from benchmarks.communication import Communication, step_communication
from model.config import GRTConfig
from pretrain.data import Batch
from pretrain.validation import validation_losses
from tests.distributed.runs import small_run, start
from tests.ranks import run_ranks

MODEL = GRTConfig(vocab_size=512, hidden_size=64, num_heads=4, core_blocks=2, max_depth=8, max_positions=32)
# The first step records the order of the modules.
DEPTHS = [2, *random.Random(0).sample(range(1, 9), k=8)]
SHORT_DEPTHS = [2, 1, 8]
GATHERED_ONCE = ("step", "fwd_bwd", "loop")


def gathered(engine: DeepSpeedEngine) -> set[str]:
    """Names of the parameters that lie whole on this rank."""
    parameters: dict[str, Any] = dict(engine.module.named_parameters())  # with DeepSpeed's attributes
    return {name for name, parameter in parameters.items() if parameter.ds_status == ZeroParamStatus.AVAILABLE}


def communication_by_depth(tensor_parallel: int, residency: str, micro_batch_size: int, compute: dict[str, Any]) -> dict[str, Any]:
    """What each step communicates and leaves gathered, with an evaluation before the last one."""
    config = small_run(
        Path("unused"),
        model=MODEL,
        compute=compute,
        tensor_parallel=tensor_parallel,
        core_residency=residency,
        micro_batch_size=micro_batch_size,
    )
    engine = start(config)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    depths = DEPTHS if residency in GATHERED_ONCE and tensor_parallel == 1 else SHORT_DEPTHS
    steps = [step_communication(engine, depth) for depth in depths]
    after_step = gathered(engine)
    batch = Batch(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool), torch.tensor([0, 1]))
    validation_losses(engine, {"data": [batch, batch]}, [0, 1, 4, 8, 16], torch.device("cpu"))
    after_evaluation = gathered(engine)
    after = step_communication(engine, 3)
    loss, _ = engine(tokens, tokens, depth=2, sequences_B=torch.tensor([0, 1]))
    engine.backward(loss)
    between = gathered(engine)
    engine.step()
    sizes = {name: parameter.ds_numel for name, parameter in engine.module.named_parameters()}
    micro_steps = engine.gradient_accumulation_steps()
    engine.destroy()
    return {
        "steps": steps,
        "after": after,
        "left": (after_step, after_evaluation),
        "between": between,
        "micro_steps": micro_steps,
        "sizes": sizes,
    }


def all_residencies(tensor_parallel: int, micro_batch_size: int, compute: dict[str, Any]) -> dict[str, dict[str, Any]]:
    names = (*GATHERED_ONCE, "every_use")
    return {name: communication_by_depth(tensor_parallel, name, micro_batch_size, compute) for name in names}


LAYOUTS = {"tp1-dp2-accumulation4": (1, 2, 1, {}), "tp2-dp2-nested": (2, 4, 4, {"checkpointing": "nested"})}


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=list(LAYOUTS))
def measured(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    tensor_parallel, world_size, micro_batch_size, compute = request.param
    return run_ranks(all_residencies, world_size, tensor_parallel, micro_batch_size, compute, timeout=400)


def data_traffic(step: Communication) -> tuple[Any, Any]:
    return step.data_calls, step.data_elements


@pytest.mark.parametrize("residency", GATHERED_ONCE)
def test_gathers_and_reductions_do_not_depend_on_depth(measured: list[dict[str, dict[str, Any]]], residency: str) -> None:
    for rank in measured:
        expected = data_traffic(rank[residency]["steps"][1])
        for step in [*rank[residency]["steps"][2:], rank[residency]["after"]]:
            assert data_traffic(step) == expected


def test_stock_hooks_gather_more_with_depth(measured: list[dict[str, dict[str, Any]]]) -> None:
    for rank in measured:
        _, shallow, deep = (step.data_elements["all-gather"] for step in rank["every_use"]["steps"])
        assert deep > 2 * shallow


def test_each_residency_gathers_what_it_says(measured: list[dict[str, dict[str, Any]]]) -> None:
    """Elements of an optimizer step: what the residency keeps once; the rest once a micro-step, or with `loop` twice, and the tied
    embedding, which `loop` gathers for the embedding and for the head, four times."""
    for rank in measured:
        for residency in GATHERED_ONCE:
            result = rank[residency]
            sizes, step = result["sizes"], result["steps"][1]
            small = sum(sizes[name] for name in result["left"][0])
            core = sum(size for name, size in sizes.items() if name.startswith("core.") and name not in result["left"][0])
            embedding = sizes["embedding.tokens.weight"]
            rest = sum(sizes.values()) - small - core - embedding
            micro_steps = result["micro_steps"]
            expected = {
                "step": small + core + embedding + micro_steps * rest,
                "fwd_bwd": small + micro_steps * (core + embedding + rest),
                "loop": small + micro_steps * (2 * (core + rest) + 4 * embedding),
            }[residency]
            assert step.data_elements["all-gather"] == expected
            assert step.data_elements["reduce-scatter"] == micro_steps * sum(sizes.values())


def test_nothing_is_left_gathered_but_what_deepspeed_always_keeps(measured: list[dict[str, dict[str, Any]]]) -> None:
    for rank in measured:
        for result in rank.values():
            after_step, after_evaluation = result["left"]
            assert after_step == after_evaluation
            assert all(result["sizes"][name] <= 10 * MODEL.hidden_size for name in after_step)


def test_only_the_step_residency_keeps_the_core_between_micro_steps(measured: list[dict[str, dict[str, Any]]]) -> None:
    for rank in measured:
        for residency, result in rank.items():
            kept = {name for name in result["sizes"] if name.startswith("core.") or name == "embedding.tokens.weight"}
            assert (kept <= result["between"]) == (residency == "step")
            assert "prelude.0.mlp.up.weight" not in result["between"]
