"""Batches of token sequences for training and validation.

Responsible for the way from a position of the stream to tensors; not for the order (`order.py`) nor for files (`shards.py`). The one
fact to know: the stream is a function of (dataset, seed, sequence length, window, position). Ranks, micro-batches and workers only
decide who evaluates which position, so the whole state of the data is one integer.
"""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from pretrain.order import SequenceOrder
from pretrain.remote import is_url
from pretrain.shard_cache import CachedTokenReader, Prefetcher, default_directory, open_remote_dataset
from pretrain.shards import DatasetError, Index, TokenReader, open_dataset


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens lie and how they are cut and shuffled.

    Raises:
        ValueError: a field is out of range.
    """

    path: str | Path  # a directory that tools/prepare_data.py wrote, or the URL of one that fsspec opens (http, https, s3, ...)
    sequence_length: int  # S: a sequence is S + 1 tokens, S of them inputs and S targets
    workers: int = 1  # processes that read ahead; 0: the training process reads. The stream does not depend on it
    window_shards: int = 16  # shards that are shuffled together; part of the stream's definition
    # Where the shards of a URL are kept while they are read: a directory on the node's own disk that ranks and jobs share, and its bound.
    cache_dir: str | None = None  # null: /var/tmp/grt-shards-UID
    cache_gib: float = 32

    def __post_init__(self) -> None:
        if not is_url(self.path):
            object.__setattr__(self, "path", Path(self.path))
        for name, least in (("sequence_length", 1), ("workers", 0), ("window_shards", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"data.{name} is {getattr(self, name)}, but must be at least {least}")
        if self.cache_gib <= 0:
            raise ValueError(f"data.cache_gib is {self.cache_gib:g}, but must be above 0")


def open_configured(config: DataConfig) -> Index:
    """The dataset that `config.path` names, in a directory or behind a URL.

    Raises:
        DatasetError: there is none, or it is damaged.
        ValueError: the cache could not hold what is read at a time.
    """
    if not is_url(config.path):
        return open_dataset(Path(config.path))
    directory = default_directory() if config.cache_dir is None else Path(config.cache_dir).expanduser()
    index = open_remote_dataset(str(config.path), directory, int(config.cache_gib * 2**30))
    sizes = sorted((shard.bytes for split in index.splits.values() for shard in split.shards), reverse=True)
    needed = sum(sizes[: 2 * config.window_shards + 1])  # the window that is read, the next, and a validation shard
    if config.cache_gib * 2**30 < needed:
        raise ValueError(
            f"data.cache_gib is {config.cache_gib:g}, but two windows of {config.window_shards} shards of {config.path} have "
            f"{needed / 2**30:.2f} GiB. Set data.cache_gib to that for each dataset that is read on a node at a time."
        )
    return index


class Batch(NamedTuple):
    """B sequences of S tokens, on the CPU."""

    tokens: torch.Tensor  # int64 [B, S]
    targets: torch.Tensor  # int64 [B, S], the token after each of `tokens`
    loss_mask: torch.Tensor  # bool [B, S], False where the target does not count
    sequence: torch.Tensor  # int64 [B], the position of each sequence in the stream


def sequences_per_shard(index: Index, split: str, sequence_length: int) -> np.ndarray:
    """How many sequences of S + 1 tokens, neighbours sharing one, each shard holds: int64 [shards].

    Raises:
        DatasetError: none of the split's shards holds one.
    """
    tokens = np.array([shard.tokens for shard in index.splits[split].shards], np.int64)
    counts = np.maximum(tokens - 1, 0) // sequence_length
    if counts.sum() == 0:
        raise DatasetError(
            f"the {split} split of {index.directory} has no sequence of {sequence_length} + 1 tokens: it has {tokens.sum()} tokens in "
            f"{len(tokens)} shards; use a smaller sequence length or more text; for validation, give tools/prepare_data.py a larger "
            f"--validation-fraction or, where the corpus is a few long documents, a smaller --max-text-bytes"
        )
    return counts


class Sequences(NamedTuple):
    """A batch as workers send it: arrays pass through a pipe, where each tensor would open shared memory."""

    positions: np.ndarray  # int64 [B]
    tokens: np.ndarray  # the dataset's dtype [B, S + 1]


class SequenceDataset(Dataset[Sequences | DatasetError]):
    """Sequences by position: tokens [i S, i S + S] of a shard's stream, in shuffled order (train) or as they lie (validation)."""

    def __init__(self, config: DataConfig, index: Index, split: str, seed: int | None) -> None:
        """`seed` None: unshuffled, one epoch."""
        counts = sequences_per_shard(index, split, config.sequence_length)
        self.epoch_length = int(counts.sum())
        self._sequence_length = config.sequence_length
        self._order = None if seed is None else SequenceOrder(counts, seed, config.window_shards)
        self._first_sequence = np.concatenate([[0], np.cumsum(counts)])
        self._window: tuple[int, int] | None = None
        if index.cache is None:
            self._prefetcher = None
            self._reader = TokenReader(index, split)
        else:
            self._shards = index.splits[split].shards
            self._prefetcher = Prefetcher(index.cache)
            self._reader = CachedTokenReader(index, split, index.cache, config.window_shards)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The (shard, sequence in the shard) at each position, both int64 [positions]."""
        if self._order is not None:
            return self._order.locate(positions)
        shards = np.searchsorted(self._first_sequence, positions, side="right") - 1
        return shards, positions - self._first_sequence[shards]

    def __getitems__(self, positions: list[int]) -> Sequences | DatasetError:
        """What the loader calls. An error is returned, not raised: the loader would bury a worker's exception in its traceback."""
        try:
            return self.read(np.array(positions, np.int64))
        except DatasetError as error:
            return error

    def read(self, positions: np.ndarray) -> Sequences:
        """The sequences at `positions`, in that order.

        Raises:
            DatasetError: from the reads.
        """
        if self._prefetcher is not None and self._order is not None:
            self._prefetch(self._order, self._prefetcher, int(positions[-1]))
        shards, sequences = self.locate(positions)
        length = self._sequence_length
        rows = [
            self._reader.read(shard, sequence * length, length + 1)
            for shard, sequence in zip(shards.tolist(), sequences.tolist(), strict=True)
        ]
        return Sequences(positions, np.stack(rows))

    def _prefetch(self, order: SequenceOrder, prefetcher: Prefetcher, position: int) -> None:
        """Where a new window begins, asks for its shards and for those of the next."""
        epoch, window = order.window(position)
        if (epoch, window) != self._window:
            self._window = epoch, window
            numbers = order.window_shards(epoch, window) + order.window_shards(epoch, window + 1)
            prefetcher.want([self._shards[number] for number in dict.fromkeys(numbers)])


