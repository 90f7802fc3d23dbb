"""Writes the shards of a split, tars of token blocks, and the columns of its blocks, that `pretrain/shards.py` reads.

Responsible for bytes on disk; not for where tokens come from, nor for the directory around them (`dataset_writer.py`). The one fact to
know: a writer's `state`, given to `restore` in another process, leads to the same bytes as if nothing had come between.
"""

import hashlib
import os
import tarfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from pretrain.shards import (
    COLUMNS,
    TAR_BLOCK,
    DatasetError,
    Shard,
    block_json,
    block_key,
    chunk_crcs,
    columns_file,
)
from tools.restart import START_OVER

TAR_END = bytes(2 * TAR_BLOCK)
ROW = np.dtype(("<u8", len(COLUMNS)))
ROWS_AT_ONCE = 1 << 16


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 65536 else "<u4")


def member_header(name: str, size: int) -> bytes:
    """The USTAR header of a member: no times, owners or anything else that differs between runs. 512 bytes."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.USTAR_FORMAT)


def padding(size: int) -> int:
    """Zero bytes after `size` bytes of a member's contents."""
    return -size % TAR_BLOCK


class SplitWriter:
    """Writes documents of one split into blocks, and blocks into shards.

    Args:
        directory: gets the shards.
        work: gets the rows of the columns, block by block, until they are complete.
        block_tokens: a block ends with the document that reaches this.
        shard_tokens: a shard ends with the block that reaches this.
        resumed: the rows are those of an earlier writer, whose state `restore` will be given.

    Attributes:
        text_bytes: of all documents, in UTF-8.
        longest: tokens of the longest document, with its EOS.
    """

    def __init__(
        self, directory: Path, work: Path, split: str, source: str, dtype: np.dtype, block_tokens: int, shard_tokens: int, *, resumed: bool
    ) -> None:
        self._directory, self._split, self._source, self._dtype = directory, split, source, dtype
        self._block_tokens, self._shard_tokens = block_tokens, shard_tokens
        self._pending: list[np.ndarray] = []
        self._pending_tokens = 0
        self._blocks = 0
        self._rows = open(work / f"{split}.rows.bin", "rb+" if resumed else "wb+")  # noqa: SIM115, closed in `close`
        self._shard: _ShardFile | None = None
        self.shards: list[Shard] = []
        self.documents = self.tokens = self.text_bytes = self.longest = 0

    def add(self, document: np.ndarray, text_bytes: int) -> None:
        """Appends a document: its tokens with the final EOS, [tokens] of the writer's dtype."""
        self._pending.append(document)
        self.documents += 1
        self.tokens += len(document)
        self.text_bytes += text_bytes
        self.longest = max(self.longest, len(document))
        self._pending_tokens += len(document)
        if self._pending_tokens >= self._block_tokens:
            self._write_block()

    def close(self) -> dict[str, object]:
        """Writes what is left, and returns the split's entry in the index."""
        if self._pending:
            self._write_block()
        if self._shard is not None:
            self._close_shard(self._shard)
        return {"shards": [asdict(shard) for shard in self.shards], "columns_sha256": self._write_columns()}

    @property
    def files(self) -> set[str]:
        """Names of the shards, finished or not."""
        return {shard.name for shard in self.shards} | ({self._shard.name} if self._shard else set())

    def state(self) -> tuple[dict[str, Any], bytes]:
        """All that is needed to go on from here, once the files that it speaks of are synced, which this does.

        The bytes are the tokens of the block that is being collected.
        """
        _sync(self._rows)
        shard = self._shard.sync() if self._shard else None
        state = {
            "shards": [asdict(shard) for shard in self.shards],
            "open_shard": asdict(shard) if shard else None,
            "blocks": self._blocks,
            "pending": [len(document) for document in self._pending],
            **{name: getattr(self, name) for name in ("documents", "tokens", "text_bytes", "longest")},
        }
        return state, b"".join(document.tobytes() for document in self._pending)

    def restore(self, state: dict[str, Any], pending: bytes) -> None:
        """Goes on from `state`; what was written later is cut off, or written over.

        Raises:
            DatasetError: what was written before is not there as it was.
        """
        self.shards = [Shard(**shard) for shard in state["shards"]]
        _check_shards(self._directory, self.shards)
        self._shard = _ShardFile.resumed(self._directory, Shard(**state["open_shard"])) if state["open_shard"] else None
        self._blocks = state["blocks"]
        if self._rows.seek(0, os.SEEK_END) < self._blocks * ROW.itemsize:
            raise DatasetError(f"{self._rows.name} is shorter than when the command was stopped: {START_OVER}")
        self._rows.truncate(self._rows.seek(self._blocks * ROW.itemsize))
        self._pending_tokens = sum(state["pending"])
        if state["pending"]:
            self._pending = np.split(np.frombuffer(pending, self._dtype), np.cumsum(state["pending"])[:-1])
        for name in ("documents", "tokens", "text_bytes", "longest"):
            setattr(self, name, state[name])

    def _write_block(self) -> None:
        if self._shard is None:
            self._shard = _ShardFile(self._directory / f"{self._split}-{len(self.shards):05d}.tar")
        ends = np.cumsum([len(document) for document in self._pending]).astype("<u4").tobytes()
        tokens = np.concatenate(self._pending).tobytes()
        description = block_json(self._source, self._pending_tokens, len(self._pending))
        crcs = [*chunk_crcs(tokens, self._dtype.itemsize), zlib.crc32(ends), zlib.crc32(description)]
        key = block_key(self._blocks)
        contents = {"crc.bin": np.array(crcs, "<u4").tobytes(), "doc.bin": ends, "json": description, "tok.bin": tokens}
        offsets = [self._shard.append(f"{key}.{ending}", content) for ending, content in contents.items()]
        self._rows.write(np.array([(self._pending_tokens, len(self._pending), *offsets)], "<u8").tobytes())
        self._blocks += 1
        self._shard.tokens += self._pending_tokens
        self._shard.documents += len(self._pending)
        self._shard.blocks += 1
        self._pending, self._pending_tokens = [], 0
        if self._shard.tokens >= self._shard_tokens:
            self._close_shard(self._shard)

    def _close_shard(self, shard: "_ShardFile") -> None:
        self.shards.append(shard.close())
        self._shard = None

    def _write_columns(self) -> str:
        """Turns the rows into columns, a part at a time; returns the sha256."""
        self._rows.flush()
        digest = hashlib.sha256()
        with open(self._directory / columns_file(self._split), "wb") as file:
            for column in range(len(COLUMNS)):
                for start in range(0, self._blocks, ROWS_AT_ONCE):
                    rows = np.fromfile(self._rows.name, ROW, min(ROWS_AT_ONCE, self._blocks - start), offset=start * ROW.itemsize)
                    data = rows[:, column].tobytes()
                    digest.update(data)
                    file.write(data)
            _sync(file)
        self._rows.close()
        return digest.hexdigest()


