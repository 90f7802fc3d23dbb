"""Writes a dataset directory: tars of token blocks, the columns and the index that `pretrain/shards.py` reads.

Responsible for bytes on disk; not for where tokens come from. The one fact to know: everything is written below `DIR/.partial` and
moved into place at the end, `index.json` last, so that a directory with an index is complete whatever happened before. What a command
that was killed had finished stays there, and the next one goes on from `DatasetWriter.checkpoint`.
"""

import hashlib
import json
import os
import shutil
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
from tools.restart import WorkFolder, write_synced

TAR_BLOCK = 512  # a tar's headers and contents start at multiples of it
TAR_END = bytes(2 * TAR_BLOCK)
PARTIAL = ".partial"  # being written
COMPLETE = ".complete"  # written, to be moved into place
WORK = ".work"  # what a restart needs
STATE = "encoding.state"
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


def block_key(number: int) -> str:
    """WebDataset's key of a split's block: the start of its members' names."""
    return f"blk{number:06d}"


def block_json(source: str, tokens: int, documents: int) -> bytes:
    return canonical_json({"documents": documents, "source": source, "tokens": tokens})


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
            raise DatasetError(f"{self._rows.name} is shorter than when the command was stopped: {_START_OVER}")
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
            raise DatasetError(f"{path} was removed after the command was stopped: {_START_OVER}") from None
        file._file.truncate(shard.bytes)
        with open(path, "rb") as written:
            file._sha256 = hashlib.file_digest(written, hashlib.sha256)
        file._file.seek(shard.bytes)
        if file._sha256.hexdigest() != shard.sha256:
            raise DatasetError(f"{path} is not as it was when the command was stopped: {_START_OVER}")
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


_START_OVER = f"remove {WORK} and {PARTIAL} there to start from the beginning"


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
                raise DatasetError(f"{line}, since the command was stopped: {_START_OVER}")


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
    """A dataset directory in the making; a context manager that leaves a complete dataset, or what was there before.

    Cut short after a `checkpoint` it leaves also what is needed to go on, and the next writer for the directory does. Cut short while
    `finish` moves files, the next writer ends the move first.

    Raises:
        DatasetError: `directory` holds a dataset and `overwrite` is False, holds something else, or is being written by another process.
    """

    def __init__(
        self, directory: Path, tokenizer: Tokenizer, *, source: str, block_tokens: int, shard_tokens: int, overwrite: bool = False
    ) -> None:
        self.directory, self._tokenizer, self._source = directory, tokenizer, source
        self._block_tokens, self._shard_tokens = block_tokens, shard_tokens
        self.dtype = token_dtype(tokenizer.vocab_size)
        self._finished = False
        self._check_is_ours()
        self._partial = directory / PARTIAL
        self.work = WorkFolder(directory / WORK)
        try:
            if (directory / COMPLETE / "index.json").exists():
                move_into_place(directory)
            if not self._partial.exists():  # what that command left to remove
                self.work.clear()
            if (directory / "index.json").exists() and not overwrite:
                raise DatasetError(f"{directory} already holds a dataset; pass --overwrite to replace it, or another --output")
        except BaseException:
            self._leave()
            raise

    def _check_is_ours(self) -> None:
        if not self.directory.exists():
            return
        ours = {"index.json", PARTIAL, COMPLETE, WORK}
        names = {path.name for path in self.directory.iterdir()} if self.directory.is_dir() else {self.directory.name}
        if names and not names & ours:
            raise DatasetError(f"{self.directory} is not empty and holds no dataset (no index.json): choose another --output")

    def __enter__(self) -> "DatasetWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self.work.has_state:
            self.work.release()
            return
        shutil.rmtree(self._partial, ignore_errors=True)
        self.work.remove()
        if not any(self.directory.iterdir()):
            self.directory.rmdir()

    def begin(self, settings: dict[str, Any], files: list[tuple[str, int, str]]) -> dict[str, Any] | None:
        """Opens the splits, and goes on with a job that was stopped; returns what `checkpoint` was given last.

        Args:
            settings: what the dataset depends on.
            files: name, size and stamp of the files that it is made from.

        Raises:
            DatasetError: the job was begun with others, or its files are not there as they were.
        """
        self.work.begin(
            {"tokenizer": self._tokenizer.fingerprint, "source": self._source, **settings}
            | {"block_tokens": self._block_tokens, "shard_tokens": self._shard_tokens},
            files,
        )
        self._partial.mkdir(exist_ok=True)
        saved = self.work.load(STATE)
        state, payload = saved or (None, b"")
        self.splits = {split: self._open_split(split, resumed=state is not None) for split in SPLITS}
        kept: set[str] = set()
        for split, writer in self.splits.items():
            if state:
                size = sum(state["splits"][split]["pending"]) * self.dtype.itemsize
                writer.restore(state["splits"][split], payload[:size])
                payload = payload[size:]
            kept |= writer.files
        for path in self._partial.iterdir():  # written after the checkpoint
            if path.is_file() and path.name not in kept:
                path.unlink()
        return state

    def _open_split(self, split: str, resumed: bool) -> SplitWriter:
        sizes = self._block_tokens, self._shard_tokens
        return SplitWriter(self._partial, self.work.path, split, self._source, self.dtype, *sizes, resumed=resumed)

    def checkpoint(self, state: dict[str, Any]) -> None:
        """Makes this moment the one from which the next command goes on, should this one be killed."""
        states = {split: writer.state() for split, writer in self.splits.items()}
        splits = {split: split_state for split, (split_state, _) in states.items()}
        self.work.save(STATE, {**state, "splits": splits}, b"".join(payload for _, payload in states.values()))

    def finish(self, summary: dict[str, Any]) -> None:
        """Writes the index and moves everything into place, in place of an older dataset.

        Args:
            summary: what `summary.json` is to hold.
        """
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
        (self._partial / TOKENIZER_FOLDER).mkdir(exist_ok=True)
        for file in self._tokenizer.files:
            write_synced(self._partial / TOKENIZER_FOLDER / file.name, file.read_bytes())
        write_synced(self._partial / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")
        write_synced(self._partial / "index.json", index_json(content))

        self._partial.rename(self.directory / COMPLETE)  # from here on the new dataset is the one that stays
        move_into_place(self.directory)
        self.work.clear()
