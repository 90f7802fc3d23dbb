"""The gate operators as fused kernels (model/csrc), with their shapes for torch.compile and their gradients.

`head` and `tail` are those of model/ops/reference.py: same arguments, same results up to rounding. Nothing is saved for the
backward pass but the inputs, and two numbers a token: the gate and its noise are computed again.
"""

import sys
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.library import register_autograd, register_fake

from model.layers import Norm
from model.noise import Noise
from model.ops.build import covers, cuda_architectures, find
from model.ops.reference import Head


def head(hidden: Tensor, norm: Norm, noise: Noise | None, sigma: float) -> Head:
    """As `reference.head`."""
    positions, counters = _arguments(noise, sigma)
    normed, noisy, _, _, total, square = torch.ops.grt.gate_head(hidden, norm.weight, positions, counters, sigma, norm.eps, norm.rms)
    return Head(normed, hidden if positions is None else noisy, total[..., None], square[..., None])


def tail(
    logits: Tensor,
    bias: Tensor,
    hidden: Tensor,
    candidate: Tensor,
    noise: Noise | None,
    *,
    initial_bias: float,
    temperature: float,
    sigma: float,
    noise_per_token: bool,
) -> tuple[Tensor, Tensor]:
    """As `reference.tail`."""
    positions, counters = _arguments(noise, sigma)
    updated, gate_mean = torch.ops.grt.gate_tail(
        logits, bias, hidden, candidate, positions, counters, initial_bias, temperature, sigma, noise_per_token
    )
    return updated, gate_mean.detach()


def _arguments(noise: Noise | None, sigma: float) -> tuple[Tensor, Tensor] | tuple[None, None]:
    return (None, None) if noise is None or not sigma else (noise.positions, noise.counters)


@cache
def load() -> Path | None:
    """Loads the library that `python -m model.ops.build` made for this torch; None if there is none, or none that loads."""
    library = find()
    if library is None:
        return None
    try:
        torch.ops.load_library(library)
    except OSError as error:  # say a wheel that was built against a newer C library
        reason = error.__cause__ or error  # torch's own says no more than the path
        print(f"warning: {library} cannot be loaded ({reason}); build it here: python -m model.ops.build --force", file=sys.stderr)
        return None
    register_fake("grt::gate_head", _head_shapes)
    register_fake("grt::gate_head_backward", _head_backward_shapes)
    register_fake("grt::gate_tail", _tail_shapes)
    register_fake("grt::gate_tail_backward", _tail_backward_shapes)
    register_autograd("grt::gate_head", _head_backward, setup_context=_head_context)
    register_autograd("grt::gate_tail", _tail_backward, setup_context=_tail_context)
    return library


def chosen(gate_ops: Literal["auto", "ref", "fused"]) -> bool:
    """Whether the fused operators are to be used on this process's device.

    Raises:
        ValueError: `gate_ops` is "fused" and they are not built for it.
    """
    if gate_ops == "ref":
        return False
    library = load()
    device, built = "CPUs", library is not None
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        device = f"GPUs of compute capability {major}.{minor}"
        built = library is not None and covers(cuda_architectures(library), 10 * major + minor)
    if gate_ops == "fused" and not built:
        raise ValueError(
            f"compute.gate_ops is fused, but no fused operators are built, or load, for {device} and torch {torch.__version__}. "
            "Build them with `python -m model.ops.build`, or set compute.gate_ops to auto or ref."
        )
    return built


def _rows(hidden: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[:-1], dtype=torch.promote_types(hidden.dtype, torch.float32))


def _like(hidden: Tensor) -> Tensor:
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


def _head_shapes(hidden: Tensor, weight: Tensor, positions: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    noisy = hidden.new_empty(0) if positions is None else _like(hidden)
    return _like(hidden), noisy, _rows(hidden), _rows(hidden), _rows(hidden), _rows(hidden)


def _head_backward_shapes(
    grad_normed: Tensor | None, grad_noisy: Tensor | None, grad_total: Tensor | None, grad_square: Tensor | None, hidden: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return _like(hidden), hidden.new_empty(hidden.shape[-1])


def _head_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, *_, rms = inputs
    _, _, mean, rstd, _, _ = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, mean, rstd)
    ctx.rms = rms


def _head_backward(ctx: Any, normed: Tensor | None, noisy: Tensor | None, _mean: None, _rstd: None, *sums: Tensor | None) -> Any:
    hidden, weight, mean, rstd = ctx.saved_tensors
    if noisy is not None and noisy.numel() != hidden.numel():
        noisy = None  # there was no noise
    grads = torch.ops.grt.gate_head_backward(normed, noisy, *sums, hidden, weight, mean, rstd, ctx.rms)
    return *grads, None, None, None, None, None


def _tail_shapes(logits: Tensor, bias: Tensor, hidden: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _like(hidden), _rows(hidden)


def _tail_backward_shapes(grad: Tensor, logits: Tensor, bias: Tensor, hidden: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return _like(hidden), torch.empty_like(bias), _like(hidden), _like(hidden)


def _tail_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, bias, hidden, candidate, positions, counters, *constants = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, bias, hidden, candidate, positions, counters)
    ctx.constants = constants


def _tail_backward(ctx: Any, updated: Tensor | None, _gate_mean: None) -> Any:
    if updated is None:
        return (None,) * 10
    return *torch.ops.grt.gate_tail_backward(updated, *ctx.saved_tensors, *ctx.constants), *(None,) * 6
