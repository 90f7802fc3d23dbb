"""A ZeRO engine's state as a checkpoint on disk, and one of any layout and stage back into an engine. Called by every rank.

Saving has two parts: `take_snapshot` copies the state, while training waits, and `write_snapshot` writes the copy, in any thread.

Not here: the format and reading it without an engine (checkpoint_reader.py), where an engine has its state (zero_state.py), when to
save, what a resume may change, DeepSpeed's own checkpoint files. Each rank writes a part: a parameter's flat tensor, or its flat
tensor-parallel shard, is cut over the data-parallel ranks as ZeRO-3 cuts it. Where something fails on one rank, every rank raises the
same error.
"""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed import DeepSpeedEngine
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.futures import Future

from pretrain.checkpoint_reader import (
    FORMAT,
    KINDS,
    LATEST,
    MANIFEST,
    CheckpointError,
    CheckpointReader,
    DamagedCheckpointError,
    file_sha256,
    is_complete,
    sign_manifest,
)
from pretrain.zero_state import adam_states, begin_setting, end_setting, part_size, read_part, set_part, shard_shape

TEMPORARY = ".tmp_"  # what begins so is rubbish: a save or a removal that did not end
Parameters = dict[str, Any]  # by name, with what DeepSpeed and Megatron leave on them


# ---- saving ----


class Snapshot(NamedTuple):
    """A copy of the engine's masters and Adam state on this rank, in memory of its own, and what the manifest says of them."""

    partitions: dict[str, DTensor]
    manifest: dict[str, Any]

    @property
    def bytes(self) -> int:
        return sum(partition.to_local().nbytes for partition in self.partitions.values())


def take_snapshot(engine: DeepSpeedEngine, progress: dict[str, Any], config: dict[str, Any], identity: dict[str, Any]) -> Snapshot:
    """Copies the state of step progress["step"]. `config` and `identity` are kept in the manifest as they are.

    Raises:
        CheckpointError: the engine is of a kind whose state cannot be saved.
    """
    layout = Layout.of(engine)
    parameters = _parameters(engine)
    manifest = {
        "format": FORMAT,
        "step": progress["step"],
        "optimizer_step": _optimizer_step(engine),
        "progress": progress,
        "config": config,
        "identity": identity,
        "tensor_parallel": layout.tensor_size,
        "parameters": _describe(parameters, layout),
    }
    return Snapshot(_read_partitions(engine, parameters, layout), manifest)


def write_snapshot(snapshot: Snapshot, directory: Path, keep: "Keep", group: dist.ProcessGroup | None = None) -> Path:
    """Writes it to `directory`/step_N. Called by every rank of `group` (None: all), which communicates about nothing else meanwhile.

    The checkpoint appears complete or not at all. Then earlier ones are removed, but for those that `keep` says. Incomplete ones, which
    somebody has damaged, are neither counted nor removed.

    Raises:
        CheckpointError: on every rank, when one of them could not write; earlier checkpoints are as they were.
    """
    final = directory / f"step_{snapshot.manifest['step']:08d}"
    temporary = directory / f"{TEMPORARY}{final.name}"
    first = dist.get_rank() == 0
    failure = f"cannot save {final} (earlier checkpoints are intact)"
    try:
        with _every_rank(failure, group):
            if first:
                _remove_leftovers(directory)
                temporary.mkdir(parents=True)
        with _every_rank(failure, group):
            dcp.save(snapshot.partitions, storage_writer=_StorageWriter(temporary), process_group=group)
        with _every_rank(failure, group):
            written = _hash_own_files(temporary)
        files = {name: file for own in _gather(written, group) for name, file in own.items()}
        with _every_rank(failure, group):
            if first:
                _publish(temporary, final, snapshot.manifest | {"files": files})
    except CheckpointError:
        with _every_rank(failure, group):  # not before it is gone does another rank go on
            if first:
                _remove_leftovers(directory)
        raise
    with _every_rank(f"{final} is complete, but what follows failed", group):
        if first:
            _remove_older(final, keep)
    return final


