"""Makes a dataset directory: shards, columns, index, tokenizer and summary, all or nothing.

The one fact to know: everything is written below `DIR/.partial` and moved into place at the end, `index.json` last, so that a directory
with an index is complete whatever happened before. What a command that was killed had finished stays there, and the next one goes on
from its last `DatasetWriter.checkpoint`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from pretrain.shards import FORMAT, SPLITS, TOKENIZER_FOLDER, VERSION, DatasetError, index_json
from tokenizer.tokenizer import Tokenizer
from tools.restart import PARTIAL, WORK, WorkFolder, write_synced
from tools.shard_writer import SplitWriter, token_dtype

COMPLETE = ".complete"  # written, to be moved into place
STATE = "encoding.state"


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
