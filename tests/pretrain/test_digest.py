import struct
import zlib

import torch

from pretrain.data import Batch
from pretrain.digest import tokens_digest


def batch(positions: list[int], seed: int = 0) -> Batch:
    rows = torch.stack([torch.randint(500, (5,), generator=torch.Generator().manual_seed(seed + position)) for position in positions])
    return Batch(rows[:, :-1], rows[:, 1:], torch.ones(len(rows), 4, dtype=torch.bool), torch.tensor(positions))


def test_the_digest_is_that_of_the_documented_bytes() -> None:
    row = Batch(torch.tensor([[1, 2]]), torch.tensor([[2, 3]]), torch.ones(1, 2, dtype=torch.bool), torch.tensor([7]))
    assert tokens_digest([row]) == zlib.crc32(struct.pack("<4q", 7, 1, 2, 3))


def test_the_digest_does_not_depend_on_how_sequences_are_batched() -> None:
    assert tokens_digest([batch([3, 4, 5, 6])]) == tokens_digest([batch([5, 6]), batch([3]), batch([4])])


def test_another_token_or_another_place_is_another_digest() -> None:
    digests = [tokens_digest([batch([3, 4])]), tokens_digest([batch([3, 4], seed=1)])]
    swapped = batch([3, 4])
    digests.append(tokens_digest([swapped._replace(sequence=swapped.sequence.flip(0))]))
    last = batch([3, 4])
    last.targets[0, -1] += 1
    digests.append(tokens_digest([last]))
    assert len(set(digests)) == 4