def _to_batch(sequences: Sequences) -> Batch:
    stream = torch.from_numpy(sequences.tokens.astype(np.int64))  # [B, S + 1]
    tokens, targets = stream[:, :-1].contiguous(), stream[:, 1:].contiguous()
    return Batch(tokens, targets, torch.ones_like(tokens, dtype=torch.bool), torch.from_numpy(sequences.positions))


class _MicroBatches:
    """Batch sampler: the positions of one rank's micro-batches, without end."""

    def __init__(self, position: int, micro_batch_size: int, rank: int, ranks: int) -> None:
        self._first = position + rank * micro_batch_size
        self._micro_batch_size, self._stride = micro_batch_size, micro_batch_size * ranks

    def __iter__(self) -> Iterator[list[int]]:
        first = self._first
        while True:
            yield list(range(first, first + self._micro_batch_size))
            first += self._stride


def train_batches(
    config: DataConfig,
    index: Index,
    *,
    seed: int,
    position: int,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[Batch]:
    """This rank's micro-batches from `position` on, without end; they cross epochs.

    The step that starts at P covers positions [P, P + global_batch_size); its micro-batch m on rank r is
    `P + (m * data_parallel_size + r) * micro_batch_size + [0, micro_batch_size)`.

    Raises:
        DatasetError: the split has no full sequence, or a read finds damage.
    """
    assert global_batch_size % (micro_batch_size * data_parallel_size) == 0, "RunConfig.accumulation_steps refuses it"
    dataset = SequenceDataset(config, index, "train", seed)
    loader: DataLoader[Sequences | DatasetError] = DataLoader(
        dataset,
        batch_sampler=_MicroBatches(position, micro_batch_size, data_parallel_rank, data_parallel_size),
        num_workers=config.workers,
        collate_fn=_as_it_is,
        worker_init_fn=_shield_from_signals,
        generator=torch.Generator(),  # the loader draws a seed for its workers: not from the trainer's generator
    )
    for sequences in loader:
        if isinstance(sequences, DatasetError):
            raise sequences
        yield _to_batch(sequences)


def _as_it_is(batch: Any) -> Any:
    return batch


def _shield_from_signals(worker: int) -> None:
    """Replaces the handlers a worker inherits from the trainer.

    Slurm signals every process of a job, and a terminal every process of the foreground: what follows is the trainer's business, and
    workers end with it. SIGTERM is ignored once only: Python ends workers with it when the trainer dies of an exception.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def validation_batches(
    config: DataConfig,
    index: Index,
    *,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    max_sequences: int | None,
) -> Iterator[Batch]:
    """This rank's share of the first `max_sequences` validation sequences (None: all), unshuffled, once.

    Every rank gets the same number of batches of the same shape; rows past the end repeat the last sequence with `loss_mask` False.
    They are read in the calling process: an evaluation is too short to pay for starting workers.

    Raises:
        DatasetError: the split has no full sequence, or a read finds damage.
    """
    dataset = SequenceDataset(config, index, "validation", None)
    count = dataset.epoch_length if max_sequences is None else min(dataset.epoch_length, max_sequences)
    for first in range(0, count, micro_batch_size * data_parallel_size):
        positions = first + data_parallel_rank * micro_batch_size + np.arange(micro_batch_size)
        batch = _to_batch(dataset.read(np.minimum(positions, count - 1)))
        batch.loss_mask[torch.from_numpy(positions >= count)] = False
        yield batch._replace(sequence=torch.from_numpy(positions))
