"""The corpus as tasks of about a megabyte, which worker processes take one by one; where each ends is a place to start again."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tokenizer import documents
from tokenizer.corpus import CorpusFile
from tokenizer.decoding import ReadOptions
from tokenizer.documents import Chunk, read_chunks


class Position(NamedTuple):
    """A place between two tasks."""

    file: int = 0  # files before this one are read
    chunks: int = 0  # read of this one
    tasks: int = 0  # so far

    @property
    def files_touched(self) -> int:
        return self.file + (self.chunks > 0)


class Task(NamedTuple):
    chunks: list[Chunk]
    end: Position
    bytes_read: int  # of the corpus so far, as it is stored


def read_tasks(files: Sequence[CorpusFile], options: ReadOptions, start: Position) -> Iterator[Task]:
    """Tasks from `start` on; from whatever start, they are cut at the same places.

    Raises:
        CorpusError: a file cannot be read, or is cut short.
    """
    chunks: list[Chunk] = []
    size = tasks = bytes_read = 0
    end = start
    bytes_before = corpus_bytes(files[: start.file])
    for number in range(start.file, len(files)):
        for index, chunk in enumerate(read_chunks(files[number], options)):
            if number == start.file and index < start.chunks:
                continue
            chunks.append(chunk)
            size += chunk.size
            bytes_read = bytes_before + chunk.bytes_read
            end = Position(number, index + 1, start.tasks + tasks + 1)
            if size >= documents.CHUNK_BYTES:
                yield Task(chunks, end, bytes_read)
                chunks, size, tasks = [], 0, tasks + 1
        bytes_before += max(0, files[number].size)
    if chunks:
        yield Task(chunks, end, bytes_read)


def corpus_bytes(files: Sequence[CorpusFile]) -> int:
    """As stored; files whose size a server does not tell count nothing."""
    return sum(max(0, file.size) for file in files)
