import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.mixture import BLOCK, Mixture, Phase, continued
from pretrain.order import SequenceOrder

Weights = dict[str, float]
WEIGHTS = st.lists(st.floats(0, 1).map(lambda x: round(x, 4)), min_size=1, max_size=8).filter(any)


def weights_of(values: list[float]) -> Weights:
    return {f"source {number}": value for number, value in enumerate(values)}


def mixture(*phases: tuple[int, Weights], seed: int = 0) -> Mixture:
    return Mixture([Phase(*phase) for phase in phases], seed)


@settings(deadline=None)
@given(values=WEIGHTS, position=st.integers(0, 10**13) | st.integers(0, 10**10).map(lambda block: block * BLOCK))
def test_each_source_has_its_share_of_the_first_positions(values: list[float], position: int) -> None:
    counts = mixture((0, weights_of(values))).counts(position)
    assert counts.sum() == position
    excess = np.abs(counts - position * np.array(values) / sum(values)).max()
    assert excess <= 2 + position * 1e-14 if position % BLOCK == 0 else excess < BLOCK
    assert all(count == 0 for count, value in zip(counts.tolist(), values, strict=True) if value == 0)


@settings(deadline=None, max_examples=30)
@given(values=WEIGHTS, others=WEIGHTS, change=st.integers(1, 3000), start=st.integers(0, 10_000), seed=st.integers(0, 2**63))
def test_each_source_is_read_in_its_own_order_and_nothing_twice(
    values: list[float], others: list[float], change: int, start: int, seed: int
) -> None:
    mixed = mixture((0, weights_of(values)), (change, weights_of(others)), seed=seed)
    sources, places = mixed.locate(start + np.arange(2500))
    for source in range(len(mixed.sources)):
        read = places[sources == source]
        assert (np.diff(read) == 1).all()


@settings(deadline=None, max_examples=30)
@given(values=WEIGHTS, blocks=st.integers(0, 10**6), seed=st.integers(0, 2**63))
def test_every_block_has_exactly_the_sources_that_are_due(values: list[float], blocks: int, seed: int) -> None:
    mixed = mixture((0, weights_of(values)), seed=seed)
    start = blocks * BLOCK
    sources, places = mixed.locate(start + np.arange(BLOCK))
    before, after = mixed.counts(start), mixed.counts(start + BLOCK)
    for source in range(len(values)):
        assert places[sources == source].tolist() == list(range(before[source], after[source]))


def test_positions_are_located_one_by_one_as_together() -> None:
    mixed = mixture((0, {"a": 0.5, "b": 0.3, "c": 0.2}), (1700, {"a": 0.1, "b": 0.9}))
    positions = np.random.default_rng(0).permutation(4000)
    together = np.array(mixed.locate(positions))
    one_by_one = np.hstack([mixed.locate(np.array([position])) for position in positions[:300]])
    assert np.array_equal(together[:, :300], one_by_one)


def test_one_source_alone_is_read_in_its_own_order() -> None:
    sources, places = mixture((0, {"only": 1.0})).locate(np.arange(5000))
    assert not sources.any() and np.array_equal(places, np.arange(5000))


def test_sources_alternate_within_a_block() -> None:
    """A source of a tenth is never away for long: in a random order, 150 positions without it come once in 7 million."""
    sources, _ = mixture((0, {"a": 0.9, "b": 0.1})).locate(np.arange(10_000))
    assert np.diff(np.flatnonzero(sources == 1)).max() < 150


def test_the_first_ten_thousand_positions_have_their_golden_digest() -> None:
    """A change of it would reorder the data of every run that is resumed."""
    mixed = mixture((0, {"a": 0.7, "b": 0.25, "c": 0.05}), (3333, {"a": 0.2, "b": 0.8}), seed=7)
    sources, places = mixed.locate(np.arange(10_000))
    located = np.empty((10_000, 3), "<i8")
    for source, sizes in enumerate(([300, 500, 400], [1000], [7, 0, 11, 3])):
        chosen = sources == source
        shards, sequences = SequenceOrder(np.array(sizes), 7, window_shards=2).locate(places[chosen])
        located[chosen] = np.stack([np.full_like(shards, source), shards, sequences], axis=1)
    assert hashlib.sha256(located.tobytes()).hexdigest() == "ee1d608067229f8048a72d1d3cad62fd5dd96fa8abdc98a761ea581c8c612ba7"


@pytest.mark.parametrize("position", [0, 1, 999, 1000, 1700, 2500, 9999])
def test_a_mixture_that_goes_on_as_it_was_is_left_as_it_is(position: int) -> None:
    read = [Phase(0, {"a": 0.5, "b": 0.5}), Phase(1700, {"a": 0.1, "b": 0.9})]
    assert continued(read, read, position) == read
    assert continued(read, [Phase(0, {"a": 1, "b": 0}), *read[1:]], 1700) == read  # only the past differs


@settings(deadline=None, max_examples=30)
@given(values=WEIGHTS, others=WEIGHTS, position=st.integers(0, 5000))
def test_a_changed_mixture_leaves_what_was_read_and_repeats_nothing(values: list[float], others: list[float], position: int) -> None:
    read, wanted = [Phase(0, weights_of(values)), Phase(2300, weights_of([1.0]))], [Phase(0, weights_of(others) | {"new": 1.0})]
    phases = continued(read, wanted, position)
    assert continued(phases, wanted, position + 5000) == phases  # at the next resume
    before, after = Mixture(read, seed=1), Mixture(phases, seed=1)

    def named(mixed: Mixture, positions: np.ndarray) -> list[tuple[str, int]]:
        sources, places = mixed.locate(positions)
        return [(mixed.sources[source], place) for source, place in zip(sources.tolist(), places.tolist(), strict=True)]

    past = named(before, np.arange(position))
    assert named(after, np.arange(position)) == past
    future = named(after, position + np.arange(3 * BLOCK))
    assert len({*past, *future}) == position + 3 * BLOCK
    assert phases[-1] == Phase(position, wanted[0].weights)
