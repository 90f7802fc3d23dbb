"""What is done to each document: decoded, filtered, hashed or encoded; in several processes, with the results in the corpus' order."""

import hashlib
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokenizer.decoding import CorpusError, ReadOptions
from tokenizer.documents import Chunk
from tokenizer.tokenizer import Tokenizer, load_tokenizer
from tools.duplicates import text_hashes
from tools.shard_writer import token_dtype
from tools.tasks import Position, Task
from tools.workers import start_worker


@dataclass(frozen=True)
class DocumentOptions:
    """Which documents are kept, and where they go.

    Attributes:
        min_characters, max_characters: a shorter or longer document is left out.
        validation_fraction: of the documents, chosen by a hash of their text.
    """

    read: ReadOptions = ReadOptions()
    min_characters: int = 1
    max_characters: int | None = None
    validation_fraction: float = 0.01


class TokenBatch(NamedTuple):
    """Encoded documents, one after the other, each with its EOS, and how many were left out."""

    tokens: np.ndarray  # of the dataset's dtype
    ends: np.ndarray  # int64 [documents]
    is_validation: np.ndarray  # bool [documents]
    text_bytes: np.ndarray  # int64 [documents]
    too_short: int
    too_long: int
    duplicates: int


class DocumentWorker:
    """Made once in each process."""

    def __init__(self, tokenizer: Tokenizer, options: DocumentOptions) -> None:
        self._tokenizer, self._options = tokenizer, options
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._validation_below = int(options.validation_fraction * 2**64)

    def hashes(self, chunks: list[Chunk], _: None) -> np.ndarray:
        """uint64 [documents, 2], of those that the filters keep."""
        texts, _too_short, _too_long = self._texts(chunks)
        return text_hashes(texts)

    def encode(self, chunks: list[Chunk], is_duplicate: np.ndarray | None) -> TokenBatch:
        """
        Args:
            is_duplicate: bool, for each document that the filters keep; None: no document is one.
        """
        texts, too_short, too_long = self._texts(chunks)
        duplicates = 0
        if is_duplicate is not None:
            if len(is_duplicate) != len(texts):
                raise CorpusError("the corpus changed after its documents were compared: run the command again from the start")
            texts = [text for text, drop in zip(texts, is_duplicate, strict=True) if not drop]
            duplicates = int(is_duplicate.sum())
        ids = [np.array([*self._tokenizer.encode(text), self._tokenizer.eos_id], self._dtype) for text in texts]
        data = [text.encode() for text in texts]
        return TokenBatch(
            np.concatenate([np.empty(0, self._dtype), *ids]),
            np.cumsum([len(document) for document in ids], dtype=np.int64),
            np.array([self._is_validation(document) for document in data], bool),
            np.array([len(document) for document in data], np.int64),
            too_short,
            too_long,
            duplicates,
        )

    def _texts(self, chunks: list[Chunk]) -> tuple[list[str], int, int]:
        """The documents to keep, and how many are too short and too long. Empty ones are no documents."""
        texts = [text for chunk in chunks for text in chunk.texts(self._options.read) if text]
        low, high = self._options.min_characters, self._options.max_characters
        too_short = sum(len(text) < low for text in texts)
        too_long = sum(len(text) > high for text in texts) if high is not None else 0
        if too_short or too_long:
            texts = [text for text in texts if len(text) >= low and (high is None or len(text) <= high)]
        return texts, too_short, too_long

    def _is_validation(self, text: bytes) -> bool:
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") < self._validation_below


class Done(NamedTuple):
    """A task's result, and where the task ended."""

    result: Any
    end: Position
    bytes_read: int


class WorkerPool:
    """Processes with a `DocumentWorker` each (1: this process); a context manager."""

    def __init__(self, processes: int, tokenizer: Tokenizer, options: DocumentOptions) -> None:
        self._processes = processes
        self._here = DocumentWorker(tokenizer, options) if processes == 1 else None
        self._pool = None
        if processes > 1:
            self._pool = ProcessPoolExecutor(
                processes,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(tokenizer.files[0].parent, options),
            )

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def hashes(self, tasks: Iterator[Task]) -> Iterator[Done]:
        """Results are arrays, as of `DocumentWorker.hashes`, in the order of `tasks`."""
        return self._map(DocumentWorker.hashes, ((task, None) for task in tasks))

    def encode(self, tasks: Iterator[tuple[Task, np.ndarray | None]]) -> Iterator[Done]:
        """Results are `TokenBatch`es, in the order of `tasks`, which come with what `DocumentWorker.encode` takes."""
        return self._map(DocumentWorker.encode, tasks)

    def _map(self, method: Callable[..., Any], tasks: Iterator[tuple[Task, Any]]) -> Iterator[Done]:
        """A few tasks ahead of the results."""
        if self._here:
            for task, extra in tasks:
                yield Done(method(self._here, task.chunks, extra), task.end, task.bytes_read)
            return
        assert self._pool
        waiting: deque[tuple[Future[Any], Position, int]] = deque()
        for task, extra in tasks:
            waiting.append((self._pool.submit(_run, method, task.chunks, extra), task.end, task.bytes_read))
            if len(waiting) > 2 * self._processes:
                future, end, bytes_read = waiting.popleft()
                yield Done(future.result(), end, bytes_read)
        for future, end, bytes_read in waiting:
            yield Done(future.result(), end, bytes_read)


_worker: DocumentWorker  # of a worker process, which has no other place for it


def _start_worker(tokenizer_directory: Path, options: DocumentOptions) -> None:
    global _worker
    start_worker()
    _worker = DocumentWorker(load_tokenizer(tokenizer_directory), options)


def _run(method: Callable[..., Any], chunks: list[Chunk], extra: Any) -> Any:
    return method(_worker, chunks, extra)