class Keep(NamedTuple):
    """Which checkpoints stay when a new one is complete."""

    newest: int | None = None  # how many of the newest, with the new one; None: all
    every_steps: int | None = None  # and those of steps that are multiples of it


class _StorageWriter(dcp.FileSystemWriter):
    """DCP's, but a write error is raised as such: torch.save hides it behind "unexpected pos", its own bookkeeping."""

    def write_data(self, *args: Any) -> Future[list[WriteResult]]:
        try:
            return super().write_data(*args)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _hash_own_files(folder: Path) -> dict[str, dict[str, int | str]]:
    """Size and sha256 of the files that this rank wrote, by name."""
    rank = dist.get_rank()
    paths = sorted(folder.glob(f"__{rank}_*"))
    if rank == 0:
        paths.append(folder / ".metadata")
    return {path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in paths}


def _publish(temporary: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Makes the written files a checkpoint. The order is what survives a crash: contents, manifest, name, `latest`."""
    _write_synced(temporary / MANIFEST, json.dumps(sign_manifest(manifest), indent=1))
    _sync(temporary)
    if final.exists():  # the run went back to an earlier checkpoint and came here again
        _discard(final)
    temporary.rename(final)
    _sync(final.parent)
    _write_synced(final.parent / f"{TEMPORARY}{LATEST}", f"{final.name}\n")
    (final.parent / f"{TEMPORARY}{LATEST}").replace(final.parent / LATEST)
    _sync(final.parent)


def _remove_older(newest: Path, keep: Keep) -> None:
    if keep.newest is None:
        return
    older = sorted(path for path in newest.parent.glob("step_*") if path.name < newest.name and is_complete(path))
    for path in older[: max(len(older) - (keep.newest - 1), 0)]:
        if keep.every_steps is None or int(path.name.removeprefix("step_")) % keep.every_steps:
            try:
                _discard(path)
            except OSError as error:
                print(f"warning: {path} is no longer needed, but cannot be removed: {error.strerror}", file=sys.stderr, flush=True)


def _discard(checkpoint: Path) -> None:
    """Removes a checkpoint; stopped half-way it leaves rubbish, not half a checkpoint."""
    rubbish = checkpoint.with_name(f"{TEMPORARY}old_{checkpoint.name}")
    checkpoint.rename(rubbish)
    shutil.rmtree(rubbish, ignore_errors=True)


def _remove_leftovers(directory: Path) -> None:
    """As far as it can be done now: NFS keeps files that a process has open. The next save tries again."""
    for path in directory.glob(f"{TEMPORARY}*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


# ---- loading ----


def load_checkpoint(engine: DeepSpeedEngine, checkpoint: Path) -> dict[str, Any]:
    """Puts a checkpoint of any layout into the engine and returns the `progress` it was saved with. Called by every rank.

    Restored: fp32 masters, Adam moments and step count, the low-precision weights, also those kept gathered. The files'
    hashes are verified first; nothing in the engine changes before all has been read.

    Raises:
        DamagedCheckpointError: the same on every rank: a file is not as it was written.
        CheckpointError: the same on every rank: the checkpoint is incomplete, or its parameters are not those of the engine's model.
    """
    layout = Layout.of(engine)
    with _every_rank(f"cannot load {checkpoint}"):
        reader = CheckpointReader(checkpoint)
        parameters = _parameters(engine)
        _require_same_parameters(reader.manifest["parameters"], _describe(parameters, layout))
        partitions = _empty_partitions(parameters, layout)
    with _every_rank(f"cannot load {checkpoint}", kind=DamagedCheckpointError):
        reader.verify(sorted(reader.manifest["files"])[dist.get_rank() :: dist.get_world_size()])
    with _every_rank(f"cannot load {checkpoint}"):
        if reader.manifest["tensor_parallel"] == layout.tensor_size:
            dcp.load(partitions, storage_reader=dcp.FileSystemReader(checkpoint))
        else:
            _read_other_layout(reader, parameters, partitions, layout)
    _write_partitions(engine, parameters, partitions, reader.manifest["optimizer_step"])
    engine.global_steps = reader.manifest["step"]  # DeepSpeed only prints it
    return reader.manifest["progress"]


def load_first_whole(engine: DeepSpeedEngine, candidates: Sequence[Path]) -> tuple[Path, dict[str, Any]] | None:
    """Loads the first of rank 0's `candidates` that is as it was written. Called by every rank.

    Returns:
        it, and the progress it was saved with; None where there are no candidates.

    Raises:
        CheckpointError: as `load_checkpoint`; of damage only where all are damaged.
    """
    shared = [list(candidates)]
    dist.broadcast_object_list(shared)  # network file systems may show ranks different ones
    (paths,) = shared
    for checkpoint, next_one in zip(paths, paths[1:], strict=False):
        try:
            return checkpoint, load_checkpoint(engine, checkpoint)
        except DamagedCheckpointError as error:
            if dist.get_rank() == 0:
                print(f"warning: {error}; going on from {next_one.name}", file=sys.stderr, flush=True)
    if not paths:
        return None
    try:
        return paths[-1], load_checkpoint(engine, paths[-1])
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(
            f"{error}; no checkpoint before it is whole and of these settings: restore one, or move {paths[-1].parent} away to start again "
            "from step 0"
        ) from error


def _require_same_parameters(saved: dict[str, Any], model: dict[str, Any]) -> None:
    for name in [*saved, *model]:
        if name not in model:
            raise CheckpointError(f"it holds the parameter {name}, which the model does not have")
        if name not in saved:
            raise CheckpointError(f"it lacks the model's parameter {name}")
        if saved[name]["shape"] != model[name]["shape"]:
            raise CheckpointError(f"the parameter {name} is {saved[name]['shape']} in it and {model[name]['shape']} in the model")


def _read_other_layout(reader: CheckpointReader, parameters: Parameters, partitions: dict[str, DTensor], layout: "Layout") -> None:
    """Fills the partitions from a checkpoint of another tensor-parallel size: one full tensor at a time in memory."""
    for name, parameter in parameters.items():
        dim = _tensor_parallel_dim(parameter)
        for kind in KINDS:
            tensor = reader.read(name, kind)
            if dim is not None:
                tensor = tensor.chunk(layout.tensor_size, dim)[layout.tensor_rank]
            own = partitions[f"{kind}/{name}"].to_local()
            own.copy_(tensor.flatten()[layout.own_range(parameter)].view_as(own))


# ---- the engine's side: parameters and their partitions ----


@dataclass(frozen=True)
class Layout:
    """This rank's place among tensor- and data-parallel ranks; `mesh` holds the global ranks, [tensor, data]."""

    tensor_rank: int
    tensor_size: int
    data_rank: int
    data_size: int
    mesh: DeviceMesh

    @classmethod
    def of(cls, engine: DeepSpeedEngine) -> "Layout":
        tensor, data = engine.mpu.get_model_parallel_group(), engine.mpu.get_data_parallel_group()
        tensor_size, data_size = dist.get_world_size(tensor), dist.get_world_size(data)
        ranks = torch.arange(tensor_size * data_size).view(data_size, tensor_size).T  # Megatron: tensor ranks are neighbours
        mesh = DeviceMesh.from_group([tensor, data], "cpu", ranks, mesh_dim_names=("tensor", "data"))
        layout = cls(dist.get_rank(tensor), tensor_size, dist.get_rank(data), data_size, mesh)
        assert ranks[layout.tensor_rank, layout.data_rank] == dist.get_rank()
        return layout

    def own_range(self, parameter: Any) -> slice:
        """The elements of the flat tensor-parallel shard that this data-parallel rank owns, without ZeRO's padding."""
        size, numel = part_size(parameter, self.data_size), shard_shape(parameter).numel()
        return slice(min(size * self.data_rank, numel), min(size * (self.data_rank + 1), numel))

    def distribute(self, own: torch.Tensor, parameter: Any) -> DTensor:
        """The global tensor whose `own_range` on this rank is `own`. Shard's split into equal ceilings is ZeRO-3's."""
        numel = shard_shape(parameter).numel()
        if _tensor_parallel_dim(parameter) is None:
            return DTensor.from_local(own, self.mesh, (Replicate(), Shard(0)), run_check=False, shape=torch.Size([numel]), stride=(1,))
        shape = torch.Size([self.tensor_size, numel])
        return DTensor.from_local(own.view(1, -1), self.mesh, (Shard(0), Shard(1)), run_check=False, shape=shape, stride=(numel, 1))


def _parameters(engine: DeepSpeedEngine) -> Parameters:
    """The engine's parameters by name, after a check that it is of the kind whose state can be saved."""
    if not engine.zero_optimization():
        raise CheckpointError("checkpoints hold the state of ZeRO, and ds_config has stage 0: set zero_optimization.stage to 1, 2 or 3")
    optimizer = engine.optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Adam):
        raise CheckpointError(f"checkpoints hold the state of torch's Adam or AdamW, and the optimizer is {type(optimizer)}")
    parameters = dict(engine.module.named_parameters())
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        raise CheckpointError(f"checkpoints hold trained parameters only, and {frozen[0]} is frozen")
    return parameters


