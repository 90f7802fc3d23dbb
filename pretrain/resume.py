"""Where a run starts: fresh or from a checkpoint, and whether that checkpoint fits the settings.

A command that is started again goes on from the newest checkpoint of its run directory, so that a requeued job needs no other one.
Layout, logging, evaluation and checkpointing may change at a resume. Everything that the losses depend on must agree, or be
named in `checkpoint.allow_change`.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pretrain.checkpoint_reader import CheckpointReader, earlier_checkpoints, find_newest, passed_over
from pretrain.config import RunConfig
from pretrain.mixture import Phase, continued
from pretrain.shards import Index
from pretrain.sources import ONLY_SOURCE, configured_phases

BEFORE = {"data.document_boundaries": "none", "optim.spike_threshold": 6.0}  # what checkpoints that lack a setting were made with


@dataclass(frozen=True)
class Progress:
    """How far a run has come; all that a resume needs besides weights and optimizer, since data order, depth and noise are functions
    of the seed and these numbers."""

    step: int = 0  # optimizer steps
    position: int = 0  # sequences consumed
    tokens: int = 0
    mixture: Sequence[Phase] = ()  # of the stream that was read, and of what follows
    last_losses: Sequence[float] = ()  # that the next is compared with, where spikes are looked for

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def after_step(self, config: RunConfig) -> "Progress":
        sequences = config.batch_size(self.position)
        tokens = self.tokens + sequences * config.data.sequence_length
        return replace(self, step=self.step + 1, position=self.position + sequences, tokens=tokens)


def identity(config: RunConfig, sources: Mapping[str, Index]) -> dict[str, Any]:
    """What must agree between a checkpoint and the run that resumes from it, by setting."""
    values: dict[str, Any] = {
        "tokenizer": next(iter(sources.values())).tokenizer_fingerprint,
        "seed": config.seed,
        "data.sequence_length": config.data.sequence_length,
        "data.window_shards": config.data.window_shards,
        "data.document_boundaries": config.data.document_boundaries,
    }
    if config.data.path is not None:
        values["dataset"] = sources[ONLY_SOURCE].fingerprint
    else:
        values |= {f"dataset.{name}": index.fingerprint for name, index in sources.items()}
        names = {index.fingerprint: name for name, index in sources.items()}
        values["data.mixture"] = {
            f"from sequence {phase.first_position}": {names[source]: weight for source, weight in phase.weights.items()}
            for phase in configured_phases(config.data, sources)
        }
    sections = config.as_dict()
    for section in ("model", "schedule", "optim"):
        values |= {f"{section}.{name}": value for name, value in sections[section].items()}
    return values


def find_checkpoint(config: RunConfig, current: dict[str, Any]) -> Path | None:
    """The checkpoint to resume from, checked against this run's identity; None for a fresh start.

    It is the newest complete one of the run directory. While that has none, it is the one that checkpoint.resume names, if any.

    Raises:
        ValueError: there is none where one was asked for, those of the run directory are all damaged or would be overwritten, or a
            setting differs.
    """
    resume, directory = config.checkpoint.resume, config.run_dir / "checkpoints"
    newest = find_newest(directory)
    if resume == "none" and newest is not None:
        raise ValueError(f"{config.run_dir} holds checkpoints, up to {newest.name}. Choose another run_dir, or checkpoint.resume auto.")
    if resume != "none" and newest is None and any(directory.glob("step_*")):
        raise ValueError(
            f"{directory} holds no whole checkpoint: {'; '.join(passed_over(directory, None))}. Restore what is missing, or move "
            "this directory away to start again from step 0."
        )
    if resume in ("none", "auto") and newest is None:
        return None
    chosen = newest or Path(resume)
    saved = CheckpointReader(chosen).manifest["identity"]
    _check_identity(saved, current, config.checkpoint.allow_change, chosen)
    counts_tokens = config.data.weight_changes or config.optim.ramp_tokens is not None
    if counts_tokens and saved["data.sequence_length"] != config.data.sequence_length:
        raise ValueError(
            f"{chosen} was made with data.sequence_length {saved['data.sequence_length']}: positions count sequences of it, by which "
            "data.weight_changes and optim.ramp_tokens would come at other tokens. Leave these out, or keep the length."
        )
    return chosen


def resume_candidates(config: RunConfig, current: dict[str, Any], chosen: Path | None) -> list[Path]:
    """The checkpoint that `find_checkpoint` chose, and those before it that fit this run too, the newest first, for if it is damaged."""

    def fits(checkpoint: Path) -> bool:
        with suppress(ValueError):
            _check_identity(CheckpointReader(checkpoint).manifest["identity"], current, config.checkpoint.allow_change, checkpoint)
            return True
        return False

    return [] if chosen is None else [chosen, *filter(fits, earlier_checkpoints(chosen))]


def rollback_candidates(config: RunConfig, resumed_from: Path | None) -> list[Path]:
    """The checkpoints that a run may go back to, the best first: those that a run without interruptions has, too, then the newest."""
    newest = find_newest(config.run_dir / "checkpoints") or resumed_from
    if newest is None:
        return []
    manifests = {path: CheckpointReader(path).manifest for path in (newest, *earlier_checkpoints(newest))}
    same_run = [path for path in manifests if manifests[path]["identity"] == manifests[newest]["identity"]]
    # A stable sort: newest first among the regular ones, then among the others.
    return sorted(same_run, key=lambda path: manifests[path]["step"] % config.checkpoint.every_steps != 0)


def stream_phases(config: RunConfig, sources: Mapping[str, Index], checkpoint: Path | None) -> list[Phase]:
    """The mixture of the whole stream: as the checkpoint's run has read it until its position, as the config says it from there on."""
    wanted = configured_phases(config.data, sources)
    if checkpoint is None:
        return wanted
    manifest = CheckpointReader(checkpoint).manifest
    progress = manifest["progress"]
    # Without a mixture: made when a run had one dataset.
    read = progress.get("mixture") or [(0, {manifest["identity"]["dataset"]: 1.0})]
    return continued([Phase(*phase) for phase in read], wanted, progress["position"])


def _check_identity(saved: dict[str, Any], current: dict[str, Any], allowed: list[str], checkpoint: Path) -> None:
    saved = BEFORE | saved
    names = sorted(saved.keys() | current.keys())

    def covers(entry: str, name: str) -> bool:
        return name == entry or name.startswith(f"{entry}.")

    for entry in allowed:
        if not any(covers(entry, name) for name in names):
            raise ValueError(f"checkpoint.allow_change names {entry}, but what is compared at a resume is {', '.join(names)}.")
    changed = [name for name in names if saved.get(name) != current.get(name) and not any(covers(entry, name) for entry in allowed)]
    if changed:
        was = ", ".join(f"{name} = {saved.get(name)!r}" for name in changed)
        now = ", ".join(repr(current.get(name)) for name in changed)
        raise ValueError(
            f"{checkpoint} was made with {was}; this run has {now}. Change it back, start in another run_dir, or allow the change: "
            f"--checkpoint.allow_change '{json.dumps([*allowed, *changed])}'."
        )
