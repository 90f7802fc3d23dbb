"""The stream of one dataset, as tests read it."""

from collections.abc import Iterator
from typing import Any

from pretrain.data import Batch, SequenceDataset, train_batches
from pretrain.shards import Index
from pretrain.sources import DataConfig, configured_phases, open_sources


def open_one(config: DataConfig) -> Index:
    """The dataset that data.path names."""
    (index,) = open_sources(config).values()
    return index


def batches_of(config: DataConfig, index: Index, *, seed: int, position: int, global_batch_size: int, **layout: Any) -> Iterator[Batch]:
    sources = {"data": index}
    phases = configured_phases(config, sources)
    return train_batches(config, sources, phases, seed=seed, position=position, batch_size=lambda _: global_batch_size, **layout)


def sequences_of(config: DataConfig, index: Index, seed: int) -> SequenceDataset:
    sources = {"data": index}
    return SequenceDataset(config, sources, configured_phases(config, sources), seed)
