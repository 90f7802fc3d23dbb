"""Digests over real ranks."""

import os
import re
import struct
import zlib

import pytest
import torch

from model.parallel import initialize_model_parallel
from pretrain.agreement import DisagreementError
from pretrain.data import Batch
from pretrain.digest import global_batch_digest, weights_digest
from pretrain.engine import initialize_distributed
from pretrain.topology import Topology
from pretrain.zero_state import own_master
from tests import toy_engine
from tests.ranks import run_ranks


def digest(tokens: list[list[int]], tensor_parallel: int) -> int | str:
    """In a rank: the digest of a global batch of which this rank reads a sequence of `tokens`, or the error."""
    rank = int(os.environ["RANK"])
    initialize_distributed(Topology.from_environment(os.environ), tensor_parallel)
    initialize_model_parallel(tensor_parallel)
    row = torch.tensor([tokens[rank]])
    position = torch.tensor([rank // tensor_parallel])
    try:
        return global_batch_digest([Batch(row[:, :-1], row[:, 1:], torch.ones(1, 2, dtype=torch.bool), position)], torch.device("cpu"))
    except DisagreementError as error:
        return str(error)


def test_ranks_of_a_model_parallel_group_that_read_different_tokens_stop() -> None:
    for message in run_ranks(digest, 2, [[1, 2, 3], [1, 2, 4]], 2):
        assert re.search("ranks 0 and 1 are of one model-parallel group, but read different tokens", message)


def test_the_digest_of_a_global_batch_is_that_of_all_data_parallel_ranks() -> None:
    parts = [zlib.crc32(struct.pack("<4q", position, *tokens)) for position, tokens in enumerate([[1, 2, 3], [1, 2, 4]])]
    assert run_ranks(digest, 2, [[1, 2, 3], [1, 2, 4]], 1) == [sum(parts)] * 2


def weights_of(corrupted: str | None, stage: int) -> list[tuple[int, tuple[int, int] | None]]:
    """In a rank of two tensor-parallel ones: digests before a step, after it, and of the same state again, with one bit of a parameter
    flipped on rank 1 before the last."""
    toy_engine.start(2)
    engine = toy_engine.build(2, stage=stage)
    digests = [weights_digest(engine)]
    toy_engine.train(engine, 0, 1)
    digests.append(weights_digest(engine))
    if corrupted and os.environ["RANK"] == "1":
        own_master(engine, dict(engine.module.named_parameters())[corrupted]).view(torch.int32)[0] ^= 1
    return [*digests, weights_digest(engine)]


@pytest.mark.parametrize(
    ("corrupted", "differing", "stage"), [(None, None, 3), ("up.weight", None, 3), ("norm.weight", (0, 1), 3), ("norm.weight", (0, 1), 1)]
)
def test_the_weights_digest_changes_with_any_bit_and_names_replicas_that_differ(
    corrupted: str | None, differing: tuple[int, int] | None, stage: int
) -> None:
    first, second = run_ranks(weights_of, 2, corrupted, stage)
    before, after, again = first
    assert first == second
    assert before[0] != after[0]
    assert (after[0] == again[0]) == (corrupted is None)
    assert (before[1], after[1], again[1]) == (None, None, differing)
