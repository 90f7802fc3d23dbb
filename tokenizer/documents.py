"""Reading documents from a corpus on disk: text files, JSON lines and Parquet, plain or compressed.

Responsible for finding files, for decoding and for naming what is wrong with them; not for tokens. A document is a line of a .jsonl
file, a row of a .parquet file, or a whole text file (a long one is cut at line ends, so that memory stays flat). The order is that of
the sorted paths, so that the same files always give the same documents.
"""

import argparse
import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, NamedTuple

import pyarrow
import pyarrow.parquet
import zstandard

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

KNOWN_ENDINGS = (".txt", ".md", ".jsonl", ".txt.gz", ".jsonl.gz", ".txt.zst", ".jsonl.zst", ".parquet")


class CorpusError(Exception):
    """Input that cannot be read as text; the message names the file, the place and a way on."""


class Document(NamedTuple):
    text: str
    bytes_read: int  # of the file so far, as it lies on disk


@dataclass(frozen=True)
class ReadOptions:
    """How files become documents."""

    text_field: str = "text"  # of .jsonl objects and .parquet rows
    invalid_utf8: Literal["error", "replace", "skip"] = "error"  # replace: by U+FFFD; skip: leave the document out
    max_text_bytes: int = 1 << 20  # a longer text file is cut, at line ends, into documents of about this size