class _ShardFile:
    """A tar being written, hashed on the way."""

    def __init__(self, path: Path, mode: Literal["wb", "rb+"] = "wb") -> None:
        self._path, self.name = path, path.name
        self._file = open(path, mode)  # noqa: SIM115, closed in `close`
        self._sha256 = hashlib.sha256()
        self._size = self.tokens = self.documents = self.blocks = 0

    @classmethod
    def resumed(cls, directory: Path, shard: Shard) -> "_ShardFile":
        """One of which `shard` was written."""
        path = directory / shard.name
        try:
            file = cls(path, "rb+")
        except FileNotFoundError:
            raise DatasetError(f"{path} was removed after the command was stopped: {START_OVER}") from None
        file._file.truncate(shard.bytes)
        with open(path, "rb") as written:
            file._sha256 = hashlib.file_digest(written, hashlib.sha256)
        file._file.seek(shard.bytes)
        if file._sha256.hexdigest() != shard.sha256:
            raise DatasetError(f"{path} is not as it was when the command was stopped: {START_OVER}")
        file._size, file.tokens, file.documents, file.blocks = shard.bytes, shard.tokens, shard.documents, shard.blocks
        return file

    def append(self, name: str, content: bytes) -> int:
        """Appends a member; returns where its contents begin."""
        self._write(member_header(name, len(content)))
        offset = self._size
        self._write(content)
        self._write(bytes(padding(len(content))))
        return offset

    def sync(self) -> Shard:
        """What there is so far, and is on disk from now on."""
        _sync(self._file)
        return Shard(self.name, self._size, self._sha256.hexdigest(), self.tokens, self.documents, self.blocks)

    def close(self) -> Shard:
        self._write(TAR_END)
        shard = self.sync()
        self._file.close()
        return shard

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._sha256.update(data)
        self._size += len(data)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _check_shards(directory: Path, shards: Sequence[Shard]) -> None:
    """Compares finished shards with their sha256, some at a time.

    Raises:
        DatasetError: one differs.
    """

    def damage(shard: Shard) -> str | None:
        try:
            with open(directory / shard.name, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            return f"{directory / shard.name} cannot be read ({error.strerror})"
        return None if found == shard.sha256 else f"{directory / shard.name} is damaged: sha256 expected {shard.sha256}, found {found}"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for line in pool.map(damage, shards):
            if line:
                raise DatasetError(f"{line}, since the command was stopped: {START_OVER}")