def _tensor_parallel_dim(parameter: Any) -> int | None:
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def _describe(parameters: Parameters, layout: Layout) -> dict[str, dict[str, Any]]:
    """Full shape and tensor-parallel dimension of each parameter, as in the manifest."""
    described = {}
    for name, parameter in parameters.items():
        dim = _tensor_parallel_dim(parameter)
        shape = [size * layout.tensor_size if index == dim else size for index, size in enumerate(shard_shape(parameter))]
        described[name] = {"shape": shape, "tensor_parallel_dim": dim}
    return described


def _read_partitions(engine: DeepSpeedEngine, parameters: Parameters, layout: Layout) -> dict[str, DTensor]:
    """A copy of the engine's state, `kind/name` to a tensor on the CPU."""
    adam_states(engine)
    partitions = {}
    for name, parameter in parameters.items():
        own = layout.own_range(parameter)
        for kind in KINDS:
            padded = read_part(engine, parameter, kind)
            partitions[f"{kind}/{name}"] = layout.distribute(padded[: own.stop - own.start].to("cpu", copy=True), parameter)
    return partitions


def _empty_partitions(parameters: Parameters, layout: Layout) -> dict[str, DTensor]:
    partitions = {}
    for name, parameter in parameters.items():
        own = layout.own_range(parameter)
        for kind in KINDS:
            partitions[f"{kind}/{name}"] = layout.distribute(torch.empty(own.stop - own.start), parameter)
    return partitions


