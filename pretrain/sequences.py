"""The sequences of one source, by their position in its own stream.

Responsible for the way from a position to a row of tokens: order, windows that are fetched ahead, reads, and what happens where a read
finds damage. How sources are mixed is `mixture.py`; files are `shards.py`.
"""

import hashlib
import sys

import numpy as np

from pretrain.order import SequenceOrder
from pretrain.shard_cache import Prefetcher, open_reader
from pretrain.shards import DamageError, Index
from pretrain.sources import DataConfig, sequences_per_shard

MOST_SUBSTITUTES = 100  # tried for one sequence: with so much damage there is nothing to go on with


class SourceSequences:
    """Sequences of S + 1 tokens, [i S, i S + S] of a shard's stream, in shuffled order (train) or as they lie (validation).

    Args:
        seed: of the order; None: unshuffled, one epoch.

    Attributes:
        epoch_length: how many there are.
    """

    def __init__(self, config: DataConfig, index: Index, split: str, seed: int | None) -> None:
        counts = sequences_per_shard(index, split, config.sequence_length)
        self.epoch_length = int(counts.sum())
        self._sequence_length = config.sequence_length
        self._substitutes = config.corrupt_blocks == "substitute"
        self._reported: set[str] = set()
        self._order = None if seed is None else SequenceOrder(counts, seed, config.window_shards)
        self._first_sequence = np.concatenate([[0], np.cumsum(counts)])
        self._window: tuple[int, int] | None = None
        self._shards = index.splits[split].shards
        self._reader = open_reader(index, split, config.window_shards)
        self._prefetcher = None if index.cache is None else Prefetcher(index.cache)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The (shard, sequence in the shard) at each position, both int64 [positions]."""
        if self._order is not None:
            return self._order.locate(positions)
        shards = np.searchsorted(self._first_sequence, positions, side="right") - 1
        return shards, positions - self._first_sequence[shards]

    def read(self, positions: np.ndarray, batch: np.ndarray, rows: np.ndarray) -> None:
        """Puts the sequences at `positions` into the given rows of `batch` [B, S + 1].

        Raises:
            DatasetError: from the reads.
        """
        if self._prefetcher is not None and self._order is not None:
            self._prefetch(self._order, self._prefetcher, int(positions[-1]))
        shards, sequences = self.locate(positions)
        for row, position, shard, sequence in zip(*(array.tolist() for array in (rows, positions, shards, sequences)), strict=True):
            batch[row] = self._read_checked(position, shard, sequence)

    def read_one(self, position: int) -> np.ndarray:
        """The sequence at `position`, [S + 1], for who wants no others: the rest of its window is not asked for.

        Raises:
            DatasetError: from the reads.
        """
        (shard,), (sequence,) = self.locate(np.array([position]))
        return self._read_checked(position, int(shard), int(sequence))

    def _read_checked(self, position: int, shard: int, sequence: int) -> np.ndarray:
        """That sequence, or where it is damaged what the config says is read instead."""
        try:
            return self._read(shard, sequence)
        except DamageError as error:
            if not self._substitutes:
                raise
            return self._read_substitute(position, error)

    def _read(self, shard: int, sequence: int) -> np.ndarray:
        return self._reader.read(shard, sequence * self._sequence_length, self._sequence_length + 1)

    def _read_substitute(self, position: int, damage: DamageError) -> np.ndarray:
        """A sequence that depends on `position` alone, so that every rank and every repetition reads the same."""
        for attempt in range(MOST_SUBSTITUTES):
            digest = hashlib.blake2b(f"substitute/{position}/{attempt}".encode(), digest_size=8).digest()
            other = int.from_bytes(digest, "little") % self.epoch_length
            (shard,), (sequence,) = self.locate(np.array([other]))
            try:
                tokens = self._read(int(shard), int(sequence))
            except DamageError:
                continue
            self._report(f"{damage}; data.corrupt_blocks is substitute: other sequences are read instead of those that lie here")
            return tokens
        raise damage

    def _report(self, message: str) -> None:
        """Once for each place."""
        if message not in self._reported:
            self._reported.add(message)
            print(f"warning: {message}", file=sys.stderr, flush=True)

    def _prefetch(self, order: SequenceOrder, prefetcher: Prefetcher, position: int) -> None:
        """Where a new window begins, asks for its shards and for those of the next."""
        epoch, window = order.window(position)
        if (epoch, window) != self._window:
            self._window = epoch, window
            numbers = order.window_shards(epoch, window) + order.window_shards(epoch, window + 1)
            prefetcher.want([self._shards[number] for number in dict.fromkeys(numbers)])
