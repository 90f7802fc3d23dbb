"""Finds the documents that repeat an earlier one by the 128-bit blake2b hash of their text, in memory that does not grow with them.

Hashes are put down in sorted runs of RUN_DOCUMENTS; then ranges of hash values, each about a run's size, are read from all runs and
sorted. On disk a document takes 24 bytes while this is at work (hash and number), and one bit of the result. Two different
texts with one hash are not to be expected: of 10^9 documents with a chance of 10^-21.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

RUN_DOCUMENTS = 1 << 21  # 48 MiB; with what sorting needs, at most about 250 MB (measured)
COUNTS = "documents.bin"  # uint32: how many documents each task gave
RESULT = "duplicates.bin"  # a bit a document, the lowest first


def text_hashes(texts: Iterable[str]) -> np.ndarray:
    """uint64 [documents, 2]."""
    data = b"".join(hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts)
    return np.frombuffer(data, "<u8").reshape(-1, 2)


class HashRuns:
    """Takes the hashes of all documents in the corpus' order, task by task, and puts them down in sorted runs.

    Only whole runs are on disk. `runs`, `tasks` and `documents` say what they cover, and making another object with these goes on there.
    """

    def __init__(self, directory: Path, runs: int = 0, tasks: int = 0, documents: int = 0) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self.runs, self.tasks, self.documents = runs, tasks, documents
        self._pending: list[np.ndarray] = []
        self._pending_documents = 0
        with open(directory / COUNTS, "ab") as counts:
            counts.truncate(4 * tasks)

    def add(self, hashes: np.ndarray) -> bool:
        """Appends a task's documents; True where this ended a run."""
        self._pending.append(hashes)
        self._pending_documents += len(hashes)
        if self._pending_documents < RUN_DOCUMENTS:
            return False
        self.write_run()
        return True

    def write_run(self) -> None:
        """Puts down what was added since the last run."""
        if not self._pending:
            return
        low, high = np.concatenate(self._pending).T
        order = np.lexsort((low, high))  # stable: equal hashes stay in the order of the documents
        low, high, documents = low[order], high[order], (order + self.documents).astype("<u8")
        again = repeats(low, high)
        # A hash is once in a run, so that a text which the corpus repeats without end does not fill one range of the values.
        _write_synced(_run_file(self._directory, self.runs), [column[~again] for column in (high, low, documents)])
        _write_synced(_repeats_file(self._directory, self.runs), [documents[again]])
        with open(self._directory / COUNTS, "ab") as counts:
            counts.write(np.array([len(hashes) for hashes in self._pending], "<u4").tobytes())
            counts.flush()
            os.fsync(counts.fileno())
        self.runs, self.tasks, self.documents = self.runs + 1, self.tasks + len(self._pending), self.documents + len(order)
        self._pending, self._pending_documents = [], 0


def find_duplicates(directory: Path, runs: int, documents: int) -> Iterator[float]:
    """Compares all runs, and writes RESULT. Yields how much of the work is done. Killed and called again, it begins anew."""
    result = directory / f"{RESULT}.partial"
    with open(result, "wb") as file:
        file.truncate(-(-documents // 8))
    bits = np.memmap(result, np.uint8, "r+") if documents else np.empty(0, np.uint8)
    for run in range(runs):
        _set(bits, np.fromfile(_repeats_file(directory, run), "<u8"))
    ranges = -(-documents // RUN_DOCUMENTS)
    limits = _range_limits(directory, runs, ranges)
    for number in range(ranges):
        parts = [_read_rows(_run_file(directory, run), *map(int, limits[run, number : number + 2])) for run in range(runs)]
        high, low, numbers = np.concatenate(parts, axis=1)
        order = np.lexsort((low, high))  # stable, and the runs are in the documents' order
        _set(bits, numbers[order][repeats(low[order], high[order])])
        yield (number + 1) / ranges
    if isinstance(bits, np.memmap):
        bits.flush()
    os.replace(result, directory / RESULT)


def repeats(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """bool: where a sorted hash equals the one before it."""
    again = np.zeros(len(low), bool)
    again[1:] = (low[1:] == low[:-1]) & (high[1:] == high[:-1])
    return again


class Duplicates:
    """Which documents of a task are to be left out; read for one task after the other.

    Args:
        tasks: that were done before.
    """

    def __init__(self, directory: Path, tasks: int = 0) -> None:
        self._bits = directory / RESULT
        self._counts = np.fromfile(directory / COUNTS, "<u4")  # 4 bytes for about a megabyte of text
        self._task = tasks
        self._document = int(self._counts[:tasks].sum(dtype=np.int64))

    def next_task(self) -> np.ndarray:
        """bool [documents]; none for a task that was not there when the documents were compared."""
        count = int(self._counts[self._task]) if self._task < len(self._counts) else 0
        first, last = self._document // 8, -(-(self._document + count) // 8)
        bits = np.unpackbits(np.fromfile(self._bits, np.uint8, last - first, offset=first), bitorder="little")
        start = self._document % 8
        self._task, self._document = self._task + 1, self._document + count
        return bits[start : start + count].astype(bool)


def discard_runs(directory: Path) -> None:
    """Frees the disk space that only `find_duplicates` needs."""
    for path in directory.glob("run-*.bin"):
        path.unlink()


def _run_file(directory: Path, run: int) -> Path:
    """uint64 [3, hashes]: high half, low half, document; sorted, each hash once."""
    return directory / f"run-{run:05d}.bin"


def _repeats_file(directory: Path, run: int) -> Path:
    """uint64: documents whose hash an earlier one of the same run has."""
    return directory / f"run-{run:05d}.repeats.bin"


def _range_limits(directory: Path, runs: int, ranges: int) -> np.ndarray:
    """uint32 [runs, ranges + 1]: where the ranges of hash values begin in each run."""
    starts = np.array([(number << 64) // ranges for number in range(ranges)], "<u8")
    limits = np.zeros((runs, ranges + 1), np.uint32)
    for run in range(runs):
        path = _run_file(directory, run)
        count = path.stat().st_size // 24
        limits[run, :-1] = np.searchsorted(np.fromfile(path, "<u8", count), starts)
        limits[run, -1] = count
    return limits


def _read_rows(path: Path, start: int, stop: int) -> np.ndarray:
    count = path.stat().st_size // 24
    return np.stack([np.fromfile(path, "<u8", stop - start, offset=8 * (column * count + start)) for column in range(3)])


def _set(bits: np.ndarray, documents: np.ndarray) -> None:
    np.bitwise_or.at(bits, documents >> 3, np.left_shift(1, documents & 7).astype(np.uint8))


def _write_synced(path: Path, columns: list[np.ndarray]) -> None:
    with open(path, "wb") as file:
        for column in columns:
            file.write(column.tobytes())
        file.flush()
        os.fsync(file.fileno())
