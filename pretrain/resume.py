"""Where a run starts: fresh or from a checkpoint, and whether that checkpoint fits the settings.

Layout, logging, evaluation and checkpointing may change at a resume. Everything that the losses depend on must agree, or be
named in `checkpoint.allow_change`.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrain.checkpoint import CheckpointReader, find_newest
from pretrain.config import RunConfig
from pretrain.shards import Index


@dataclass(frozen=True)
class Progress:
    """How far a run has come; all that a resume needs besides weights and optimizer, since data order, depth and noise are functions
    of the seed and these numbers."""

    step: int = 0  # optimizer steps
    position: int = 0  # sequences consumed
    tokens: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def after_step(self, config: RunConfig) -> "Progress":
        return Progress(self.step + 1, self.position + config.optim.global_batch_size, self.tokens + config.tokens_per_step)


def identity(config: RunConfig, index: Index) -> dict[str, str | int]:
    """What must agree between a checkpoint and the run that resumes from it, by setting."""
    values: dict[str, Any] = {
        "dataset": index.fingerprint,
        "tokenizer": index.tokenizer_fingerprint,
        "seed": config.seed,
        "data.sequence_length": config.data.sequence_length,
        "data.window_shards": config.data.window_shards,
    }
    sections = config.as_dict()
    for section in ("model", "schedule", "optim"):
        values |= {f"{section}.{name}": value for name, value in sections[section].items()}
    return values


def find_checkpoint(config: RunConfig, current: dict[str, str | int]) -> Path | None:
    """The checkpoint to resume from, checked against this run's identity; None for a fresh start.

    Raises:
        ValueError: there is none where one was asked for, the run directory would be overwritten, or a setting differs.
    """
    directory = config.run_dir / "checkpoints"
    newest = find_newest(directory)
    if config.checkpoint.resume == "none":
        if newest is not None:
            raise ValueError(f"{config.run_dir} holds checkpoints, up to {newest.name}. Choose another run_dir, or checkpoint.resume auto.")
        return None
    if config.checkpoint.resume == "auto":
        chosen = newest
        if chosen is None:
            return None
    else:
        chosen = Path(config.checkpoint.resume)
        if newest is not None and chosen.resolve() != newest.resolve():
            raise ValueError(
                f"{config.run_dir} already has checkpoints, up to {newest.name}: go on from that one with checkpoint.resume auto, or "
                f"choose another run_dir to go on from {chosen}."
            )
    _check_identity(CheckpointReader(chosen).manifest["identity"], current, config.checkpoint.allow_change, chosen)
    return chosen


def _check_identity(saved: dict[str, Any], current: dict[str, Any], allowed: list[str], checkpoint: Path) -> None:
    for name in sorted(saved.keys() | current.keys()):
        if saved.get(name) == current.get(name) or any(name == entry or name.startswith(f"{entry}.") for entry in allowed):
            continue
        raise ValueError(
            f"{checkpoint} was made with {name} = {saved.get(name)!r}; this run has {current.get(name)!r}. Change it back, start in "
            f"another run_dir, or allow the change: --checkpoint.allow_change '[\"{name}\"]'."
        )
