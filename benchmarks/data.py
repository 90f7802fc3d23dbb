"""The data path against its peers: streaming the same tokens, tokenizing the same text, and an index of 2 trillion tokens.

Streaming: each library reads its own copy of the same random tokens, in a process of its own, with the page cache hot. Tokens/s are of
CPU seconds, medians of interleaved rounds; memory is what a process has of its own (no page cache, no mapped files) above its imports.
Peers that are not installed are named and left out: `pip install -e '.[peers]'` brings them.

    python -m benchmarks.data
    python -m benchmarks.data --part streaming --rounds 5
"""

import argparse
import gc
import hashlib
import importlib.metadata
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.data_streams import BATCH, LENGTH, STREAMS, make_corpus
from benchmarks.memory import private_bytes

SKIPPED = 10  # batches before the resume that is checked; as many after it are compared


class Measured(NamedTuple):
    tokens_per_second: float  # of CPU time
    startup: float  # seconds to the first batch
    memory: int  # bytes above the imports


@dataclass
class Result:
    name: str
    version: str = ""
    missing: str = ""  # why there is nothing else
    state_bytes: int | None = None
    exact: bool | None = None
    rounds: list[Measured] = field(default_factory=list)


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def measure(name: str, directory: Path, tokens: int) -> Measured:
    """Reads nearly an epoch: the last batches may be short of sequences."""
    stream = STREAMS[name]
    torch.set_num_threads(1)
    stream.load()
    torch.ones(1, dtype=torch.int16).long()  # what torch sets up at its first operation is not the stream's
    gc.collect()
    before = private_bytes()
    start = time.perf_counter()
    stream.open(directory)
    batches = stream.batches()
    next(batches)
    startup = time.perf_counter() - start
    start = time.process_time()
    count = sum(1 for _ in islice(batches, int(0.95 * tokens / (BATCH * (LENGTH + 1)))))
    seconds = time.process_time() - start
    return Measured(count * BATCH * (LENGTH + 1) / seconds, startup, private_bytes() - before)


def next_digest(batches: Iterator[Tensor]) -> str:
    """The sha256 of the next SKIPPED batches."""
    return hashlib.sha256(b"".join(batch.numpy().tobytes() for batch in islice(batches, SKIPPED))).hexdigest()


def write(name: str, directory: Path, tokens: int) -> tuple[str, str | None, str]:
    """Writes a stream's copy of the tokens, reads a little; its version, its state after SKIPPED batches, a digest of as many more."""
    stream = STREAMS[name]
    stream.load()
    directory.mkdir()
    stream.write(directory, make_corpus(tokens))
    stream.open(directory)
    batches = stream.batches()
    next_digest(batches)
    state = stream.state(SKIPPED * BATCH)
    version = f" {importlib.metadata.version(stream.package)}" if stream.package else ""
    return version, None if state is None else json.dumps(state), next_digest(batches)


def resume(name: str, directory: Path, state: str) -> str:
    """A digest of the first batches after `state`."""
    stream = STREAMS[name]
    stream.load()
    stream.open(directory)
    stream.restore(json.loads(state))
    return next_digest(stream.batches())


def prepare(name: str, directory: Path, tokens: int) -> Result:
    """Writes a stream's tokens, and stops and resumes it once."""
    try:
        version, state, expected = in_own_process(write, name, directory, tokens)
    except ImportError as error:
        return Result(name, missing=str(error))
    if state is None:
        return Result(name, version)
    return Result(name, version, "", len(state), in_own_process(resume, name, directory, state) == expected)


def streaming(tokens: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = [prepare(name, Path(folder) / name, tokens) for name in STREAMS]
        present = [result for result in results if not result.missing]
        for _ in range(rounds):
            for result in present:
                result.rounds.append(in_own_process(measure, result.name, Path(folder) / result.name, tokens))
    print(
        f"{tokens / 1e6:.0f} M uint16 tokens, sequences of {LENGTH} + 1 in batches of {BATCH}, as int64; medians of {rounds} rounds. "
        "This stream compares the crc32 of all it reads; the peers check nothing.\n"
    )
    print_streams(results)


def print_streams(results: list[Result]) -> None:
    baseline = next((result for result in results if result.name == "Webdataset" and result.rounds), None)
    print("| stream | M tokens/s a core | / webdataset | start-up, s | MiB | state, bytes | exact resume | on other ranks (documented) |")
    print("|---|--:|--:|--:|--:|--:|---|---|")
    for result in results:
        stream = STREAMS[result.name]
        if result.missing:
            print(f"| {stream.title} | not installed: {result.missing} | | | | | | |")
            continue
        ratio = ""
        if baseline is not None:
            pairs = zip(result.rounds, baseline.rounds, strict=True)
            ratio = f"{median(own.tokens_per_second / other.tokens_per_second for own, other in pairs):.1f}"
        speed, startup, memory = (median(values) for values in zip(*result.rounds, strict=True))
        cells = [f"{stream.title}{result.version}", f"{speed / 1e6:.1f}", ratio, f"{startup:.3f}", f"{memory / 2**20:.1f}"]
        cells += ["none" if result.state_bytes is None else str(result.state_bytes), {True: "yes", False: "NO", None: "no"}[result.exact]]
        print(f"| {' | '.join(cells)} | {stream.elastic} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["all", "streaming", "tokenizing", "index"], default="all")
    parser.add_argument("--tokens", type=int, default=60_000_000, help="to stream (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement (default: %(default)s)")
    arguments = parser.parse_args()
    from benchmarks.data_index import simulate  # not above: the processes that stream import this module, too
    from benchmarks.data_tokenizing import compare

    parts: dict[str, Callable[[], None]] = {
        "streaming": lambda: streaming(arguments.tokens, arguments.rounds),
        "tokenizing": lambda: compare(arguments.rounds),
        "index": lambda: simulate(arguments.rounds),
    }
    for name, part in parts.items():
        if arguments.part in ("all", name):
            print(f"\n## {name}\n", flush=True)
            part()


if __name__ == "__main__":
    main()
