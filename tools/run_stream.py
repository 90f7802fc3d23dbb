"""What a run's training stream holds at its positions: as it was read until its newest checkpoint, as its config says it from there on.

Responsible for finding, not for showing (`inspect_data.py`). A mixture that was changed at a resume is in the checkpoint, since the config
knows its last state only.
"""

import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pretrain.checkpoint_reader import CheckpointReader, find_newest
from pretrain.config import RunConfig
from pretrain.mixture import Mixture
from pretrain.resume import stream_phases
from pretrain.sequences import SourceSequences
from pretrain.shard_cache import open_reader
from pretrain.shards import Index, TokenReader
from pretrain.sources import Share, open_sources, shares

LAST_POSITION = 2**62
FORMER_SOURCES = "(no longer in the config)"


class Document(NamedTuple):
    """Where a document lies in its shard, in tokens; EOS is its last."""

    number: int  # in the shard, from 0
    begin: int
    end: int


@dataclass(frozen=True)
class Place:
    """The sequence at a position."""

    source: str
    index: Index
    source_position: int  # in the source's own stream
    epoch: int  # of the source, from 0
    shard: int
    blocks: range  # those that it touches, in the shard
    begin: int  # its first token, in the shard
    tokens: np.ndarray  # [S + 1]
    documents: list[Document]  # those that it touches


class ReadBy(NamedTuple):
    """The optimizer step that reads a position: the step's number as logged, and the positions [start, end) of its batch."""

    step: int
    start: int
    end: int


