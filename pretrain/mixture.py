"""Which source of a mixture each position of the training stream reads, and which sequence of that source's own stream.

Responsible for shares alone; a source's own order is `order.py`. Like it, `Mixture.locate` is a pure function of (phases, seed,
position). The one fact to know: each block of 1,000 positions of a phase has each source as often as it is due, so that the counters of
all sources follow from the position, and none is stored. Golden values in `tests/pretrain/test_mixture.py` freeze it.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from pretrain.order import permute, round_keys

BLOCK = 1000  # positions over which the sources are shuffled, and after which each has its share


class Phase(NamedTuple):
    """Weights that hold from a position on."""

    first_position: int
    weights: dict[str, float]  # by source; at least 0, one above 0


class _Block(NamedTuple):
    """BLOCK positions of one phase; the next phase may begin among them."""

    phase: int
    first_position: int
    end: int  # of those that are read: where the block or the phase ends
    sources: np.ndarray  # int64 [BLOCK]
    places: np.ndarray  # int64 [BLOCK], in the source's own stream


class Mixture:
    """The training stream as a sequence of sources.

    Args:
        phases: in order, the first from position 0.
        seed: another seed, another order within the blocks.

    Attributes:
        sources: all that occur, in the order of the numbers that `locate` returns.
    """

    def __init__(self, phases: Sequence[Phase], seed: int) -> None:
        self.phases = tuple(phases)
        self.sources = sorted({name for phase in phases for name in phase.weights})
        self._seed = seed
        self._firsts = [phase.first_position for phase in phases]
        self._shares = [_Shares(phase, self.sources) for phase in phases]
        self._last_block: _Block | None = None
        self._counts = [np.zeros(len(self.sources), np.int64)]  # sequences of each source before each phase
        for phase, end in enumerate(self._firsts[1:]):
            self._counts.append(self._counts_in(phase, end))

    def counts(self, position: int) -> np.ndarray:
        """How many sequences of each source come before `position`: int64 [sources]."""
        return self._counts_in(self._phase(position), position)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source at each of the positions, and the position in that source's own stream, both int64 [positions]."""
        positions = np.asarray(positions, np.int64)
        block, numbers = self._last_block, positions.tolist()
        if block is not None and numbers and block.first_position <= min(numbers) and max(numbers) < block.end:
            offsets = positions - block.first_position  # nearly every batch: it spares a dozen calls of NumPy
            return block.sources[offsets], block.places[offsets]
        sources, places = np.empty_like(positions), np.empty_like(positions)
        phases = np.searchsorted(self._firsts, positions, side="right") - 1
        firsts = np.asarray(self._firsts)[phases]
        starts = firsts + (positions - firsts) // BLOCK * BLOCK
        for start in np.unique(starts).tolist():
            chosen = starts == start
            block = self._block(self._phase(start), start)
            sources[chosen] = block.sources[positions[chosen] - start]
            places[chosen] = block.places[positions[chosen] - start]
        return sources, places

    def _phase(self, position: int) -> int:
        return int(np.searchsorted(self._firsts, position, side="right")) - 1

    def _counts_in(self, phase: int, position: int) -> np.ndarray:
        """As `counts`, by the rules of `phase`, at its end too."""
        whole = (position - self._firsts[phase]) // BLOCK * BLOCK
        start = self._firsts[phase] + whole
        read = self._block(phase, start).sources[: position - start]
        return self._counts[phase] + self._shares[phase].of(whole) + np.bincount(read, minlength=len(self.sources))

    def _block(self, phase: int, start: int) -> _Block:
        """The block of `phase` that begins at `start`: as many positions of each source as it is due, in a permuted order."""
        if self._last_block is None or self._last_block[:2] != (phase, start):
            before = self._counts[phase] + self._shares[phase].of(start - self._firsts[phase])
            due = self._counts[phase] + self._shares[phase].of(start - self._firsts[phase] + BLOCK) - before
            slots = permute(np.arange(BLOCK), BLOCK, round_keys("mixture", self._seed, start))
            sources = np.repeat(np.arange(len(due)), due)[slots]
            places = np.empty_like(sources)
            for source in np.flatnonzero(due):
                places[sources == source] = before[source] + np.arange(due[source])  # each source in its own order
            end = min([start + BLOCK, *self._firsts[phase + 1 : phase + 2]])
            self._last_block = _Block(phase, start, end, sources, places)
        return self._last_block


class _Shares:
    """How the first n positions of a phase are shared out, for any n: whole numbers that sum to n and never fall as n grows.

    One source after the other, the heaviest first, takes its share of what those before it left, rounded. The weights are taken as they
    are written: 0.7 is 7/10.
    """

    def __init__(self, phase: Phase, sources: Sequence[str]) -> None:
        weights = {name: Fraction(str(weight)) for name, weight in phase.weights.items() if weight}
        heaviest_first = sorted(weights, key=lambda name: (-weights[name], name))
        self._count = len(sources)
        self._portions: list[tuple[int, Fraction]] = []  # source, its portion of what those before it left
        left = sum(weights.values(), Fraction(0))
        for name in heaviest_first:
            self._portions.append((sources.index(name), weights[name] / left))
            left -= weights[name]

    def of(self, positions: int) -> np.ndarray:
        """int64 [sources], summing to `positions`."""
        shares = np.zeros(self._count, np.int64)
        left = positions
        for source, portion in self._portions:
            shares[source] = (2 * left * portion.numerator + portion.denominator) // (2 * portion.denominator)  # rounded, halves up
            left -= int(shares[source])
        return shares


def continued(read: Sequence[Phase], wanted: Sequence[Phase], position: int) -> list[Phase]:
    """The phases of a stream that was read by `read` as far as `position` and goes on by `wanted`.

    Where the two say the same from `position` on, the result is `read`: a phase that begins anew would be shuffled anew.
    """
    if _from(read, position) == _from(wanted, position):
        return list(read)
    return [phase for phase in read if phase.first_position < position] + _from(wanted, position)


def _from(phases: Sequence[Phase], position: int) -> list[Phase]:
    """What `phases` say from `position` on."""
    holding = max(index for index, phase in enumerate(phases) if phase.first_position <= position)
    return [Phase(position, phases[holding].weights), *phases[holding + 1 :]]
