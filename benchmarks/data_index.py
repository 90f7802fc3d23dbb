"""An index as large as a real corpus': 20,000 shards of 100 M tokens, 2 trillion in all, whose files are sparse.

Blocks have the size that `tools/prepare_data.py` gives them by default, 1 M tokens. What is measured is what each rank does at start.
"""

import gc
import hashlib
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks.data_streams import LENGTH, write_index
from benchmarks.memory import forget_peak, peak_bytes, private_bytes, resident_bytes
from pretrain.data import SequenceDataset
from pretrain.shards import COLUMNS, SPLITS, columns_file
from pretrain.sources import DataConfig, configured_phases, open_sources

SHARDS = 20_000
BLOCKS = 96  # a shard
BLOCK_TOKENS = 1 << 20
POSITIONS = 2048  # of 2,048 tokens: a batch of 4 M


def make_index(directory: Path, shards: int) -> int:
    """Writes a dataset whose shards hold nothing but zeros; returns its tokens."""
    tokens, size = BLOCKS * BLOCK_TOKENS, BLOCKS * (2 * BLOCK_TOKENS + 8192)
    entries = [
        {
            "name": f"train-{number:05d}.tar",
            "bytes": size,
            "sha256": hashlib.sha256(bytes([number % 256])).hexdigest(),
            "tokens": tokens,
            "documents": BLOCKS * 1000,
            "blocks": BLOCKS,
        }
        for number in range(shards)
    ]
    for entry in entries:
        with open(directory / str(entry["name"]), "wb") as file:
            file.truncate(size)
    offsets = np.arange(BLOCKS, dtype="<u8") * (2 * BLOCK_TOKENS + 8192)
    rows = [np.full(BLOCKS, BLOCK_TOKENS), np.full(BLOCKS, 1000), *(offsets + add for add in (512, 2048, 6144, 7168))]
    table = np.tile(np.array(rows, "<u8"), shards)
    assert table.shape == (len(COLUMNS), shards * BLOCKS)
    splits = {}
    for split, data in zip(SPLITS, (table.tobytes(), b""), strict=True):
        (directory / columns_file(split)).write_bytes(data)
        splits[split] = {"shards": entries if data else [], "columns_sha256": hashlib.sha256(data).hexdigest()}
    write_index(directory, splits)
    return tokens * shards


class Measured(NamedTuple):
    startup: float  # seconds
    memory: int  # bytes above the imports
    peak: int
    first_locate: float  # seconds
    locate: float


def measure(directory: Path) -> Measured:
    gc.collect()
    before, resident = private_bytes(), resident_bytes()
    forget_peak()
    start = time.perf_counter()
    config = DataConfig(LENGTH, str(directory), workers=0)
    sources = open_sources(config)
    dataset = SequenceDataset(config, sources, configured_phases(config, sources), seed=1)
    startup = time.perf_counter() - start
    seconds = []
    for step in range(20):
        start = time.perf_counter()
        dataset.locate(np.arange(step * 1_000_000, step * 1_000_000 + POSITIONS))
        seconds.append(time.perf_counter() - start)
    return Measured(startup, private_bytes() - before, peak_bytes() - resident, seconds[0], median(seconds))


def simulate(rounds: int) -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = make_index(Path(folder), SHARDS)
        measured = []
        for _ in range(rounds):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                measured.append(pool.submit(measure, Path(folder)).result())
        size = (Path(folder) / "index.json").stat().st_size
    startup, memory, peak, first, locate = (median(values) for values in zip(*measured, strict=True))
    counts = f"{SHARDS:,} shards, {SHARDS * BLOCKS / 1e6:.2f} M blocks, {tokens / 1e12:.2f} trillion tokens; index.json of"
    print(f"{counts} {size / 1e6:.1f} MB. Medians of {rounds} fresh processes.\n")
    print("| | measured | limit |")
    print("|---|--:|--:|")
    print(f"| start-up: `open_sources` and `SequenceDataset`, s | {startup:.2f} | 5 |")
    print(f"| memory of a rank above its imports, MiB | {memory / 2**20:.0f} | 300 |")
    print(f"| the most of it during start-up, MiB | {peak / 2**20:.0f} | 300 |")
    print(f"| `locate` of a batch of {POSITIONS} x {LENGTH} tokens, ms | {1000 * locate:.1f} | 50 |")
    print(f"| the first of an epoch, ms | {1000 * first:.1f} | 50 |")
