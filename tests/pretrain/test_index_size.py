import tracemalloc
from pathlib import Path

import numpy as np

from benchmarks import data_index
from benchmarks.data_streams import LENGTH
from pretrain.data import SequenceDataset
from pretrain.sources import DataConfig, configured_phases, open_sources


def traced_start(directory: Path, shards: int) -> tuple[int, int, int]:
    """Tokens, the bytes that a rank holds after its start, and the most that it held meanwhile."""
    directory.mkdir()
    tokens = data_index.make_index(directory, shards)
    tracemalloc.start()
    config = DataConfig(LENGTH, str(directory), workers=0)
    sources = open_sources(config)
    dataset = SequenceDataset(config, sources, configured_phases(config, sources), seed=1)
    dataset.locate(np.arange(data_index.POSITIONS))
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return tokens, held, peak


def test_an_index_of_two_trillion_tokens_takes_a_rank_less_than_120_mb(tmp_path: Path) -> None:
    """Counted with a hundredth of its shards; `python -m benchmarks.data --part index` has them all, and the seconds."""
    few, many = (traced_start(tmp_path / str(shards), shards) for shards in (1, data_index.SHARDS // 100))
    tokens, held, peak = (more - less for more, less in zip(many, few, strict=True))
    assert held * 2e12 / tokens < 120e6
    assert peak * 2e12 / tokens < 300e6
