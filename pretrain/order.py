"""Which sequence of the dataset stands at a position of the training stream.

`SequenceOrder.locate` is a pure function of (shard sizes, seed, window, position): no state, no stored permutation, no random number
generator of NumPy or Python. An epoch visits every sequence once: shards in a permuted order, and the sequences permuted inside
windows of a few shards, so that only a window's shards need be at hand. Golden values in `tests/pretrain/test_order.py` freeze it.
"""

import hashlib
from typing import NamedTuple

import numpy as np

ROUNDS = 8
TOGETHER = 1024  # positions that are located at once and kept: NumPy takes as long for a few as for hundreds


def round_keys(*name: object) -> np.ndarray:
    """Keys of the permutation of that name, uint64 [ROUNDS]."""
    digest = hashlib.blake2b("/".join(map(str, name)).encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, "<u8")


def permute(values: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """A bijection of range(size), applied to each of `values`.

    A balanced Feistel network permutes the smallest 4^k >= size; a result outside the range goes through it again ("cycle walking")
    until it lies inside, which keeps the map bijective.

    Args:
        values: integers in [0, size), any shape.
        keys: uint64 [ROUNDS], from `round_keys`.

    Returns:
        int64, the shape of `values`.
    """
    half_bits = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    result = _feistel(values.astype(np.uint64), half_bits, keys)
    while (outside := result >= size).any():
        result[outside] = _feistel(result[outside], half_bits, keys)
    return result.astype(np.int64)


def _feistel(values: np.ndarray, half_bits: np.uint64, keys: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return left << half_bits | right


def _mix(value: np.ndarray) -> np.ndarray:
    """The finaliser of MurmurHash3 and SplitMix64: every bit of the result depends on every bit of the value (mod 2^64)."""
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return value ^ value >> np.uint64(31)


class _Epoch(NamedTuple):
    shards: np.ndarray  # int64 [shards]: the shards in this epoch's order
    first_sequence: np.ndarray  # int64 [shards + 1]: sequences of the epoch before each of them


class SequenceOrder:
    """The training stream as a function of the position.

    Args:
        sequences: number of sequences in each shard.
        seed: another seed, another order.
        window_shards: shards whose sequences are shuffled together.
    """

    def __init__(self, sequences: np.ndarray, seed: int, window_shards: int) -> None:
        self._sequences = np.asarray(sequences, np.int64)
        self._seed = seed
        self._window_shards = window_shards
        self.epoch_length = int(self._sequences.sum())
        self._last_epoch: tuple[int, _Epoch] | None = None
        self._together = min(TOGETHER, self.epoch_length)
        self._last_located: tuple[int, np.ndarray, np.ndarray] | None = None  # a first position, and the places from it on

    def _epoch(self, epoch: int) -> _Epoch:
        if self._last_epoch is None or self._last_epoch[0] != epoch:
            count = len(self._sequences)
            shards = permute(np.arange(count), count, round_keys("shards", self._seed, epoch))
            self._last_epoch = epoch, _Epoch(shards, np.concatenate([[0], np.cumsum(self._sequences[shards])]))
        return self._last_epoch[1]

    def window(self, position: int) -> tuple[int, int]:
        """The epoch, and the window of it, that the sequence at `position` comes from."""
        epoch, place = divmod(position, self.epoch_length)
        rank = int(np.searchsorted(self._epoch(epoch).first_sequence, place, side="right")) - 1
        return epoch, rank // self._window_shards

    def window_shards(self, epoch: int, window: int) -> list[int]:
        """The shards of a window; those of the next epoch's first one after the epoch's last."""
        windows = -(-len(self._sequences) // self._window_shards)
        order = self._epoch(epoch + window // windows).shards
        first = window % windows * self._window_shards
        return order[first : first + self._window_shards].tolist()

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The (shard, sequence in the shard) at each of the positions, both int64 [positions]."""
        positions = np.asarray(positions, np.int64)
        numbers = positions.tolist()  # of a few, Python's least and greatest are found sooner than NumPy's
        first = numbers[0] // self._together * self._together if numbers else 0
        if not numbers or min(numbers) < first or max(numbers) >= first + self._together:
            return self._locate(positions)
        if self._last_located is None or self._last_located[0] != first:
            self._last_located = first, *self._locate(np.arange(first, first + self._together))
        _, shards, sequences = self._last_located
        places = positions - first
        return shards[places], sequences[places]

    def _locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shards, sequences = np.empty_like(positions), np.empty_like(positions)
        epochs, places = np.divmod(positions, self.epoch_length)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            shards[chosen], sequences[chosen] = self._locate_in_epoch(epoch, places[chosen])
        return shards, sequences

    def _locate_in_epoch(self, epoch: int, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        order, first_sequence = self._epoch(epoch)
        windows = (np.searchsorted(first_sequence, places, side="right") - 1) // self._window_shards
        shuffled = np.empty_like(places)
        for window in np.unique(windows).tolist():
            chosen = windows == window
            first_shard = window * self._window_shards
            begin = first_sequence[first_shard]
            size = int(first_sequence[min(first_shard + self._window_shards, len(order))] - begin)
            keys = round_keys("sequences", self._seed, epoch, window)
            shuffled[chosen] = begin + permute(places[chosen] - begin, size, keys)
        ranks = np.searchsorted(first_sequence, shuffled, side="right") - 1
        return order[ranks], shuffled - first_sequence[ranks]
