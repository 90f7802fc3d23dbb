"""Files of a dataset that lies behind a URL which fsspec opens: http, https, s3, gs and others.

Responsible for getting one file whole and checked, with retries; not for where it is kept (`shard_cache.py`). The one fact to know:
a transfer is watched, and ended when it brings no bytes for a while, or more of them than the file should have.
"""

import asyncio
import hashlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem, sync

from pretrain.shards import DatasetError

ATTEMPTS = 5
FIRST_BACKOFF = 1.0  # seconds before the second attempt; doubled for each that follows
STALL_SECONDS = 30.0
STALL_BYTES = 1 << 16  # a transfer that brings fewer in STALL_SECONDS has stalled
MOST_READ = 1 << 30  # bytes of an index or a tokenizer's file

T = TypeVar("T")


def is_url(path: Path | str) -> bool:
    return "://" in str(path)


def with_retries(name: str, attempt: Callable[[], T], attempts: int) -> T:
    """What `attempt` returns, in the last of at most `attempts` tries; longer and longer waits lie between them.

    Raises:
        DatasetError: no try succeeded, or the server said that none would; names `name` and the last reason.
    """
    for number in range(1, attempts + 1):
        try:
            return attempt()
        except Exception as error:  # every protocol's library has its own kinds
            reason = str(error) or type(error).__name__
            if _is_final(error):
                raise DatasetError(f"{name} cannot be read: {type(error).__name__}: {reason}") from error
            if number == attempts:
                raise DatasetError(f"{name} could not be read in {attempts} attempts, the last of them: {reason}") from error
        pause = FIRST_BACKOFF * 2 ** (number - 1) * (0.5 + random.SystemRandom().random())  # spread, or all nodes come back at once
        print(f"warning: {name}: {reason}; attempt {number + 1} of {attempts} in {pause:.1f} s", file=sys.stderr, flush=True)
        time.sleep(pause)
    raise AssertionError("attempts is at least 1")


def _is_final(error: Exception) -> bool:
    """Not there or not allowed, in fsspec's words or HTTP's. 408 and 429 ask to try again."""
    status = getattr(error, "status", None)
    refused = isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)
    return refused or isinstance(error, FileNotFoundError | PermissionError | ImportError)


class TransferError(Exception):
    """A transfer that brought something else than was asked for, or nothing; another may do better."""


class ContentError(TransferError):
    """A transfer that ended, and brought what the index does not describe."""


class _Received(fsspec.Callback):
    """Counts the bytes of a transfer, and ends one that brings more than `limit`."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def relative_update(self, inc: int = 1) -> None:
        self.value += inc
        if self.value > self._limit:
            raise ContentError(f"the server sends more than the {self._limit} bytes that the index says")


def download(url: str, target: Path, size: int, sha256: str) -> None:
    """Writes the file at `url` to `target`, once, and checks it.

    Raises:
        TransferError: size or sha256 differs (a ContentError), or the transfer stalled. Else whatever fsspec raises.
    """
    _transfer(url, target, size)
    with open(target, "rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise ContentError(f"the transfer ended after {found} bytes, the index says {size}")
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise ContentError(f"sha256 expected {sha256}, found {digest}: the server holds another file than the index describes")


def read(url: str) -> bytes:
    """A file of unknown size, unchecked. It has to fit in memory."""
    with tempfile.NamedTemporaryFile() as file:
        _transfer(url, Path(file.name), MOST_READ)
        return Path(file.name).read_bytes()


def size(url: str) -> int | None:
    """Bytes of a file, as the server says; None if it does not.

    Raises:
        FileNotFoundError: the server says that there is no such file. Else whatever fsspec raises.
    """
    filesystem, path = _open(url)
    try:
        if isinstance(filesystem, AsyncFileSystem):
            info = sync(filesystem.loop, filesystem._info, path, timeout=STALL_SECONDS)
        else:
            info = filesystem.info(path)
    except FileNotFoundError as error:
        reason = error.__cause__  # fsspec's HTTP says "not found" of any failure
        if url.startswith("http") and reason is not None and getattr(reason, "status", None) not in (404, 410):
            raise reason from None
        raise
    return info["size"]


def _transfer(url: str, target: Path, most: int) -> None:
    filesystem, path = _open(url)
    received = _Received(most)
    if isinstance(filesystem, AsyncFileSystem):
        sync(filesystem.loop, _watch, filesystem._get_file(path, str(target), callback=received), received)
    else:  # in the calling thread, which nothing can interrupt
        filesystem.get_file(path, str(target), callback=received)


async def _watch(transfer: Coroutine[Any, Any, None], received: _Received) -> None:
    """Runs `transfer`, and ends it where it brings fewer than STALL_BYTES in STALL_SECONDS."""
    task = asyncio.ensure_future(transfer)
    before = 0
    while not (await asyncio.wait({task}, timeout=STALL_SECONDS))[0]:
        count = received.value
        if count - before < STALL_BYTES:
            task.cancel()
            await asyncio.wait({task}, timeout=STALL_SECONDS)  # until it writes no more
            raise TransferError(f"the server stalls: {count - before} bytes in {STALL_SECONDS:g} s, after {before}")
        before = count
    task.result()


def _open(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    options: dict[str, Any] = {}
    try:
        if url.startswith(("http://", "https://")):
            from aiohttp import ClientTimeout  # an extra, as fsspec's other protocols are

            options["timeout"] = ClientTimeout(total=None)  # else a large shard is cut off after 5 minutes, however well it flows
        filesystem, path = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:  # ValueError: an unknown protocol
        raise ImportError(f"{error}. Install what reads such a URL: pip install -e '.[remote]' brings HTTP and S3") from error
    return filesystem, path
