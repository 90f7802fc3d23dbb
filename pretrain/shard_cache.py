"""A directory on this node that holds the shards of remote datasets which are being read.

Responsible for what is kept: fetched once a node however many ranks and jobs want it, checked before it has its name, evicted when the
directory is full, fetched ahead of the stream. Below the cache there is a folder for each dataset, named by its fingerprint, that looks
like a dataset directory with shards missing. The one fact to know: who holds the lock of `NAME.BYTES.partial` downloads it. The kernel
drops that lock when a process dies, and the file is renamed to NAME when it has been checked.
"""

import errno
import fcntl
import hashlib
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pretrain import remote
from pretrain.shards import (
    COLUMNS,
    SPLITS,
    TOKENIZER_FOLDER,
    DamageError,
    DatasetError,
    Index,
    Shard,
    TokenReader,
    columns_file,
    index_content,
    load_index,
    tokenizer_damage,
)
from tokenizer.fingerprint import files_sha256

FOLDER = "dataset-cache-"  # and the first digits of a fingerprint; nothing else in the directory is touched
PARTIAL = ".partial"
DEFAULT_DIRECTORY = "/var/tmp/grt-shards"
HEARTBEAT_SECONDS = 60.0  # how often a reader marks the shards of its windows as in use
IN_USE_SECONDS = 180.0  # a shard that was marked this lately is not evicted for one that is only fetched ahead
WAIT_SECONDS = 600.0  # for another process that holds a shard's lock and makes no progress
POLL_SECONDS = 0.1


def default_directory() -> Path:
    """On the node's own disk, unlike many a home directory, and of this user alone.

    Raises:
        DatasetError: another user has made it, and could put anything there.
    """
    directory = Path(f"{DEFAULT_DIRECTORY}-{os.getuid()}")
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        if directory.stat().st_uid != os.getuid():
            raise DatasetError(f"{directory} belongs to another user; choose another place for the cache: data.cache_dir")
    except OSError as error:
        raise DatasetError(f"{directory} cannot be made ({error.strerror}); choose another place for the cache: data.cache_dir") from error
    return directory


@dataclass(frozen=True)
class ShardCache:
    """The shards of one dataset in a cache that other datasets, processes and jobs share.

    Args:
        url: of the dataset's directory.
        folder: of this dataset, in the cache's directory.
        max_bytes: of the cache's directory, whoever fills it.
    """

    url: str
    folder: Path
    max_bytes: int

    def fetch(self, shard: Shard) -> Path:
        """The shard's file, after a download if it is not here yet. It may be evicted at any time: open it at once.

        Raises:
            DatasetError: it cannot be had; names the shard and why.
        """
        waiting = _Patience()
        try:
            while not self._try_fetch(shard, remote.ATTEMPTS, urgent=True):
                waiting.wait(self._partial(shard))
        except OSError as error:
            raise DatasetError(
                f"{self.url}/{shard.name} cannot be kept in the cache {self.folder}: {error.strerror or error}; free space there, or "
                "choose another place: data.cache_dir"
            ) from error
        return self.folder / shard.name

    def open(self, shard: Shard) -> int:
        """A file descriptor of the shard, which stays good when the file is evicted."""
        while True:
            with suppress(FileNotFoundError):  # evicted in between
                return os.open(self.fetch(shard), os.O_RDONLY)

    def fetch_ahead(self, shard: Shard) -> bool:
        """Marks the shard as in use, or fetches it in one attempt. False if it is not here: no room, no luck, or another's download."""
        try:
            return self._try_fetch(shard, 1, urgent=False)
        except (DatasetError, OSError):  # the read that needs the shard meets it again, and reports it
            return False

    def discard(self, shard: Shard, descriptor: int) -> None:
        """Removes a shard whose copy here, open as `descriptor`, turned out to be damaged."""
        path = self.folder / shard.name
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(descriptor)):  # not one that another reader has put there since
                path.unlink()

    def _partial(self, shard: Shard) -> Path:
        return self.folder / f"{shard.name}.{shard.bytes}{PARTIAL}"

    def _try_fetch(self, shard: Shard, attempts: int, urgent: bool) -> bool:
        """True when the shard is here. Not so while another process downloads it, and, unless `urgent`, where there is no room."""
        path, partial = self.folder / shard.name, self._partial(shard)
        if _mark(path, shard.bytes):
            return True
        with _lock(partial) as mine:
            if not mine:
                return False
            if _mark(path, shard.bytes):  # the download ended between the two looks
                partial.unlink()
                return True
            complete = False
            try:
                complete = self._download(shard, partial, attempts, urgent)
            finally:
                if not complete:
                    partial.unlink(missing_ok=True)
            if complete:
                partial.rename(path)  # not synced: what a crash of the node leaves is checked when it is read
            return complete

    def _download(self, shard: Shard, partial: Path, attempts: int, urgent: bool) -> bool:
        excess = self._used() - self.max_bytes
        if excess > 0 and self._evict(excess, urgent) < excess and not urgent:
            return False
        url = f"{self.url}/{shard.name}"

        def attempt() -> None:
            try:
                remote.download(url, partial, shard.bytes, shard.sha256)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                os.truncate(partial, 0)
                self._evict(shard.bytes, urgent)  # others fill the disk too
                raise remote.TransferError(f"no space left in {self.folder}; free some, or choose another data.cache_dir") from error

        remote.with_retries(url, attempt, attempts)
        return True

    def _used(self) -> int:
        """Bytes in the cache, downloads counted as whole."""
        return sum(size for _, size, _ in self._files())

    def _files(self) -> Iterator[tuple[Path, int, float]]:
        """Path, bytes and time of the last use of each file in the cache."""
        for path in self.folder.parent.glob(f"{FOLDER}*/*"):
            with suppress(OSError, ValueError):  # gone in between, or none of ours
                status = path.stat()
                size = int(path.name.split(".")[-2]) if path.suffix == PARTIAL else status.st_size
                yield path, size, status.st_mtime

    def _evict(self, wanted: int, urgent: bool) -> int:
        """Removes what killed downloads left, then the shards unused for longest, until `wanted` bytes are free; how many are."""
        youngest = time.time() - (0 if urgent else IN_USE_SECONDS)
        files = sorted(self._files(), key=lambda file: (file[0].suffix != PARTIAL, file[2]))
        freed = 0
        for path, size, used in files:
            if freed >= wanted:
                break
            if path.suffix == ".tar" and used < youngest:
                path.unlink(missing_ok=True)  # another process may want the same room
                freed += size
            elif path.suffix == PARTIAL and _remove_abandoned(path):
                freed += size
        return freed


