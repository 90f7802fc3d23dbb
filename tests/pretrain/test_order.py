import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.order import SequenceOrder, permute, round_keys


@settings(deadline=None)
@given(size=st.integers(1, 5000), key=st.integers())
def test_permute_is_a_bijection(size: int, key: int) -> None:
    result = permute(np.arange(size), size, round_keys(key))
    assert np.array_equal(np.sort(result), np.arange(size))


@settings(deadline=None)
@given(size=st.integers(1, 2**62), data=st.data())
def test_permute_of_a_huge_range_stays_in_it_and_is_elementwise(size: int, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    keys = round_keys("huge")
    result = permute(np.array(values), size, keys)
    assert len(set(result.tolist())) == len(values)
    assert ((result >= 0) & (result < size)).all()
    assert result.tolist() == [permute(np.array([value]), size, keys).item() for value in values]


def test_permute_has_its_golden_values() -> None:
    """A change of these would reorder the data of every run that is resumed."""
    assert permute(np.arange(10), 10, round_keys("golden", 1)).tolist() == [1, 3, 7, 6, 2, 8, 0, 5, 9, 4]
    huge = permute(np.arange(5), 10**12, round_keys("golden", 2)).tolist()
    assert huge == [612132934841, 915998120937, 605550735990, 922744455913, 891617144957]


def test_the_order_has_its_golden_values() -> None:
    shards, sequences = SequenceOrder(np.array([3, 5, 4, 2]), seed=7, window_shards=2).locate(np.arange(12, 18))
    assert list(zip(shards.tolist(), sequences.tolist(), strict=True)) == [(3, 0), (0, 2), (2, 1), (2, 3), (2, 0), (3, 1)]


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    window=st.integers(1, 5),
    seed=st.integers(0, 2**64),
    epoch=st.integers(0, 1000),
)
def test_every_sequence_comes_exactly_once_an_epoch(sizes: list[int], window: int, seed: int, epoch: int) -> None:
    order = SequenceOrder(np.array(sizes), seed, window)
    shards, sequences = order.locate(epoch * order.epoch_length + np.arange(order.epoch_length))
    assert sorted(zip(shards.tolist(), sequences.tolist(), strict=True)) == [(i, j) for i, size in enumerate(sizes) for j in range(size)]


def test_positions_are_located_one_by_one_as_together() -> None:
    def order() -> SequenceOrder:
        return SequenceOrder(np.array([7, 1, 0, 9, 4]), seed=3, window_shards=2)

    positions = np.arange(100)
    together = np.array(order().locate(positions))
    one_by_one = np.hstack([order().locate(np.array([position])) for position in positions])
    assert np.array_equal(together, one_by_one)


@settings(deadline=None, max_examples=30)
@given(spans=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3), st.integers(1, 300)), min_size=1, max_size=20))
def test_what_was_located_before_changes_nothing(spans: list[tuple[int, int, int]]) -> None:
    sizes = np.array([300, 200, 0, 400, 350, 100])
    used, expected = SequenceOrder(sizes, seed=3, window_shards=2), SequenceOrder(sizes, seed=3, window_shards=2)._locate(np.arange(4000))
    for first, count, stride in spans:
        positions = first + stride * np.arange(count)
        assert np.array_equal(used.locate(positions), np.array(expected)[:, positions])


def test_a_window_reads_no_more_than_its_shards() -> None:
    order = SequenceOrder(np.full(20, 10), seed=0, window_shards=4)
    shards, _ = order.locate(np.arange(200))
    assert all(len(set(window)) == 4 for window in shards.reshape(5, 40).tolist())


def test_epochs_and_seeds_differ() -> None:
    def places(seed: int, epoch: int) -> list[int]:
        shards, sequences = SequenceOrder(np.full(10, 10), seed, 4).locate(epoch * 100 + np.arange(100))
        return (shards * 10 + sequences).tolist()

    orders = [places(0, 0), places(0, 1), places(1, 0), list(range(100))]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


@pytest.mark.parametrize("size", [64, 65, 1000])
def test_the_shuffle_spreads_neighbours_over_the_whole_range(size: int) -> None:
    """The mean distance of two neighbours is a third of the range in a random order."""
    distances = [np.abs(np.diff(permute(np.arange(size), size, round_keys(key)))).mean() / size for key in range(50)]
    assert abs(np.mean(distances) - 1 / 3) < 0.02
