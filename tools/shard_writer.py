"""Writes a dataset directory: tars of token blocks, the columns and the index that `pretrain/shards.py` reads.

Responsible for bytes on disk; not for where tokens come from. The one fact to know: everything is written below `DIR/.partial` and
moved into place at the end, `index.json` last, so that a directory with an index is complete whatever happened before.
"""

import hashlib
import json
import os
import shutil
import tarfile
import zlib
from dataclasses import asdict
from pathlib import Path

import numpy as np

from pretrain.shards import (
    COLUMNS,
    FORMAT,
    SPLITS,
    TOKENIZER_FOLDER,
    VERSION,
    DatasetError,
    Shard,
    canonical_json,
    chunk_crcs,
    columns_file,
    index_json,
)
from tokenizer.tokenizer import Tokenizer

TAR_BLOCK = 512  # a tar's headers and contents start at multiples of it
TAR_END = bytes(2 * TAR_BLOCK)
PARTIAL = ".partial"  # being written
COMPLETE = ".complete"  # written, to be moved into place


def write_synced(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


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


def block_key(number: int) -> str:
    """WebDataset's key of a split's block: the start of its members' names."""
    return f"blk{number:06d}"


def block_json(source: str, tokens: int, documents: int) -> bytes:
    return canonical_json({"documents": documents, "source": source, "tokens": tokens})


class SplitWriter:
    """Writes documents of one split into blocks, and blocks into shards.

    Args:
        block_tokens: a block ends with the document that reaches this.
        shard_tokens: a shard ends with the block that reaches this.
    """

    def __init__(self, directory: Path, split: str, source: str, dtype: np.dtype, block_tokens: int, shard_tokens: int) -> None:
        self._directory, self._split, self._source, self._dtype = directory, split, source, dtype
        self._block_tokens, self._shard_tokens = block_tokens, shard_tokens
        self._pending: list[np.ndarray] = []
        self._pending_tokens = 0
        self._rows: list[tuple[int, ...]] = []  # of COLUMNS
        self._shard: _ShardFile | None = None
        self.shards: list[Shard] = []
        self.documents = self.tokens = 0

    def add(self, document: np.ndarray) -> None:
        """Appends a document: its tokens with the final EOS, [tokens] of the writer's dtype."""
        self._pending.append(document)
        self.documents += 1
        self.tokens += len(document)
        self._pending_tokens += len(document)
        if self._pending_tokens >= self._block_tokens:
            self._write_block()

    def close(self) -> dict[str, object]:
        """Writes what is left, and returns the split's entry in the index."""
        if self._pending:
            self._write_block()
        if self._shard is not None:
            self._close_shard(self._shard)
        columns = np.array(self._rows, "<u8").reshape(-1, len(COLUMNS)).T.tobytes()
        write_synced(self._directory / columns_file(self._split), columns)
        return {"shards": [asdict(shard) for shard in self.shards], "columns_sha256": hashlib.sha256(columns).hexdigest()}

    def _write_block(self) -> None:
        if self._shard is None:
            self._shard = _ShardFile(self._directory / f"{self._split}-{len(self.shards):05d}.tar")
        ends = np.cumsum([len(document) for document in self._pending]).astype("<u4").tobytes()
        tokens = np.concatenate(self._pending).tobytes()
        description = block_json(self._source, self._pending_tokens, len(self._pending))
        crcs = [*chunk_crcs(tokens, self._dtype.itemsize), zlib.crc32(ends), zlib.crc32(description)]
        key = block_key(len(self._rows))
        contents = {"crc.bin": np.array(crcs, "<u4").tobytes(), "doc.bin": ends, "json": description, "tok.bin": tokens}
        offsets = [self._shard.append(f"{key}.{ending}", content) for ending, content in contents.items()]
        self._rows.append((self._pending_tokens, len(self._pending), *offsets))
        self._shard.tokens += self._pending_tokens
        self._shard.documents += len(self._pending)
        self._shard.blocks += 1
        self._pending, self._pending_tokens = [], 0
        if self._shard.tokens >= self._shard_tokens:
            self._close_shard(self._shard)

    def _close_shard(self, shard: "_ShardFile") -> None:
        self.shards.append(shard.close())
        self._shard = None


class _ShardFile:
    """A tar being written, hashed on the way."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "wb")  # noqa: SIM115, closed in `close`
        self._sha256 = hashlib.sha256()
        self._size = self.tokens = self.documents = self.blocks = 0

    def append(self, name: str, content: bytes) -> int:
        """Appends a member; returns where its contents begin."""
        self._write(member_header(name, len(content)))
        offset = self._size
        self._write(content)
        self._write(bytes(padding(len(content))))
        return offset

    def close(self) -> Shard:
        self._write(TAR_END)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return Shard(self._path.name, self._size, self._sha256.hexdigest(), self.tokens, self.documents, self.blocks)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._sha256.update(data)
        self._size += len(data)


def move_into_place(directory: Path) -> None:
    """Replaces the dataset in `directory`, if any, by the one in its folder COMPLETE. Goes on where an earlier call was killed."""
    complete = directory / COMPLETE
    content = json.loads((complete / "index.json").read_bytes())
    shards = {shard["name"] for split in content["splits"].values() for shard in split["shards"]}
    (directory / "index.json").unlink(missing_ok=True)  # first out, last in
    for split in SPLITS:
        for old in directory.glob(f"{split}-*.tar"):
            if old.name not in shards:
                old.unlink()
    for path in sorted(complete.iterdir(), key=lambda path: path.name == "index.json"):
        target = directory / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.rename(target)
    complete.rmdir()


class DatasetWriter:
    """A dataset directory in the making; a context manager that leaves either a complete dataset or what was there before.

    Cut short while `finish` moves files, it leaves neither for the moment: the next writer for the directory ends the move first.

    Raises:
        DatasetError: `directory` holds a dataset and `overwrite` is False, holds something else, or is being written by another process.
    """

    def __init__(
        self, directory: Path, tokenizer: Tokenizer, *, source: str, block_tokens: int, shard_tokens: int, overwrite: bool = False
    ) -> None:
        self.directory, self._tokenizer, self._source = directory, tokenizer, source
        self._check_target(overwrite)
        self._partial = directory / PARTIAL
        self._partial.mkdir(parents=True)
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.splits = {split: SplitWriter(self._partial, split, source, self.dtype, block_tokens, shard_tokens) for split in SPLITS}

    def _check_target(self, overwrite: bool) -> None:
        if not self.directory.exists():
            return
        if (self.directory / COMPLETE / "index.json").exists():
            move_into_place(self.directory)
        if (self.directory / PARTIAL).exists():
            raise DatasetError(
                f"{self.directory / PARTIAL} exists: another command is writing there, or one was killed; then remove it and run again"
            )
        if (self.directory / "index.json").exists():
            if not overwrite:
                raise DatasetError(f"{self.directory} already holds a dataset; pass --overwrite to replace it, or another --output")
        elif not self.directory.is_dir() or any(self.directory.iterdir()):
            raise DatasetError(f"{self.directory} is not empty and holds no dataset (no index.json): choose another --output")

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)
        if not any(self.directory.iterdir()):
            self.directory.rmdir()

    def finish(self) -> None:
        """Writes the index and moves everything into place, in place of an older dataset."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "source": self._source,
            "dtype": self.dtype.name,
            "vocab_size": self._tokenizer.vocab_size,
            "eos_id": self._tokenizer.eos_id,
            "tokenizer_files": [file.name for file in self._tokenizer.files],
            "tokenizer_sha256": self._tokenizer.fingerprint,
            "splits": {split: writer.close() for split, writer in self.splits.items()},
        }
        (self._partial / TOKENIZER_FOLDER).mkdir()
        for file in self._tokenizer.files:
            write_synced(self._partial / TOKENIZER_FOLDER / file.name, file.read_bytes())
        write_synced(self._partial / "index.json", index_json(content))

        self._partial.rename(self.directory / COMPLETE)  # from here on the new dataset is the one that stays
        move_into_place(self.directory)