def _mark(path: Path, size: int) -> bool:
    """Marks a whole shard as in use now; False if there is none."""
    try:
        if path.stat().st_size != size:  # renamed whole: it was cut since then
            path.unlink()
            return False
        os.utime(path)
        return True
    except FileNotFoundError:
        return False


@contextmanager
def _lock(path: Path, create: bool = True) -> Iterator[bool]:
    """Tries for the lock of the file at `path`; yields whether this process has it, until the end of the context or of the process."""
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(descriptor), path.stat())  # not if the holder before renamed or removed it
        except (BlockingIOError, FileNotFoundError):
            mine = False
        yield mine
    finally:
        os.close(descriptor)


def _remove_abandoned(partial: Path) -> bool:
    """Removes a download that no living process is at; False if one is."""
    with suppress(FileNotFoundError), _lock(partial, create=False) as abandoned:
        if abandoned:
            partial.unlink()
        return abandoned
    return False


class _Patience:
    """Waits for another process' download as long as that makes progress."""

    def __init__(self) -> None:
        self._seen, self._since = -1, time.monotonic()

    def wait(self, partial: Path) -> None:
        with suppress(FileNotFoundError):
            size = partial.stat().st_size
            if size != self._seen:
                self._seen, self._since = size, time.monotonic()
        if time.monotonic() - self._since > WAIT_SECONDS:
            raise DatasetError(
                f"{partial.name}: another process has held its download for {WAIT_SECONDS:g} s without progress; see who with "
                f"`fuser {partial}`, and end it"
            )
        time.sleep(POLL_SECONDS)


class CachedTokenReader(TokenReader):
    """Reads through a cache, and has a shard fetched anew once if its copy here is damaged.

    Args:
        max_open_shards: as many as are read at a time: an evicted shard takes disk space for as long as it is open.
    """

    def __init__(self, index: Index, split: str, cache: ShardCache, max_open_shards: int) -> None:
        super().__init__(index, split)
        self._cache = cache
        self.max_open_shards = max_open_shards

    def read(self, shard: int, start: int, count: int) -> np.ndarray:
        try:
            return super().read(shard, start, count)
        except DamageError:
            self._discard(shard)
        return super().read(shard, start, count)

    def document_ends(self, shard: int, block: int) -> np.ndarray:
        try:
            return super().document_ends(shard, block)
        except DamageError:
            self._discard(shard)
        return super().document_ends(shard, block)

    def _discard(self, shard: int) -> None:
        """The copy that is open was whole when it came."""
        descriptor = self._open_files.pop(shard)
        self._cache.discard(self._split.shards[shard], descriptor)
        os.close(descriptor)

    def _open(self, shard: int) -> int:
        return self._cache.open(self._split.shards[shard])


def open_reader(index: Index, split: str, max_open_shards: int) -> TokenReader:
    """A reader of a dataset in a directory, or of one that comes through a cache, where at most `max_open_shards` stay open."""
    return TokenReader(index, split) if index.cache is None else CachedTokenReader(index, split, index.cache, max_open_shards)


