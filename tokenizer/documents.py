"""Reading documents from the files of a corpus: text, JSON lines, tables (Parquet, Arrow) and tars of text, plain or compressed.

A document is a line of a .jsonl file, a row of a table, a sample of a tar, or a whole text file (a long one is cut at line ends, so that
memory stays flat). Reading is in two parts: `read_chunks` cuts a file into chunks of about a megabyte, which is cheap and sequential;
`chunk.texts` decodes one, which is dear and can be done in another process.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, NamedTuple, Protocol

import pyarrow
import zstandard

from tokenizer.corpus import CorpusFile
from tokenizer.decoding import CorpusError, ReadOptions, decode, json_text
from tokenizer.tables import read_arrow, read_parquet
from tokenizer.text_tars import read_tar

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CHUNK_BYTES = 1 << 20


class Chunk(Protocol):
    """Some consecutive documents of a file, not yet decoded.

    Attributes:
        size: bytes held here.
        bytes_read: of the file so far, as it is stored.
    """

    @property
    def size(self) -> int: ...
    @property
    def bytes_read(self) -> int: ...
    def texts(self, options: ReadOptions) -> Iterator[str]:
        """The documents; an empty text where there is none.

        Raises:
            CorpusError: bytes that are not UTF-8 (under "error"), broken JSON, a missing field.
        """


class Document(NamedTuple):
    text: str
    bytes_read: int  # of the file so far, as it is stored


@dataclass(frozen=True)
class TextChunk:
    """A document of a text file: the whole file, or a piece of a long one."""

    name: str
    data: bytes
    offset: int
    bytes_read: int

    @property
    def size(self) -> int:
        return len(self.data)

    def texts(self, options: ReadOptions) -> Iterator[str]:
        yield decode(self.data, self.name, self.offset, options)


@dataclass(frozen=True)
class LinesChunk:
    """Whole lines of a .jsonl file."""

    name: str
    data: bytes
    offset: int
    first_line: int
    bytes_read: int

    @property
    def size(self) -> int:
        return len(self.data)

    def texts(self, options: ReadOptions) -> Iterator[str]:
        offset = self.offset
        for number, line in enumerate(io.BytesIO(self.data), start=self.first_line):
            text = decode(line, self.name, offset, options)
            offset += len(line)
            if text.strip():
                yield json_text(text, f"{self.name}, line {number}", options)


def read_documents(file: CorpusFile, options: ReadOptions) -> Iterator[Document]:
    """Documents of one file in order, without the empty ones.

    Raises:
        CorpusError: as `read_chunks` and `Chunk.texts`.
    """
    for chunk in read_chunks(file, options):
        for text in chunk.texts(options):
            if text:
                yield Document(text, chunk.bytes_read)


def read_chunks(file: CorpusFile, options: ReadOptions) -> Iterator[Chunk]:
    """The file in pieces, which depend on its contents and `options` alone.

    Raises:
        CorpusError: it cannot be opened or read, is cut short, or lacks the column.
    """
    path = file.path
    try:
        with file.open() as raw:
            if path.endswith(".parquet"):
                yield from read_parquet(file, raw, options, CHUNK_BYTES)
            elif path.endswith(".arrow"):
                yield from read_arrow(file, raw, options, CHUNK_BYTES)
            elif path.endswith(".tar"):
                yield from read_tar(file, raw, CHUNK_BYTES)
            elif path.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl"):
                yield from _read_json_lines(file, raw)
            else:
                yield from _read_text(file, raw, options.max_text_bytes)
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as error:
        raise CorpusError(f"{file.name} cannot be decompressed: {error}; it is damaged or incomplete: fetch it again") from error
    except pyarrow.ArrowException as error:
        kind = "Parquet" if path.endswith(".parquet") else "an Arrow table"
        raise CorpusError(f"{file.name} cannot be read as {kind}: {error}; it is damaged, incomplete or of another kind") from error
    except OSError as error:
        raise CorpusError(f"{file.name} cannot be read: {error}") from error


def _read_json_lines(file: CorpusFile, raw: IO[bytes]) -> Iterator[LinesChunk]:
    with _decompressed(file, raw) as lines:
        offset, first_line = 0, 1
        while data := lines.read(CHUNK_BYTES):
            if not data.endswith(b"\n"):
                data += lines.readline()
            yield LinesChunk(file.name, data, offset, first_line, raw.tell())
            offset += len(data)
            first_line += data.count(b"\n")


def _read_text(file: CorpusFile, raw: IO[bytes], limit: int) -> Iterator[TextChunk]:
    with _decompressed(file, raw) as text:
        offset, carried = 0, b""
        while data := carried + text.read(limit - len(carried)):
            carried = b""
            if not data.endswith(b"\n"):
                data += text.readline(limit)
                if len(data) >= 2 * limit and not data.endswith(b"\n"):  # hardly text: cut where a character begins
                    cut = next((i for i in range(len(data) - 1, len(data) - 5, -1) if data[i] & 0xC0 != 0x80), len(data) - 1)
                    data, carried = data[:cut], data[cut:]
            yield TextChunk(file.name, data, offset, raw.tell())
            offset += len(data)


def _decompressed(file: CorpusFile, raw: IO[bytes]) -> io.BufferedIOBase | IO[bytes]:
    if file.path.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    if file.path.endswith(".zst"):
        return io.BufferedReader(_ZstdReader(raw), 1 << 17)
    return raw


class _ZstdReader(io.RawIOBase):
    """Zstandard frames as a stream. zstandard's own reader takes a truncated file for a complete one; this one raises EOFError."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._frame_begun = False
        self._data = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        while not self._data:
            chunk = self._frame.unused_data or self._raw.read(1 << 15)
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
                self._frame_begun = False
            if not chunk:
                if self._frame_begun:
                    raise EOFError("the file ends inside a frame")
                return 0
            self._data = self._frame.decompress(chunk)
            self._frame_begun = True
        view = memoryview(buffer)
        count = min(len(view), len(self._data))
        view[:count] = self._data[:count]
        self._data = self._data[count:]
        return count
