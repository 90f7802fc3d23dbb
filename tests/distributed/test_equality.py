"""Every way of spreading and computing a run gives the losses and gradient norms of plain PyTorch in one process.

The combinations that are run have every valid pair of values between them; the nightly target runs all there are. They use the fused
gate operators where these are built, plain PyTorch never does. Ranks take seconds to start, so one start runs all the combinations of its
world size.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, islice, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.utils import clip_grad_norm_
from torch import Tensor

from model.config import ComputeConfig, GRTConfig
from model.depth import sample_depth
from model.grt import GRT
from model.parallel import ParallelGroups, layer_config
from pretrain.config import RunConfig
from pretrain.data import Batch
from pretrain.engine import average_over_ranks, parameter_groups
from pretrain.schedule import learning_rate
from pretrain.train import train_step
from tests.distributed.runs import small_run, start
from tests.ranks import run_ranks

STEPS = 20
GLOBAL_BATCH = 8
LENGTH = 16
TOLERANCE = 1e-5
# 120 of 128 columns: the padding lies on the second rank.
MODEL = GRTConfig(vocab_size=120, hidden_size=32, num_heads=2, max_depth=3, max_positions=32)


class Case(NamedTuple):
    """One combination."""

    tensor_parallel: int
    data_parallel: int
    sequence_parallel: bool
    stage: int
    core_residency: str  # "auto" below stage 3, where nothing is gathered
    checkpointing: str
    keep_last: int
    hoist: bool
    accumulation: int

    @property
    def valid(self) -> bool:
        return (
            (self.tensor_parallel > 1 or not self.sequence_parallel)
            and (self.core_residency == "auto") == (self.stage < 3)
            and (self.keep_last == 0 or self.checkpointing in ("recurrence", "nested"))
        )

    @property
    def pairs(self) -> set[Any]:
        """Any two of its fields."""
        return set(combinations(enumerate(self), 2))


VALUES: tuple[tuple[Any, ...], ...] = (
    (1, 2),
    (1, 2),
    (False, True),
    (0, 1, 2, 3),
    ("auto", "loop", "fwd_bwd", "step", "every_use"),
    ("none", "recurrence", "block", "nested"),
    (0, 1),
    (True, False),
    (1, 4),
)
GRID = [case for case in map(Case._make, product(*VALUES)) if case.valid]


def covering_set(grid: list[Case]) -> list[Case]:
    """Few combinations with all the pairs of the grid: always the one that adds the most."""
    left = set().union(*(case.pairs for case in grid))
    chosen = []
    while left:
        chosen.append(max(grid, key=lambda case: len(case.pairs & left)))
        left -= chosen[-1].pairs
    return chosen


PAIRWISE = covering_set(GRID)


def batches(micro_batch_size: int, rank: int, ranks: int) -> Iterator[Batch]:
    """A data-parallel rank's micro-batches of the run: two batches again and again, so that it learns, with noise of their own."""
    tokens = torch.randint(MODEL.vocab_size, (2 * GLOBAL_BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    tokens = tokens.repeat(STEPS // 2, 1)
    sequences = torch.arange(len(tokens))
    for number in range(rank, len(tokens) // micro_batch_size, ranks):
        rows = slice(number * micro_batch_size, (number + 1) * micro_batch_size)
        counts = torch.ones(micro_batch_size, LENGTH, dtype=torch.bool)
        yield Batch(tokens[rows, :-1], tokens[rows, 1:], counts, sequences[rows])


def run_config(case: Case) -> RunConfig:
    config = small_run(
        Path("unused"),
        model=MODEL,
        compute={"checkpointing": case.checkpointing, "keep_last": case.keep_last, "hoist": case.hoist},
        tensor_parallel=case.tensor_parallel,
        sequence_parallel=case.sequence_parallel,
        core_residency=case.core_residency,
        micro_batch_size=GLOBAL_BATCH // case.data_parallel // case.accumulation,
    )
    return replace(config, optim=replace(config.optim, gradient_clip=0.5))  # below the norms, so that every step is clipped


def report_norm_at_stage_0(engine: DeepSpeedEngine) -> None:
    """There DeepSpeed clips by the norm without keeping it."""

    def clip() -> None:
        engine._global_grad_norm = clip_grad_norm_(engine.module.parameters(), engine.gradient_clipping(), mpu=engine.mpu)

    engine.clip_fp32_gradients = clip


def curve(case: Case) -> Tensor:
    """Loss and gradient norm of each step, float64 [STEPS, 2]."""
    config = run_config(case)
    engine = start(config, case.stage)
    if case.stage == 0:
        report_norm_at_stage_0(engine)
    groups = ParallelGroups()
    own = batches(config.parallel.micro_batch_size, groups.get_data_parallel_rank(), groups.get_data_parallel_world_size())
    rows = []
    for step in range(STEPS):
        rate = learning_rate(config.schedule, (step + 1) * config.tokens_per_step)
        loss, _ = train_step(
            engine,
            list(islice(own, engine.gradient_accumulation_steps())),
            sample_depth(MODEL, config.seed, step),
            rate,
            torch.device("cpu"),
            measure=False,
        )
        rows.append((float(average_over_ranks(loss)), float(engine.get_global_grad_norm())))
    engine.destroy()
    return torch.tensor(rows, dtype=torch.float64)


def curves(cases: list[Case]) -> list[Tensor]:
    return [curve(case) for case in cases]


@pytest.fixture(scope="module")
def plain(world_of_one: None) -> Tensor:
    """The curve of a training loop without DeepSpeed: whole batches, nothing hoisted, nothing computed twice, no fused operators."""
    config = run_config(Case(1, 1, False, 0, "auto", "none", 0, False, 1))
    model = GRT(MODEL, layer_config(1, torch.float32), config.seed, ComputeConfig(hoist=False, gate_ops="ref"))
    optim = config.optim
    optimizer = torch.optim.AdamW(parameter_groups(model, optim.weight_decay), betas=(optim.beta1, optim.beta2), eps=optim.eps)
    rows = []
    for step, batch in enumerate(batches(GLOBAL_BATCH, 0, 1)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.schedule, (step + 1) * config.tokens_per_step)
        depth = sample_depth(MODEL, config.seed, step)
        loss, _ = model(batch.tokens, batch.targets, depth=depth, sequences_B=batch.sequence)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.gradient_clip)
        optimizer.step()
        rows.append((float(loss.detach()), float(norm)))
    return torch.tensor(rows, dtype=torch.float64)


def check(cases: list[Case], plain: Tensor, timeout: float) -> None:
    """Runs combinations of one world size, compares them and prints the worst."""
    (world_size,) = {case.tensor_parallel * case.data_parallel for case in cases}
    cases = sorted(cases)  # by tensor-parallel size: groups are split anew when it changes
    deviations = []
    for found in zip(*run_ranks(curves, world_size, cases, timeout=timeout), strict=True):
        deviations.append(torch.stack([((rank - plain).abs() / plain).amax(0) for rank in found]).amax(0))
    worst = torch.stack(deviations).amax(0)
    print(f"{len(cases)} combinations; the largest relative deviations: loss {worst[0]:.1e}, gradient norm {worst[1]:.1e}")
    failed = [
        f"{case}: loss {deviation[0]:.1e}, norm {deviation[1]:.1e}"
        for case, deviation in zip(cases, deviations, strict=True)
        if not (deviation <= TOLERANCE).all()  # NaN fails too
    ]
    assert not failed, "\n".join(failed)


def test_the_covering_set_has_every_valid_pair() -> None:
    assert set().union(*(case.pairs for case in PAIRWISE)) == set().union(*(case.pairs for case in GRID))
    assert len(PAIRWISE) < len(GRID) / 30


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_pair_of_settings_gives_plain_losses_and_norms(world_size: int, plain: Tensor) -> None:
    assert plain[-1, 0] < plain[0, 0] - 0.1  # it learns
    check([case for case in PAIRWISE if case.tensor_parallel * case.data_parallel == world_size], plain, timeout=600)


@pytest.mark.nightly
@pytest.mark.parametrize("partitioned", [False, True], ids=["stages0-2", "stage3"])
@pytest.mark.parametrize("layout", sorted({case[:3] for case in GRID}), ids=str)
def test_every_combination_gives_plain_losses_and_norms(layout: tuple[int, int, bool], partitioned: bool, plain: Tensor) -> None:
    check([case for case in GRID if case[:3] == layout and (case.stage == 3) == partitioned], plain, timeout=4 * 3600)