def add_corpus_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `find_files` and `ReadOptions` need."""
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, directories or globs ('corpus/**/*.jsonl.zst')")
    parser.add_argument("--pattern", help=f"names to take from directories, such as '*.py' (default: {' '.join(KNOWN_ENDINGS)})")
    parser.add_argument("--exclude", nargs="+", default=[], metavar="NAME", help="names of files and folders to leave out")
    parser.add_argument("--text-field", default="text", help="field of .jsonl objects and .parquet rows (default: %(default)s)")
    parser.add_argument(
        "--invalid-utf8",
        choices=["error", "replace", "skip"],
        default="error",
        help="documents that are not UTF-8: stop, put U+FFFD for each bad byte, or leave the document out (default: %(default)s)",
    )
    parser.add_argument(
        "--max-text-bytes",
        type=int,
        default=ReadOptions.max_text_bytes,
        metavar="N",
        help="a longer text file is cut, at line ends, into documents of about N bytes (default: %(default)s)",
    )


def read_options(args: argparse.Namespace) -> ReadOptions:
    return ReadOptions(text_field=args.text_field, invalid_utf8=args.invalid_utf8, max_text_bytes=args.max_text_bytes)


def find_files(inputs: Sequence[str], pattern: str | None = None, exclude: Sequence[str] = ()) -> list[Path]:
    """The files that `inputs` (files, directories, globs) name, sorted and each once.

    Args:
        pattern: names to take from directories; None: those with a known ending.
        exclude: a file or folder of such a name (pattern) is left out, with what lies below it.

    Raises:
        CorpusError: an input names nothing.
    """
    found: set[Path] = set()
    for name in inputs:
        root = Path(name)
        if root.is_dir():
            files = [file for file in root.rglob(pattern or "*") if pattern or file.name.endswith(KNOWN_ENDINGS)]
            files = [file for file in files if not _excluded(file.relative_to(root), exclude)]
            nothing = f"no file below {name} is named {pattern or ' or '.join('*' + ending for ending in KNOWN_ENDINGS)}; see --pattern"
        else:
            files = [root] if root.exists() else [Path(file) for file in glob.glob(name, recursive=True)]
            files = [file for file in files if not _excluded(file, exclude)]
            nothing = f"no file matches {name}"
        matches = {file for file in files if file.is_file()}
        if not matches:
            raise CorpusError(nothing)
        found |= matches
    return sorted(found)


def _excluded(file: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch(part, pattern) for part in file.parts for pattern in patterns)


def read_documents(path: Path, options: ReadOptions) -> Iterator[Document]:
    """Documents of one file in order, without the empty ones.

    Raises:
        CorpusError: bytes that are not UTF-8 (under "error"), broken JSON, compression or Parquet, a missing field.
    """
    try:
        if path.suffix == ".parquet":
            documents = _read_parquet(path, options)
        elif path.name.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl"):
            documents = _read_json_lines(path, options)
        else:
            documents = _read_text(path, options)
        for document in documents:
            if document.text:
                yield document
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as error:
        raise CorpusError(f"{path} cannot be decompressed: {error}; it is damaged or incomplete: fetch it again") from error
    except pyarrow.ArrowException as error:
        raise CorpusError(f"{path} cannot be read as Parquet: {error}") from error
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error}") from error


def _read_text(path: Path, options: ReadOptions) -> Iterator[Document]:
    with open(path, "rb") as raw, _decompressed(path, raw) as file:
        offset = 0
        lines: list[bytes] = []
        size = 0
        for line in file:
            lines.append(line)
            size += len(line)
            if size >= options.max_text_bytes:
                yield Document(_decode(b"".join(lines), path, offset, options), raw.tell())
                offset, lines, size = offset + size, [], 0
        yield Document(_decode(b"".join(lines), path, offset, options), raw.tell())


def _read_json_lines(path: Path, options: ReadOptions) -> Iterator[Document]:
    with open(path, "rb") as raw, _decompressed(path, raw) as file:
        offset = 0
        for number, line in enumerate(file, start=1):
            text = _decode(line, path, offset, options)
            offset += len(line)
            if text.strip():
                yield Document(_json_text(text, path, number, options), raw.tell())


def _json_text(line: str, path: Path, number: int, options: ReadOptions) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise CorpusError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(row, dict) or not isinstance(row.get(options.text_field), str):
        fields = ", ".join(row) if isinstance(row, dict) else f"none: it is a {type(row).__name__}"
        raise CorpusError(f"{path}, line {number}: no text in the field {options.text_field!r} (fields: {fields}); see --text-field")
    text: str = row[options.text_field]
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which no UTF-8 can
        if options.invalid_utf8 == "error":
            place = f"{path}, line {number}: the escape \\u{ord(text[error.start]):04x} is half a surrogate pair"
            raise CorpusError(f"{place}; {_WAY_ON}") from error
        return "" if options.invalid_utf8 == "skip" else text.encode(errors="surrogatepass").decode(errors="replace")
    return text


def _read_parquet(path: Path, options: ReadOptions) -> Iterator[Document]:
    with pyarrow.parquet.ParquetFile(path) as file:
        if options.text_field not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise CorpusError(f"{path} has no column {options.text_field!r} (columns: {names}); see --text-field")
        size, rows, rows_read = path.stat().st_size, file.metadata.num_rows, 0
        for batch in file.iter_batches(batch_size=256, columns=[options.text_field]):
            for value in batch.column(0).cast(pyarrow.binary()).to_pylist():
                rows_read += 1
                yield Document(_decode(value or b"", path, 0, options, f"row {rows_read}, "), size * rows_read // rows)


_WAY_ON = "convert the file, or pass --invalid-utf8 replace or --invalid-utf8 skip"


def _decode(data: bytes, path: Path, offset: int, options: ReadOptions, place: str = "") -> str:
    """Text of `data`, which starts at byte `offset` of the (decompressed) file; empty for a document to skip."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if options.invalid_utf8 == "error":
            position = offset + error.start
            message = f"{path} is not UTF-8: {place}byte 0x{data[error.start]:02x} at offset {position} ({error.reason})"
            raise CorpusError(f"{message}; {_WAY_ON}") from error
        return "" if options.invalid_utf8 == "skip" else data.decode(errors="replace")


def _decompressed(path: Path, raw: IO[bytes]) -> io.BufferedIOBase | IO[bytes]:
    if path.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if path.suffix == ".zst":
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
