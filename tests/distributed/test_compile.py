"""A compiled recurrence under tensor and sequence parallelism: the collectives break its graph, and depth never compiles anew."""

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from tests.distributed.runs import small_run, start
from tests.ranks import run_ranks

GRAPHS = 13  # pieces of a recurrence of two blocks, forward: head, tail, and what lies between collectives (megatron-core 0.16.1)


def losses_and_graphs() -> tuple[list[tuple[float, float]], list[int]]:
    """Losses compiled and eager, and the graphs compiled so far, at depths that change."""
    engines = [start(small_run(Path("unused"), tensor_parallel=2, compute={"compile": way})) for way in ("recurrence", "none")]
    tokens = torch.arange(64).view(2, 32)
    losses, graphs = [], []
    for depth in (2, 1, 3, 0, 4):
        pair = []
        for engine in engines:
            loss, _ = engine(tokens, tokens, depth=depth, sequences_B=torch.tensor([0, 1]))
            engine.backward(loss)
            pair.append(loss.item())
        losses.append((pair[0], pair[1]))
        graphs.append(counters["stats"]["unique_graphs"])
    return losses, graphs


def test_depth_compiles_nothing_anew_under_tensor_parallelism() -> None:
    for losses, graphs in run_ranks(losses_and_graphs, 2, timeout=400):
        for compiled, eager in losses:
            assert compiled == pytest.approx(eager, rel=1e-6)
        assert graphs == [GRAPHS] * len(graphs)
