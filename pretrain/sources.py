"""The datasets that a run reads: where they lie, in which shares they are mixed, and what must agree between them.

A source is a dataset directory or its URL. With one, `data.path` names it; with several, `data.sources` names each of them, and the
mixture is a list of phases (`mixture.py`), whose weights are kept by the datasets' fingerprints: a source may move or be renamed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from pretrain.mixture import Mixture, Phase
from pretrain.remote import is_url
from pretrain.shard_cache import default_directory, open_remote_dataset
from pretrain.shards import DatasetError, Index, open_dataset

ONLY_SOURCE = "data"  # the name of the source that data.path names


@dataclass(frozen=True)
class SourceConfig:
    """One dataset of a mixture."""

    path: str  # a directory that tools/prepare_data.py wrote, or the URL of one
    # Its share of the sequences, in proportion to the other sources' weights. Null for all of them: as many as they have times `epochs`.
    weight: float | None = None
    epochs: float | None = None  # how often the run may read it at the most, checked at the start; null: as often as its weight makes it

    def __post_init__(self) -> None:
        if self.weight is not None and not 0 <= self.weight < float("inf"):
            raise ValueError(f"data.sources: the weight of {self.path} is {self.weight:g}, but must be a number from 0 up")
        if self.epochs is not None and not 0 < self.epochs < float("inf"):
            raise ValueError(f"data.sources: epochs of {self.path} is {self.epochs:g}, but must be a number above 0")


@dataclass(frozen=True)
class WeightChange:
    """Weights that hold from a point of the run on, for an annealing phase at its end for example."""

    from_tokens: int  # rounded up to a whole sequence
    weights: dict[str, float]  # of every source


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens lie and how they are cut, mixed and shuffled.

    Raises:
        ValueError: a field is out of range, or two contradict each other.
    """

    sequence_length: int  # S: a sequence is S + 1 tokens, S of them inputs and S targets
    path: str | None = None  # a directory that tools/prepare_data.py wrote, or the URL of one that fsspec opens (http, https, s3, ...)
    sources: dict[str, SourceConfig] = field(default_factory=dict)  # instead of `path`: several, by name
    weight_changes: list[WeightChange] = field(default_factory=list)
    workers: int = 1  # processes that read ahead; 0: the training process reads. The stream does not depend on it
    window_shards: int = 16  # shards of a source that are shuffled together; part of the stream's definition
    # What the end of a document ends: `attention` and positions start anew there, `loss` leaves out the next one's first token.
    document_boundaries: Literal["none", "attention", "loss", "attention_and_loss"] = "none"
    corrupt_blocks: Literal["abort", "substitute"] = "abort"  # substitute: read sequences from elsewhere instead, with a warning
    # Where the shards of a URL are kept while they are read: a directory on the node's own disk that ranks and jobs share, and its bound.
    cache_dir: str | None = None  # null: /var/tmp/grt-shards-UID
    cache_gib: float = 32

    def __post_init__(self) -> None:
        for name, least in (("sequence_length", 1), ("workers", 0), ("window_shards", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"data.{name} is {getattr(self, name)}, but must be at least {least}")
        if self.cache_gib <= 0:
            raise ValueError(f"data.cache_gib is {self.cache_gib:g}, but must be above 0")
        if (self.path is None) == (not self.sources):
            found = "both" if self.sources else "neither"
            raise ValueError(f"data: give either path, or sources, each with a path of its own; the config and command line give {found}")
        self._check_weights()

    def _check_weights(self) -> None:
        given = [name for name, source in self.sources.items() if source.weight is not None]
        if given and len(given) < len(self.sources):
            missing = ", ".join(self.sources.keys() - given)
            raise ValueError(f"data.sources: {', '.join(given)} have a weight, but {missing} none: give all of them one, or none")
        if given and not any(source.weight for source in self.sources.values()):
            raise ValueError("data.sources: every weight is 0")
        starts = [0, *(change.from_tokens for change in self.weight_changes)]
        if any(start >= end for start, end in zip(starts, starts[1:], strict=False)):
            raise ValueError(f"data.weight_changes: from_tokens are {starts[1:]}, but must rise, from above 0")
        if self.weight_changes and not self.sources:
            raise ValueError("data.weight_changes are of data.sources, and there are none")
        for change in self.weight_changes:
            weights, where = change.weights, f"data.weight_changes: the weights from {change.from_tokens} tokens on"
            if weights.keys() != self.sources.keys():
                differing = ", ".join(sorted(weights.keys() ^ self.sources.keys()))
                raise ValueError(f"{where} must name each of data.sources and nothing else; look at {differing}")
            if min(weights.values()) < 0 or not 0 < sum(weights.values()) < float("inf"):
                raise ValueError(f"{where} are {weights}; they must be numbers from 0 up that are not all 0")

    @property
    def resets_attention(self) -> bool:
        return self.document_boundaries in ("attention", "attention_and_loss")

    @property
    def masks_loss(self) -> bool:
        return self.document_boundaries in ("loss", "attention_and_loss")

    @property
    def named_sources(self) -> dict[str, SourceConfig]:
        return {ONLY_SOURCE: SourceConfig(self.path)} if self.path is not None else self.sources


def open_sources(config: DataConfig) -> dict[str, Index]:
    """The datasets of a run by name.

    Raises:
        DatasetError: one is missing or damaged, or they do not go together.
        ValueError: the cache could not hold what is read at a time.
    """
    sources = {}
    for name, source in config.named_sources.items():
        if is_url(source.path):
            directory = default_directory() if config.cache_dir is None else Path(config.cache_dir).expanduser()
            sources[name] = open_remote_dataset(source.path, directory, int(config.cache_gib * 2**30))
        else:
            sources[name] = open_dataset(Path(source.path))
    _require_one_tokenizer(sources)
    _require_room(config, sources)
    return sources


def _require_one_tokenizer(sources: Mapping[str, Index]) -> None:
    (first_name, first), *others = sources.items()
    names = {first.fingerprint: first_name}
    for name, index in others:
        if index.tokenizer_fingerprint != first.tokenizer_fingerprint:
            raise DatasetError(
                f"the sources {first_name} ({first.directory}) and {name} ({index.directory}) were made with different tokenizers; "
                "make one of them again with the other's: tools/prepare_data.py --tokenizer"
            )
        if index.fingerprint in names:
            raise DatasetError(f"the sources {names[index.fingerprint]} and {name} are the same dataset; give it once, with both weights")
        names[index.fingerprint] = name


def _require_room(config: DataConfig, sources: Mapping[str, Index]) -> None:
    """The cache must hold the window that is read of each source, the next, and a validation shard."""
    needed = 0
    for index in sources.values():
        if index.cache is not None:
            sizes = sorted((shard.bytes for split in index.splits.values() for shard in split.shards), reverse=True)
            needed += sum(sizes[: 2 * config.window_shards + 1])
    if config.cache_gib * 2**30 < needed:
        raise ValueError(
            f"data.cache_gib is {config.cache_gib:g}, but two windows of {config.window_shards} shards of what lies behind URLs have "
            f"{needed / 2**30:.2f} GiB. Set data.cache_gib to that for each run that reads other datasets on a node."
        )


def sequences_per_shard(index: Index, split: str, sequence_length: int) -> np.ndarray:
    """How many sequences of S + 1 tokens, neighbours sharing one, each shard holds: int64 [shards].

    Raises:
        DatasetError: none of the split's shards holds one.
    """
    tokens = np.array([shard.tokens for shard in index.splits[split].shards], np.int64)
    counts = np.maximum(tokens - 1, 0) // sequence_length
    if counts.sum() == 0:
        raise DatasetError(
            f"the {split} split of {index.directory} has no sequence of {sequence_length} + 1 tokens: it has {tokens.sum()} tokens in "
            f"{len(tokens)} shards; use a smaller sequence length or more text; for validation, give tools/prepare_data.py a larger "
            f"--validation-fraction or, where the corpus is a few long documents, a smaller --max-text-bytes"
        )
    return counts


def epoch_length(index: Index, sequence_length: int) -> int:
    """Training sequences of a source."""
    return int(sequences_per_shard(index, "train", sequence_length).sum())


def configured_phases(config: DataConfig, sources: Mapping[str, Index]) -> list[Phase]:
    """The mixture as the config says it, its weights by fingerprint."""

    def phase(first_position: int, weights: Mapping[str, float]) -> Phase:
        return Phase(first_position, {sources[name].fingerprint: weights[name] for name in sources})

    initial = {
        name: source.weight if source.weight is not None else epoch_length(sources[name], config.sequence_length) * (source.epochs or 1)
        for name, source in config.named_sources.items()
    }
    changes = [phase(-(-change.from_tokens // config.sequence_length), change.weights) for change in config.weight_changes]
    return [phase(0, initial if len(initial) > 1 else dict.fromkeys(initial, 1.0)), *changes]


class Share(NamedTuple):
    """What a stretch of the stream reads of one source."""

    sequences: int
    share: float  # of the stretch
    epochs: float  # of the source


def shares(
    config: DataConfig, sources: Mapping[str, Index], phases: Sequence[Phase], start: int, end: int, seed: int = 0
) -> dict[str, Share]:
    """What positions [start, end) read of each source, by name. Another seed moves sequences only within the BLOCKs that they cut."""
    mixture = Mixture(phases, seed)
    counts = dict(zip(mixture.sources, (mixture.counts(end) - mixture.counts(start)).tolist(), strict=True))
    found = {}
    for name, index in sources.items():
        count = counts.get(index.fingerprint, 0)
        found[name] = Share(count, count / max(end - start, 1), count / epoch_length(index, config.sequence_length))
    return found


def require_epochs(config: DataConfig, sources: Mapping[str, Index], phases: Sequence[Phase], end: int, seed: int, slack: int) -> None:
    """Checks that the first `end` positions read no source more often than its `epochs`, but for `slack` sequences.

    Raises:
        ValueError: one is; names it.
    """
    for name, share in shares(config, sources, phases, 0, end, seed).items():
        allowed = config.named_sources[name].epochs
        if allowed is not None and share.sequences > allowed * epoch_length(sources[name], config.sequence_length) + slack:
            raise ValueError(
                f"data.sources.{name}.epochs is {allowed:g}, but this run reads it {share.epochs:.2f} times, with {share.share:.1%} of "
                f"its sequences. Lower its weight or schedule.total_tokens, or allow more epochs."
            )
