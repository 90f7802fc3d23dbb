"""The files of a corpus: found by name, folder, glob, URL or as a saved Hugging Face dataset, and opened.

Responsible for names, sizes and bytes, local or through fsspec; not for what the bytes mean (`documents.py`). The order of the files
is that of their sorted paths, so that the same files always give the same corpus.
"""

import argparse
import glob
import io
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

import fsspec

from tokenizer.decoding import CorpusError, ReadOptions

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

KNOWN_ENDINGS = (".txt", ".md", ".jsonl", ".txt.gz", ".jsonl.gz", ".txt.zst", ".jsonl.zst", ".parquet", ".tar")
REMOTE_ATTEMPTS = 5
REMOTE_WAIT = 1.0  # seconds before the second attempt; doubles


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """One file of the corpus.

    Attributes:
        name: path or URL, as messages give it.
        size: bytes as stored, -1 where a server does not tell.
        stamp: differs when the file was changed: its time of change, or what the server says of its version.
    """

    name: str
    size: int
    stamp: str
    filesystem: fsspec.AbstractFileSystem | None = field(default=None, compare=False, repr=False)  # None: `name` is a local path
    remote_path: str = ""  # the filesystem's own name for it

    @property
    def path(self) -> str:
        """The name without a URL's query, which may hold a signature that differs from day to day."""
        return urlsplit(self.name)._replace(query="").geturl() if self.filesystem else self.name

    def open(self) -> IO[bytes]:
        if self.filesystem is None:
            return open(self.name, "rb")
        return io.BufferedReader(_RemoteFile(self), 1 << 20)


def local_file(path: Path | str) -> CorpusFile:
    try:
        state = Path(path).stat()
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error}") from error
    return CorpusFile(str(path), state.st_size, str(state.st_mtime_ns))


class _RemoteFile(io.RawIOBase):
    """A remote file that is opened again where it broke off."""

    def __init__(self, file: CorpusFile) -> None:
        self._source = file
        self._position = 0
        self._file: Any = None  # of the file system's own class

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._source.size >= 0

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        view = memoryview(buffer)
        if self._source.size >= 0:
            view = view[: max(0, self._source.size - self._position)]
        data = self._read(len(view)) if len(view) else b""
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _read(self, count: int) -> bytes:
        for attempt in range(REMOTE_ATTEMPTS):
            if attempt:
                time.sleep(REMOTE_WAIT * 2 ** (attempt - 1))
            try:
                if self._file is None:
                    assert self._source.filesystem is not None
                    self._file = self._source.filesystem.open(self._source.remote_path, "rb")
                if self._file.tell() != self._position:
                    self._file.seek(self._position)
                data: bytes = self._file.read(count)
                if data or self._source.size < 0:
                    return data
                reason: object = f"it ended at byte {self._position} of {self._source.size}"
            except FileNotFoundError:
                raise
            except Exception as error:  # each file system raises what its own library raises
                reason = f"{type(error).__name__}: {error}"
            self._close_file()
        raise OSError(f"after {REMOTE_ATTEMPTS} attempts, {reason}")

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def close(self) -> None:
        self._close_file()
        super().close()


def add_corpus_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `find_files` and `ReadOptions` need."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, directories, globs ('corpus/**/*.jsonl.zst'), URLs with or without globs ('s3://bucket/dump/*.parquet') or datasets "
        "that Hugging Face's save_to_disk wrote",
    )
    parser.add_argument("--pattern", help=f"names to take from directories, such as '*.py' (default: {' '.join(KNOWN_ENDINGS)})")
    parser.add_argument("--exclude", nargs="+", default=[], metavar="NAME", help="names of files and folders to leave out")
    parser.add_argument("--text-field", default="text", help="field of JSON objects, column of tables (default: %(default)s)")
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


