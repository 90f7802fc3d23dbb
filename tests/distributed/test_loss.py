"""The chunked head and loss with the vocabulary split over two ranks: the same numbers as one rank, two all-reduces a chunk."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor.debug import CommDebugMode

from model import loss
from tests.ranks import run_ranks

TOKENS, COLUMNS, WIDTH, CHUNK = 22, 40, 8, 5
CHUNKS = 5


CASES = {
    "float64": (37, torch.float64),
    "second rank is all padding": (15, torch.float64),
    "bf16": (37, torch.bfloat16),
}


class Result(NamedTuple):
    """What one rank finds."""

    loss: Tensor
    dhidden_TD: Tensor
    dweight_VD: Tensor  # of this rank's rows
    collectives: int  # of forward and backward


def _results() -> dict[str, Result]:
    torch.distributed.init_process_group("gloo")
    group = torch.distributed.group.WORLD
    assert group is not None
    return {name: _result(vocab_size, dtype, group) for name, (vocab_size, dtype) in CASES.items()}


def _result(vocab_size: int, dtype: torch.dtype, group: ProcessGroup) -> Result:
    rows = COLUMNS // group.size()
    loss.CHUNK_LOGITS, loss.SLICE = CHUNK * rows, 2 * rows
    generator = torch.Generator().manual_seed(5)
    hidden_TD = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(COLUMNS, WIDTH, generator=generator).to(dtype)
    targets_T = torch.randint(0, vocab_size, (TOKENS,), generator=generator)
    token_weights_T = torch.rand(TOKENS, generator=generator)
    token_weights_T[3] = 0
    first = group.rank() * rows
    shard_VD = weight_VD[first : first + rows].clone().requires_grad_()
    with CommDebugMode() as communication:
        value = loss.linear_cross_entropy(
            hidden_TD, shard_VD, targets_T, token_weights_T, first_column=first, vocab_size=vocab_size, group=group
        )
        dhidden_TD, dweight_VD = torch.autograd.grad(value, (hidden_TD, shard_VD))
    return Result(value.detach(), dhidden_TD, dweight_VD, communication.get_total_counts())


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Result]:
    return run_ranks(_results, 1)[0]


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Result]]:
    return run_ranks(_results, 2)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(one_rank: dict[str, Result], two_ranks: list[dict[str, Result]], case: str) -> None:
    whole, first, second = one_rank[case], two_ranks[0][case], two_ranks[1][case]
    tolerance = 1e-2 if case == "bf16" else 1e-12
    assert first.loss == second.loss
    torch.testing.assert_close(first.loss, whole.loss, rtol=tolerance, atol=0)
    torch.testing.assert_close(first.dhidden_TD + second.dhidden_TD, whole.dhidden_TD, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(torch.cat((first.dweight_VD, second.dweight_VD)), whole.dweight_VD, rtol=tolerance, atol=tolerance)


def test_a_chunk_costs_two_collectives_and_in_a_group_of_one_none(one_rank: dict[str, Result], two_ranks: list[dict[str, Result]]) -> None:
    assert [result["bf16"].collectives for result in two_ranks] == [2 * CHUNKS, 2 * CHUNKS]
    assert one_rank["bf16"].collectives == 0