class Prefetcher:
    """Keeps the shards of a reader's windows in the cache, in a thread of the process that reads them."""

    def __init__(self, cache: ShardCache) -> None:
        self._cache = cache
        self._thread: threading.Thread | None = None

    def want(self, shards: Sequence[Shard]) -> None:
        """From now on keeps these, the first first, and no others. The thread starts here: not before a worker process is forked."""
        if self._thread is None or not self._thread.is_alive():
            self._wishes: queue.SimpleQueue[Sequence[Shard] | None] = queue.SimpleQueue()
            self._thread = threading.Thread(target=_keep, args=(self._cache, self._wishes), daemon=True, name="prefetch")
            self._thread.start()
        self._wishes.put(shards)

    def __del__(self) -> None:
        if self._thread is not None:
            self._wishes.put(None)


def _keep(cache: ShardCache, wishes: "queue.SimpleQueue[Sequence[Shard] | None]") -> None:
    shards: Sequence[Shard] | None = ()
    pause = HEARTBEAT_SECONDS
    while True:
        with suppress(queue.Empty):
            shards, pause = wishes.get(timeout=pause), 0.5
        if shards is None:
            return
        missing = 0
        for shard in shards:
            if not wishes.empty():
                break
            missing += not cache.fetch_ahead(shard)
        pause = min(2 * pause, HEARTBEAT_SECONDS) if missing else HEARTBEAT_SECONDS


def open_remote_dataset(url: str, directory: Path, max_bytes: int) -> Index:
    """The index of the dataset at `url`, whose shards come through the cache in `directory` when they are read.

    index.json is always read anew. Its sha256 names the dataset's folder in the cache: a changed dataset never meets shards of the old.

    Raises:
        DatasetError: no dataset there, or the cache cannot be written.
    """
    url = url.rstrip("/")
    data, content = remote.with_retries(f"{url}/index.json", lambda: _read_index(url), remote.ATTEMPTS)
    fingerprint = hashlib.sha256(data).hexdigest()
    folder = directory / f"{FOLDER}{fingerprint[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _description_lock(folder):
            index = _described(folder, fingerprint)
            if index is None:
                _fetch_description(url, folder, content, data)
                index = load_index(folder)
    except OSError as error:
        raise DatasetError(
            f"the cache {folder} for {url} cannot be written: {error.strerror or error}; choose another place: data.cache_dir"
        ) from error
    return replace(index, cache=ShardCache(url, folder, max_bytes))


def _read_index(url: str) -> tuple[bytes, dict[str, Any]]:
    data = remote.read(f"{url}/index.json")
    content = index_content(data, url)
    names = [shard["name"] for split in content["splits"].values() for shard in split["shards"]] + content["tokenizer_files"]
    if any(Path(name).name != name for name in names):
        raise DatasetError(f"{url}/index.json names a file outside of its directory")
    return data, content


@contextmanager
def _description_lock(folder: Path) -> Iterator[None]:
    """Waits for the lock of a dataset's folder; the kernel drops it when a process dies."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _described(folder: Path, fingerprint: str) -> Index | None:
    """The index of the folder, if that, columns and tokenizer are here and undamaged."""
    try:
        index = load_index(folder)
    except DatasetError:
        return None
    return None if index.fingerprint != fingerprint or tokenizer_damage(index) else index


def _fetch_description(url: str, folder: Path, content: dict[str, Any], data: bytes) -> None:
    """Fetches what describes the shards, under the folder's lock; index.json, last, makes the folder a dataset directory."""
    for split in SPLITS:
        _fetch_columns(url, folder, split, content["splits"][split])
    remote.with_retries(f"{url}/{TOKENIZER_FOLDER}", lambda: _fetch_tokenizer(url, folder, content), remote.ATTEMPTS)
    _replace(folder / "index.json", data)


def _fetch_columns(url: str, folder: Path, split: str, described: dict[str, Any]) -> None:
    name, new = columns_file(split), folder / ".new"
    size = 8 * len(COLUMNS) * sum(shard["blocks"] for shard in described["shards"])
    source, sha256 = f"{url}/{name}", described["columns_sha256"]
    remote.with_retries(source, lambda: remote.download(source, new, size, sha256), remote.ATTEMPTS)
    new.rename(folder / name)


def _fetch_tokenizer(url: str, folder: Path, content: dict[str, Any]) -> None:
    copy = folder / TOKENIZER_FOLDER
    copy.mkdir(exist_ok=True)
    for name in content["tokenizer_files"]:
        _replace(copy / name, remote.read(f"{url}/{TOKENIZER_FOLDER}/{name}"))
    found = files_sha256(copy / name for name in content["tokenizer_files"])
    if found != content["tokenizer_sha256"]:
        raise remote.ContentError(f"sha256 expected {content['tokenizer_sha256']}, found {found}")


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(".new")
    new.write_bytes(data)
    new.rename(path)
