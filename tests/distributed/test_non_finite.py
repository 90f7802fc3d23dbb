"""A step with non-finite gradients changes no weight, on any rank, and training goes on."""

from pathlib import Path

import torch

from tests.distributed.runs import run_steps, small_run, start
from tests.ranks import run_ranks


def weights_around_a_bad_step(dataset: Path) -> tuple[list[bool], list[bool]]:
    """For a good, a bad and a good step: whether DeepSpeed applied it, and whether this rank's partitions changed."""
    config = small_run(dataset)
    engine = start(config)
    rank = torch.distributed.get_rank()
    applied, changed = [], []
    for step in range(3):
        before = [group.clone() for group in engine.optimizer.fp32_partitioned_groups_flat]
        poison = engine.module.final_norm.weight.register_hook(lambda grad: grad * float("inf")) if step == 1 and rank == 1 else None
        run_steps(engine, config, 1)
        if poison is not None:
            poison.remove()
        applied.append(engine.was_step_applied())
        after = engine.optimizer.fp32_partitioned_groups_flat
        changed.append(any(not torch.equal(old, new) for old, new in zip(before, after, strict=True)))
    return applied, changed


def test_infinite_gradient_on_one_rank_skips_the_step_on_all(dataset: Path) -> None:
    for applied, changed in run_ranks(weights_around_a_bad_step, 2, dataset):
        assert applied == [True, False, True]
        assert changed == [True, False, True]