def find_files(inputs: Sequence[str], pattern: str | None = None, exclude: Sequence[str] = ()) -> list[CorpusFile]:
    """The files that `inputs` (files, directories, globs, URLs, saved datasets) name, sorted and each once.

    Args:
        pattern: names to take from directories; None: those with a known ending.
        exclude: a file or folder of such a name (pattern) is left out, with what lies below it.

    Raises:
        CorpusError: an input names nothing, or cannot be looked at.
    """
    found: dict[str, CorpusFile] = {}
    for name in inputs:
        files = list(_find_remote(name, pattern, exclude) if is_url(name) else map(local_file, _find_local(name, pattern, exclude)))
        if not files:
            endings = pattern or " or ".join("*" + ending for ending in KNOWN_ENDINGS)
            is_folder = Path(name).is_dir()
            raise CorpusError(f"no file below {name} is named {endings}; see --pattern" if is_folder else f"no file matches {name}")
        found.update((file.name, file) for file in files)
    return [found[name] for name in sorted(found, key=lambda name: name.split("/"))]


def is_url(name: str) -> bool:
    return re.match(r"[a-z][a-z0-9+.-]*:(//|:)", name) is not None


def _find_local(name: str, pattern: str | None, exclude: Sequence[str]) -> Iterator[Path]:
    root = Path(name)
    if (root / "state.json").is_file() or (root / "dataset_dict.json").is_file():
        yield from _saved_dataset(root)
    elif root.is_dir():
        found = (file for file in root.rglob(pattern or "*") if pattern or file.name.endswith(KNOWN_ENDINGS))
        yield from (file for file in found if file.is_file() and not _excluded(file.relative_to(root).parts, exclude))
    else:
        files = [root] if root.exists() else map(Path, glob.iglob(name, recursive=True))
        yield from (file for file in files if file.is_file() and not _excluded(file.parts, exclude))


def _saved_dataset(root: Path) -> Iterator[Path]:
    """The tables of a dataset that `datasets.Dataset.save_to_disk` wrote."""
    try:
        if (root / "dataset_dict.json").is_file():
            splits = json.loads((root / "dataset_dict.json").read_bytes())["splits"]
            raise CorpusError(f"{root} is a saved dataset of several splits: name those to use: {' '.join(f'{root}/{s}' for s in splits)}")
        names = [file["filename"] for file in json.loads((root / "state.json").read_bytes())["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CorpusError(f"{root} looks like a saved Hugging Face dataset, but its JSON is not as expected ({error!r})") from error
    for name in names:
        if not (root / name).is_file():
            raise CorpusError(f"{root} is a saved dataset without its table {name}: fetch or save it again")
        yield root / name


def _find_remote(url: str, pattern: str | None, exclude: Sequence[str]) -> Iterator[CorpusFile]:
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
        http = url.startswith(("http://", "https://"))
        if "*" in path if http else glob.has_magic(path):
            infos = list(filesystem.glob(path, detail=True).values())
        elif not http and filesystem.isdir(path):
            infos = list(filesystem.find(path, detail=True).values())
            infos = [info for info in infos if fnmatch(_base(info), pattern or "*") and (pattern or _base(info).endswith(KNOWN_ENDINGS))]
        else:
            infos = [filesystem.info(path)]
    except Exception as error:  # each file system raises what its own library raises
        hint = "; install what it names, or pip install -e '.[remote]'" if isinstance(error, ImportError) else ""
        cause = f" ({error.__cause__})" if error.__cause__ else ""  # HTTP: why a file is "not found"
        raise CorpusError(f"{url} cannot be opened: {type(error).__name__}: {error}{cause}{hint}") from error
    for info in infos:
        name = filesystem.unstrip_protocol(info["name"])
        if info["type"] == "file" and not _excluded(name.split("/"), exclude):
            stamp = next((str(info[key]) for key in ("ETag", "etag", "LastModified", "mtime", "created") if info.get(key)), "")
            yield CorpusFile(name, -1 if info["size"] is None else info["size"], stamp, filesystem, info["name"])


def _base(info: dict[str, Any]) -> str:
    return str(info["name"]).rpartition("/")[2]


def _excluded(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatch(part, pattern) for part in parts for pattern in patterns)
