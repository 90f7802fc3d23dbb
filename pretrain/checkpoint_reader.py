"""The format of a checkpoint, and reading one without an engine, DeepSpeed or ranks.

Not here: saving and loading an engine (checkpoint.py). A checkpoint is a directory `step_00001000` of two parts: the files of
torch.distributed.checkpoint, and `manifest.json`, which is written last and lists them. The layout is not in the format: each
parameter's fp32 master and Adam moments are flat tensors `kind/name` of shape [numel], or [tensor parallel size, numel of a
shard] for a parameter that is split over tensor-parallel ranks.
"""

import hashlib
import itertools
import json
import math
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

FORMAT = 1
MANIFEST = "manifest.json"
LATEST = "latest"  # a file beside the checkpoints: the name of the one that was saved last
KINDS = ("master", "exp_avg", "exp_avg_sq")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved, found whole, or loaded; the message names it and the cause. Raised on every rank."""


class DamagedCheckpointError(CheckpointError):
    """The bytes of a complete checkpoint are not those that were written: another may do instead."""


class CheckpointReader:
    """A complete checkpoint, read without an engine or ranks.

    `manifest` has format, step, optimizer_step, progress, config, identity, tensor_parallel (the size it was saved
    with), parameters {name: {shape: the full one, tensor_parallel_dim: int or None}}, files {name: {bytes, sha256}}.

    Raises:
        CheckpointError: there is no manifest, it is damaged or of another format, or a file is missing or of a wrong size.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.manifest = _read_manifest(checkpoint / MANIFEST)
        for name, file in self.manifest["files"].items():
            path = checkpoint / name
            if not path.is_file():
                raise CheckpointError(f"the checkpoint is incomplete: {path} is missing")
            if path.stat().st_size != file["bytes"]:
                raise CheckpointError(f"the checkpoint is damaged: {path} has {path.stat().st_size} bytes, not {file['bytes']}")
        self._storage = _StorageReader(checkpoint)

    def names(self) -> list[str]:
        """The parameters' names."""
        return list(self.manifest["parameters"])

    def verify(self, files: Iterable[str] | None = None) -> None:
        """Hashes `files` (None: all) and raises CheckpointError naming one whose bytes are not those written."""
        for name in self.manifest["files"] if files is None else files:
            if file_sha256(self.checkpoint / name) != self.manifest["files"][name]["sha256"]:
                raise CheckpointError(f"the checkpoint is damaged: {self.checkpoint / name} does not match its sha256")

    def read(self, name: str, kind: str = "master") -> torch.Tensor:
        """The parameter's full tensor, fp32, tensor-parallel shards merged; kind: master, exp_avg or exp_avg_sq."""
        parameter = self.manifest["parameters"][name]
        shape, dim = parameter["shape"], parameter["tensor_parallel_dim"]
        shards = 1 if dim is None else self.manifest["tensor_parallel"]
        numel = math.prod(shape) // shards
        stored = torch.empty((numel,) if dim is None else (shards, numel))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*single process")  # which is what is meant here
            dcp.load({f"{kind}/{name}": stored}, storage_reader=self._storage, no_dist=True)
        if dim is None:
            return stored.view(shape)
        shard_shape = [size // shards if index == dim else size for index, size in enumerate(shape)]
        return torch.cat([shard.view(shard_shape) for shard in stored], dim)


class _StorageReader(dcp.FileSystemReader):
    """DCP's, but its index is unpickled once and not at each read: it takes seconds where many ranks wrote many tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if not hasattr(self, "_metadata"):
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


def find_newest(directory: Path) -> Path | None:
    """The complete checkpoint that `latest` names, else the complete one of the highest step, else None.

    `latest` goes first because a run that went back to an earlier checkpoint leaves higher steps of an abandoned course.
    """
    return next(filter(is_complete, _candidates(directory)), None)


def passed_over(directory: Path, chosen: Path | None) -> list[str]:
    """What a user should know of that which `find_newest` looked at before `chosen` (None: of all), a sentence each."""
    sentences = []
    latest = directory / LATEST
    if latest.exists() and _named(latest) is None:
        sentences.append(f"{latest} is damaged and names no checkpoint: the one of the highest step is taken for the newest")
    for candidate in itertools.takewhile(lambda path: path != chosen, _candidates(directory)):
        reason = _why_incomplete(candidate)
        if reason is not None:
            sentences.append(f"{candidate} is passed over: {reason}")
    return list(dict.fromkeys(sentences))


def _candidates(directory: Path) -> list[Path]:
    """What may be the newest checkpoint, the likeliest first."""
    named = _named(directory / LATEST)
    return [*([] if named is None else [named]), *sorted(directory.glob("step_*"), reverse=True)]


def _named(latest: Path) -> Path | None:
    """The checkpoint that the file `latest` names; None where it is absent or damaged."""
    try:
        name = latest.read_text().strip()
    except (OSError, ValueError):
        return None
    return latest.parent / name if re.fullmatch(r"step_\d{8,}", name) else None


def earlier_checkpoints(checkpoint: Path) -> list[Path]:
    """The complete ones of lower steps beside it, the newest first."""
    return sorted((path for path in checkpoint.parent.glob("step_*") if path.name < checkpoint.name and is_complete(path)), reverse=True)


def is_complete(checkpoint: Path) -> bool:
    """Whether all its files are there in their sizes. Their contents are `verify`'s to check."""
    return _why_incomplete(checkpoint) is None


def _why_incomplete(checkpoint: Path) -> str | None:
    try:
        CheckpointReader(checkpoint)
    except CheckpointError as error:
        return str(error)
    return None


def sign_manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest, without a sha256, as it is written: with its own, so that damage to it shows too."""
    plain = json.loads(json.dumps(manifest))
    return plain | {"sha256": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"no complete checkpoint: {path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the checkpoint is damaged: {path} cannot be read ({error})") from error
    digest = manifest.pop("sha256", None) if isinstance(manifest, dict) else None
    if digest is None or sign_manifest(manifest)["sha256"] != digest:
        raise CheckpointError(f"the checkpoint is damaged: {path} does not match its own sha256")
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{path} is of format {manifest['format']}, and this version reads format {FORMAT}")
    return manifest


def file_sha256(path: Path) -> str:
    """As in the manifest's `files`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
