"""The training stream of a mixture: the same for every layout, resume and number of workers."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.data import Batch, SequenceDataset, train_batches
from pretrain.mixture import Phase
from pretrain.shards import Index
from pretrain.sources import DataConfig, SourceConfig, WeightChange, configured_phases, open_sources

S, SEED = 50, 3
Stream = dict[int, bytes]


def ramp(position: int) -> int:
    return 16 if position < 48 else 32


class Mixed:
    """A mixture of three sources whose weights change, as one process reads it."""

    def __init__(self, datasets: dict[str, Path]) -> None:
        weights = dict(zip(datasets, (0.6, 0.3, 0.1), strict=True))
        changes = [WeightChange(150 * S, dict(zip(datasets, (0.2, 0.2, 0.6), strict=True)))]
        sources = {name: SourceConfig(str(path), weights[name]) for name, path in datasets.items()}
        self.config = DataConfig(S, sources=sources, weight_changes=changes, workers=0, window_shards=3)
        self.sources: dict[str, Index] = open_sources(self.config)
        self.phases: list[Phase] = configured_phases(self.config, self.sources)
        self.dataset = SequenceDataset(self.config, self.sources, self.phases, SEED)

    def expected(self, start: int, end: int) -> Stream:
        read = self.dataset.read(np.arange(start, end))
        return {position: row.astype(np.int64).tobytes() for position, row in zip(range(start, end), read.tokens, strict=True)}

    def batches(
        self, position: int, rank: int, ranks: int, micro_batch: int, batch_size: Callable[[int], int], **config: Any
    ) -> Iterator[Batch]:
        changed = DataConfig(**{**vars(self.config), **config})
        layout = {"micro_batch_size": micro_batch, "data_parallel_rank": rank, "data_parallel_size": ranks}
        return train_batches(changed, self.sources, self.phases, seed=SEED, position=position, batch_size=batch_size, **layout)

    def read(self, start: int, end: int, ranks: int, micro_batch: int, batch_size: Callable[[int], int], **config: Any) -> Stream:
        """What all ranks together read of [start, end)."""
        found: Stream = {}
        for rank in range(ranks):
            batches = self.batches(start, rank, ranks, micro_batch, batch_size, **config)
            for batch in islice(batches, (end - start) // (ranks * micro_batch)):
                rows = np.concatenate([batch.tokens.numpy(), batch.targets.numpy()[:, -1:]], axis=1)
                for position, row in zip(batch.sequence.tolist(), rows, strict=True):
                    assert position not in found
                    found[position] = row.tobytes()
        return found


@pytest.fixture(scope="session")
def mixed(mixed_datasets: dict[str, Path]) -> Mixed:
    return Mixed(mixed_datasets)


@settings(deadline=None, max_examples=40)
@given(
    start=st.integers(0, 300),
    steps=st.integers(1, 3),
    batch=st.sampled_from([16, 48]),
    ranks=st.sampled_from([1, 2, 4, 8]),
    micro_batch=st.sampled_from([1, 2]),
)
def test_any_layout_continues_the_stream_at_any_position(
    mixed: Mixed, start: int, steps: int, batch: int, ranks: int, micro_batch: int
) -> None:
    end = start + steps * batch
    assert mixed.read(start, end, ranks, micro_batch, lambda _: batch) == mixed.expected(start, end)


@pytest.mark.parametrize(("ranks", "micro_batch", "workers"), [(1, 16, 1), (1, 4, 3), (2, 2, 2), (4, 4, 1)])
def test_workers_do_not_change_a_mixtures_stream(mixed: Mixed, ranks: int, micro_batch: int, workers: int) -> None:
    assert mixed.read(130, 178, ranks, micro_batch, lambda _: 16, workers=workers) == mixed.expected(130, 178)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_batch_that_grows_takes_up_the_stream_where_the_smaller_ended(mixed: Mixed, ranks: int) -> None:
    assert mixed.read(0, 3 * 16 + 2 * 32, ranks, 2, ramp) == mixed.expected(0, 112)
    batches = mixed.batches(0, ranks - 1, ranks, 2, ramp)
    firsts = [int(batch.sequence[0]) for batch in islice(batches, 5 * 16 // (2 * ranks))]
    last_rank = [position for start, size in ((0, 16), (16, 16), (32, 16), (48, 32)) for position in range(start, start + size, 2 * ranks)]
    assert firsts == [position + 2 * (ranks - 1) for position in last_rank]


def test_512_ranks_read_disjoint_positions_that_are_the_global_batches_of_one(mixed: Mixed) -> None:
    def first_batches(ranks: int, rank: int, micro_batch: int) -> list[list[int]]:
        batches = mixed.batches(100, rank, ranks, micro_batch, lambda _: 1024)
        return [next(batches).sequence.tolist() for _ in range(2 * 1024 // (ranks * micro_batch))]

    steps = first_batches(1, 0, 1024)
    many = [first_batches(512, rank, 1) for rank in range(512)]
    for step in range(2):
        read = [position for rank in many for batch in rank[2 * step : 2 * step + 2] for position in batch]
        assert len(set(read)) == 1024
        assert sorted(read) == steps[step] == list(range(100 + 1024 * step, 100 + 1024 * (step + 1)))


def test_every_sequence_of_every_source_comes_once_an_epoch(mixed: Mixed) -> None:
    sources, shards, sequences = mixed.dataset.locate(np.arange(20_000))
    for number, index in enumerate(sorted(mixed.sources.values(), key=lambda index: index.fingerprint)):
        sizes = [max(shard.tokens - 1, 0) // S for shard in index.splits["train"].shards]
        every = [(shard, sequence) for shard, size in enumerate(sizes) for sequence in range(size)]
        chosen = sources == number
        read = list(zip(shards[chosen].tolist(), sequences[chosen].tolist(), strict=True))
        epochs = [sorted(read[start : start + len(every)]) for start in range(0, len(read) - len(every) + 1, len(every))]
        assert epochs and all(epoch == every for epoch in epochs)
