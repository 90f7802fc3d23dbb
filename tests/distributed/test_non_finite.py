"""A step with non-finite gradients, or one that the trainer refuses, changes no weight, on any rank, and training goes on: at any stage."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from pretrain.zero_state import own_master
from tests.distributed.runs import run_steps, small_run, start
from tests.ranks import run_ranks

KINDS = [(3, "fp32"), (2, "fp32"), (1, "fp32"), (2, "bf16"), (1, "bf16")]  # stages 1 and 2 accumulate gradients in another way in bf16


class Step(NamedTuple):
    applied: bool  # says DeepSpeed
    changed: bool  # this rank's masters
    norm: float


def steps(dataset: Path, stage: int, precision: str) -> list[Step]:
    """A good step, one with infinite gradients on rank 1, a good one, one that is refused, a good one."""
    config = small_run(dataset, precision=precision, core_residency="auto" if stage < 3 else "step")
    engine = start(config, stage)
    found = []
    for kind in ("good", "infinite", "good", "refused", "good"):
        before = [own_master(engine, parameter).clone() for parameter in engine.module.parameters()]
        infinite = kind == "infinite" and torch.distributed.get_rank() == 1
        poison = engine.module.final_norm.weight.register_hook(lambda grad: grad * float("inf")) if infinite else None
        run_steps(engine, config, 1, refuses=(lambda _: True) if kind == "refused" else None)
        if poison is not None:
            poison.remove()
        pairs = zip(before, engine.module.parameters(), strict=True)
        changed = any(not torch.equal(old, own_master(engine, parameter)) for old, parameter in pairs)
        found.append(Step(engine.was_step_applied(), changed, float(engine.get_global_grad_norm())))
    engine.destroy()
    return found


def steps_of_kinds(dataset: Path) -> list[list[Step]]:
    return [steps(dataset, *kind) for kind in KINDS]


@pytest.fixture(scope="module")
def ranks(dataset: Path) -> list[list[list[Step]]]:
    """What each of two ranks found, in the order of KINDS."""
    return run_ranks(steps_of_kinds, 2, dataset)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_infinite_gradients_on_one_rank_and_a_refusal_skip_the_step_on_all(ranks: list[list[list[Step]]], kind: tuple[int, str]) -> None:
    for rank in ranks:
        found = rank[KINDS.index(kind)]
        assert [step.applied for step in found] == [step.changed for step in found] == [True, False, True, False, True]
        assert [step.norm == float("inf") for step in found] == [False, True, False, True, False]
