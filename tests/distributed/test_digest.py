"""The digest of a global batch over real ranks."""

import os
import re
import struct
import zlib

import torch

from model.parallel import initialize_model_parallel
from pretrain.agreement import DisagreementError
from pretrain.data import Batch
from pretrain.digest import global_batch_digest
from pretrain.engine import initialize_distributed
from pretrain.topology import Topology
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