class RunStream:
    """The stream of one run.

    Args:
        config: of the run.
        checkpoints: the folder in which the run's checkpoints lie, if it has any.

    Attributes:
        sources: the datasets by name.
        checkpoint: the newest one, by which past positions are told; None if the config alone says everything.
        phases: of the mixture.
        end: the position where the run ends, by its schedule.

    Raises:
        DatasetError, ValueError, CheckpointError: datasets or checkpoint cannot be used.
    """

    def __init__(self, config: RunConfig, checkpoints: Path) -> None:
        self.config = config
        self.sources = open_sources(config.data)
        self.checkpoint = find_newest(checkpoints)
        if self.checkpoint is None and config.checkpoint.resume not in ("auto", "none"):
            self.checkpoint = Path(config.checkpoint.resume)
        self.phases = stream_phases(config, self.sources, self.checkpoint)
        self.end = config.schedule.total_tokens // config.data.sequence_length
        self._mixture = Mixture(self.phases, config.seed)
        self._names = {index.fingerprint: name for name, index in self.sources.items()}
        self._step, self._position = 0, 0  # of the checkpoint
        if self.checkpoint is not None:
            self._read_progress(self.checkpoint)
        self._sequences: dict[str, SourceSequences] = {}
        self._readers: dict[str, TokenReader] = {}

    def _read_progress(self, checkpoint: Path) -> None:
        manifest = CheckpointReader(checkpoint).manifest
        self._step, self._position = manifest["progress"]["step"], manifest["progress"]["position"]
        data = self.config.data
        current = {"seed": self.config.seed, "data.sequence_length": data.sequence_length, "data.window_shards": data.window_shards}
        for name, value in current.items():
            saved = manifest["identity"][name]
            if saved != value:
                print(
                    f"warning: {checkpoint} was made with {name} = {saved!r}, the config has {value!r}: what is shown before position "
                    f"{self._position:,} is not what was read",
                    file=sys.stderr,
                )

    def name_of(self, fingerprint: str) -> str:
        """A source's name; for one that the config no longer has, what is known of it."""
        return self._names.get(fingerprint, f"dataset {fingerprint[:16]} {FORMER_SOURCES}")

    def locate(self, position: int) -> Place:
        """What lies at `position`.

        Raises:
            ValueError: it is out of range, or its source is no longer in the config.
            DatasetError: from the reads.
        """
        _require_position("the position", position)
        (number,), (source_position,) = (found.tolist() for found in self._mixture.locate(np.array([position])))
        fingerprint = self._mixture.sources[number]
        if fingerprint not in self._names:
            raise ValueError(
                f"position {position} was read from the dataset whose index.json has the sha256 {fingerprint}, which the config no longer "
                "names. Copy the config, and name that dataset under data.sources too, with weight 0."
            )
        name = self._names[fingerprint]
        sequences, index, length = self._open(name), self.sources[name], self.config.data.sequence_length
        (shard,), (sequence,) = (found.tolist() for found in sequences.locate(np.array([source_position])))
        begin = sequence * length
        tokens = sequences.read_one(source_position)
        blocks, documents = self._documents(name, shard, begin, begin + length + 1)
        epoch = source_position // sequences.epoch_length
        return Place(name, index, source_position, epoch, shard, blocks, begin, tokens, documents)

    def _open(self, name: str) -> SourceSequences:
        if name not in self._sequences:
            self._sequences[name] = SourceSequences(self.config.data, self.sources[name], "train", self.config.seed)
        return self._sequences[name]

    def _documents(self, name: str, shard: int, begin: int, end: int) -> tuple[range, list[Document]]:
        """The blocks and documents that tokens [begin, end) of a shard touch."""
        index = self.sources[name]
        if name not in self._readers:
            self._readers[name] = open_reader(index, "train", max_open_shards=1)
        split = index.splits["train"]
        in_shard = slice(*split.first_block[shard : shard + 2])
        block_ends = np.cumsum(split.columns["tokens"][in_shard], dtype=np.int64)
        document_counts = split.columns["documents"][in_shard].astype(np.int64)
        documents_before = np.cumsum(document_counts) - document_counts
        blocks = range(int(np.searchsorted(block_ends, begin, side="right")), int(np.searchsorted(block_ends, end, side="left")) + 1)
        found = []
        for block in blocks:
            block_begin = int(block_ends[block - 1]) if block else 0
            ends = self._readers[name].document_ends(shard, block) + block_begin
            begins = np.concatenate([[block_begin], ends[:-1]])
            for number in np.flatnonzero((begins < end) & (ends > begin)).tolist():
                found.append(Document(int(documents_before[block]) + number, int(begins[number]), int(ends[number])))
        return blocks, found

    def shares(self, start: int, end: int) -> dict[str, Share]:
        """What positions [start, end) read of each source; of former sources together, without epochs, under FORMER_SOURCES.

        Raises:
            ValueError: that is not a range of positions.
        """
        _require_position("the first position", start)
        _require_position("the last position", end)
        if start >= end:
            raise ValueError(f"from position {start} to position {end} there is nothing: the end must come after the start.")
        found = shares(self.config.data, self.sources, self.phases, start, end, self.config.seed)
        former = end - start - sum(share.sequences for share in found.values())
        return found | ({FORMER_SOURCES: Share(former, former / (end - start), float("nan"))} if former else {})

    def step_at(self, position: int) -> ReadBy | None:
        """The step that reads `position`, by the config's batch sizes; None for a past step of a run whose batch sizes were changed."""
        step, start = (self._step, self._position) if position >= self._position else (0, 0)
        if start == 0 and not self._starts_as_configured:
            return None
        while True:
            size = self.config.batch_size(start)
            steps = (position - start) // size
            if steps and size < self.config.optim.global_batch_size:
                steps = 1  # the ramp may grow the next one
            step, start = step + steps, start + steps * size
            if not steps:
                return ReadBy(step + 1, start, start + size)

    def positions_of(self, step: int) -> ReadBy:
        """The batch of a step.

        Raises:
            ValueError: there is no such step, or it is a past one of a run whose batch sizes were changed.
        """
        if not 1 <= step <= 2**40:
            raise ValueError(f"the step is {step}; steps count from 1.")
        before, start = (self._step, self._position) if step > self._step else (0, 0)
        if start == 0 and not self._starts_as_configured:
            raise ValueError(
                f"which positions step {step} read is not known: the batch size was changed before {self.checkpoint}. The tokens in a "
                f"row of metrics.jsonl, divided by {self.config.data.sequence_length}, are the position where its step ended."
            )
        return ReadBy(step, *self._walk(before, start, step))

    @cached_property
    def _starts_as_configured(self) -> bool:
        """Whether the config's batch sizes lead from position 0 to the checkpoint."""
        return self._walk(0, 0, self._step + 1)[0] == self._position

    def _walk(self, before: int, start: int, step: int) -> tuple[int, int]:
        """Positions [start, end) of `step`, from `start`, where `before` steps are done."""
        while True:
            size = self.config.batch_size(start)
            left = step - 1 - before
            if not left:
                return start, start + size
            steps = left if size == self.config.optim.global_batch_size else 1
            before, start = before + steps, start + steps * size


def _require_position(name: str, position: int) -> None:
    if not 0 <= position <= LAST_POSITION:
        raise ValueError(f"{name} is {position}; positions count sequences of the stream, from 0.")
