"""Digests by which two runs are compared, of the tokens of a global batch and of the weights, and which find what was corrupted silently.

The tokens' does not depend on ranks or micro-batches, the weights' on the layout. Both are compared where ranks should have the same: the
ranks of a model-parallel group read the same sequences, each for itself, and hold the same part of a weight that is not split over them.
"""

import zlib
from collections.abc import Iterable, Iterator

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from model.parallel import ParallelGroups
from pretrain.agreement import DisagreementError
from pretrain.data import Batch
from pretrain.zero_state import own_master

PIECE = 2**22  # weights at once: 32 MiB as int64


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


def weights_digest(engine: DeepSpeedEngine) -> tuple[int, tuple[int, int] | None]:
    """Of the fp32 master weights, the same for two runs of one layout and stage. Called by every rank; one all-gather of 24 bytes a rank.

    Returns:
        it, and two ranks that hold different values of a weight that tensor-parallel ranks should have in common, if there are such. Where
        a GPU's kernels sum in no fixed order these may be roundings.
    """
    split, whole = (sum(_bits_digest(part) * number for number, part in _own_weights(engine, is_split)) for is_split in (True, False))
    mine = torch.tensor([ParallelGroups().get_data_parallel_rank(), _signed(split), _signed(whole)], device=engine.device)
    everyone = mine.new_empty(3 * torch.distributed.get_world_size())
    torch.distributed.all_gather_into_tensor(everyone, mine)
    first_of: dict[int, tuple[int, int]] = {}  # data-parallel rank -> the first rank with it, and its digest of what is whole
    total, differing = 0, None
    for rank, (data_parallel_rank, split, whole) in enumerate(everyone.view(-1, 3).tolist()):
        first, expected = first_of.setdefault(data_parallel_rank, (rank, whole))
        if whole != expected:
            differing = differing or (first, rank)
        total += (2 * rank + 1) * (split + whole)
    return total % 2**64, differing


def _own_weights(engine: DeepSpeedEngine, is_split: bool) -> Iterator[tuple[int, Tensor]]:
    """An odd number of its own and what this rank has, fp32 [n], of each parameter that is split over tensor-parallel ranks, or not."""
    for index, parameter in enumerate(engine.module.parameters()):
        if getattr(parameter, "tensor_model_parallel", False) == is_split:
            yield 2 * index + 1, own_master(engine, parameter)


def _bits_digest(values: Tensor) -> int:
    """Sum of the numbers' bits times odd numbers that rise, modulo 2^64; of fp32 [n], on its device."""
    total = 0
    for start in range(0, len(values), PIECE):
        bits = values[start : start + PIECE].view(torch.int32).long()
        total += int((bits * torch.arange(2 * start + 1, 2 * (start + len(bits)), 2, device=bits.device)).sum())
    return total


def _signed(value: int) -> int:
    """Modulo 2^64, as an int64 holds it."""
    return (value + 2**63) % 2**64 - 2**63