def _write_partitions(engine: DeepSpeedEngine, parameters: Parameters, partitions: dict[str, DTensor], optimizer_step: int) -> None:
    """Puts the partitions into the engine."""
    begin_setting(engine)
    for state in adam_states(engine):
        state["step"].fill_(optimizer_step)
    for name, parameter in parameters.items():
        for kind in KINDS:
            set_part(engine, parameter, kind, partitions[f"{kind}/{name}"].to_local().flatten())
    end_setting(engine)


def _optimizer_step(engine: DeepSpeedEngine) -> int:
    """Adam's step count: behind the run's where steps were skipped."""
    return int(adam_states(engine)[0]["step"])


# ---- ranks that agree, files that last ----


def _gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


@contextlib.contextmanager
def _every_rank(failure: str, group: dist.ProcessGroup | None = None, kind: type[CheckpointError] = CheckpointError) -> Iterator[None]:
    """Runs the block on every rank of `group`; where it raised on any, every rank raises `kind` with all the causes.

    The block itself must not wait for other ranks, other than in calls that fail on all ranks together (DCP's do).
    """
    cause: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:  # DCP's is a BaseException
        cause = error
    texts = _gather(None if cause is None else _explain(cause), group)
    causes = dict.fromkeys(text for text in texts if text is not None)  # each once, in rank order
    if causes:
        raise kind(f"{failure}: {'; '.join(causes)}") from cause


def _explain(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {_explain(cause)}" for rank, (cause, _) in error.failures.items())
    if isinstance(error, CheckpointError | OSError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
