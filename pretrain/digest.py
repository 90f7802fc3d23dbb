"""A digest of the tokens of a global batch: two runs that log the same one read the same.

It does not depend on ranks or micro-batches. The ranks of a model-parallel group read the same sequences, each for itself; that they got
the same tokens is checked with it.
"""

import zlib
from collections.abc import Iterable

import torch

from model.parallel import ParallelGroups
from pretrain.agreement import DisagreementError
from pretrain.data import Batch


def tokens_digest(batches: Iterable[Batch]) -> int:
    """Sum over the sequences of crc32(position as int64, tokens as int64, last target as int64), little-endian."""
    total = 0
    for batch in batches:
        rows = torch.cat((batch.sequence[:, None], batch.tokens, batch.targets[:, -1:]), dim=1).numpy().astype("<i8", copy=False)
        total += sum(zlib.crc32(row) for row in rows)
    return total


def global_batch_digest(batches: Iterable[Batch], device: torch.device) -> int:
    """The digest of all ranks' micro-batches of a step. Called by every rank; one all-gather of 16 bytes a rank.

    Raises:
        DisagreementError: on every rank, where the ranks of a model-parallel group read different tokens.
    """
    mine = torch.tensor([ParallelGroups().get_data_parallel_rank(), tokens_digest(batches)], device=device)
    everyone = mine.new_empty(2 * torch.distributed.get_world_size())
    torch.distributed.all_gather_into_tensor(everyone, mine)
    digests: dict[int, tuple[int, int]] = {}  # data-parallel rank -> the first rank with it, and its digest
    for rank, (data_parallel_rank, digest) in enumerate(everyone.view(-1, 2).tolist()):
        first, expected = digests.setdefault(data_parallel_rank, (rank, digest))
        if digest != expected:
            raise DisagreementError(
                f"ranks {first} and {rank} are of one model-parallel group, but read different tokens at the same positions (digests "
                f"{expected:x} and {digest:x}). One of their nodes holds a damaged or other copy of the data: tools/verify_shards.py there."
            )
    return sum(digest for _, digest in digests.values())
