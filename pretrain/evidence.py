"""What is left of a run that cannot go on: its last batch, and the norms of all that met it, by layer and recurrence.

The step is computed once more, as it was: depth, noise and data are functions of the seed and of the positions.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from model.core import Gate, RecurrentCore
from model.grt import GRT, Embedding
from model.layers import Block
from model.parallel import ParallelGroups
from pretrain.data import Batch


class CannotGoOnError(RuntimeError):
    """The numbers are bad, and starting again would lead to the same; raised on every rank."""


def stop_with_evidence(
    directory: Path,
    facts: dict[str, Any],
    engine: DeepSpeedEngine,
    state: Mapping[str, DTensor],
    batches: Sequence[Batch],
    repeat: Callable[[], object],
) -> NoReturn:
    """Writes `directory`/step_N.json: `facts`; loss and positions of each micro-batch; and root mean square, largest size and count of
    values that are not finite, of the hidden states and of the mean loss's gradients there, by layer and recurrence, and of `state`.
    Called by every rank.

    Args:
        facts: "step", "why" the run cannot go on, and what else to keep.
        state: weights and moments, by name.
        batches: this rank's micro-batches of the step.
        repeat: computes the step of these batches again.

    Raises:
        CannotGoOnError: always.
    """
    with torch.compiler.set_stance("force_eager"), _watched(engine.module) as watch:  # compiled code would pass by the hooks
        repeat()
    losses = [loss if math.isfinite(loss) else None for loss in watch.losses]  # JSON has no NaN
    own = [{"positions": batch.sequence.tolist(), "loss": loss} for batch, loss in zip(batches, losses, strict=True)]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    evidence = facts | {
        "micro_batches": [batch for of_rank in everyone for batch in of_rank],
        "hidden": _over_ranks(watch.hidden, engine.device),
        "gradients": _over_ranks(watch.gradients, engine.device, scale=1 / ParallelGroups().get_data_parallel_world_size()),
        "state": _over_ranks({name: _sums(part.to_local()) for name, part in state.items()}, engine.device),
    }
    path = directory / f"step_{facts['step']:08d}.json"
    if torch.distributed.get_rank() == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(evidence, indent=1) + "\n")
        except OSError as error:
            print(f"warning: {path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
    raise CannotGoOnError(
        f"{facts['why']}, up to step {facts['step']}: this run cannot go on. What the step met is in {path}; what to do is in "
        "docs/operations.md."
    )


class _Watch:
    """Takes sums, as of `_sums`, of what the layers of a model put out in its forward passes, and of the gradients there."""

    def __init__(self) -> None:
        self.hidden: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.losses: list[float] = []
        self._calls: Counter[str] | None = None  # of each layer in this forward pass; None in a backward pass, which may run layers again

    def begins(self, *_: Any) -> None:
        self._calls = Counter()

    def ends(self, _: nn.Module, inputs: object, output: tuple[Tensor, Tensor]) -> None:
        self._calls = None
        self.losses.append(float(output[0].detach()))

    def layer(self, name: str, tensor: Tensor) -> None:
        if self._calls is None:
            return
        self._calls[name] += 1
        if name.startswith("core."):
            name = f"{name}/recurrence_{self._calls[name]}"
        _add(self.hidden, name, tensor)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: _add(self.gradients, name, gradient))


@contextmanager
def _watched(model: GRT) -> Iterator[_Watch]:
    watch = _Watch()

    def gate(_: nn.Module, inputs: tuple[Any, ...], logits: Tensor) -> None:
        watch.layer("core.state", inputs[0].noisy)
        watch.layer("core.gate_logits", logits)

    handles = [model.register_forward_pre_hook(watch.begins), model.register_forward_hook(watch.ends)]
    for name, module in model.named_modules():
        if isinstance(module, Gate):
            handles.append(module.register_forward_hook(gate))
        elif isinstance(module, RecurrentCore):
            handles.append(module.register_forward_hook(lambda _, inputs, output: watch.layer("core", output[0])))
        elif isinstance(module, Embedding | Block) or name == "final_norm":
            handles.append(module.register_forward_hook(lambda _, inputs, output, name=name: watch.layer(name, output)))
    try:
        yield watch
    finally:
        for handle in handles:
            handle.remove()


def _sums(tensor: Tensor) -> Tensor:
    """fp64 [4]: sum of squares of what is finite, count of all, count of what is not finite, largest size of what is finite."""
    values = tensor.detach().double()
    finite = values.isfinite()
    sizes = torch.where(finite, values, 0).abs()
    largest = sizes.max() if sizes.numel() else sizes.new_zeros(())
    return torch.stack((sizes.square().sum(), sizes.new_tensor(sizes.numel()), (~finite).sum().double(), largest))


def _add(sums: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    new = _sums(tensor)
    old = sums.get(name, torch.zeros_like(new))
    sums[name] = torch.cat((old[:3] + new[:3], torch.maximum(old[3:], new[3:])))


def _over_ranks(sums: dict[str, Tensor], device: torch.device, scale: float = 1.0) -> dict[str, dict[str, float]]:
    table = torch.stack(list(sums.values())).to(device)
    totals, largest = table[:, :3].contiguous(), table[:, 3].contiguous()
    torch.distributed.all_reduce(totals)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return {
        name: {"rms": scale * math.sqrt(squares / max(count - bad, 1)), "largest": scale * size, "not_finite": int(bad)}
        for name, (squares, count, bad), size in zip(sums, totals.tolist(), largest.tolist(), strict=True)
    }
