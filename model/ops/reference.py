"""The gate operators in plain PyTorch: what the fused ones are measured against, and what runs where those are not built.

`head` is what a recurrence makes of its state before any matrix product, `tail` what it makes of gate logits and candidate.
Both draw their noise from the field of model/noise.py; the draw is one opaque operator to torch.compile.

Shapes: T tokens of this rank, B batch, D hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from model.layers import Norm
from model.noise import Noise, Stream, normals


class Head(NamedTuple):
    """What a recurrence makes of its state first."""

    normed: Tensor  # [T, B, D], LN_x of the state
    noisy: Tensor  # [T, B, D], the state with its noise
    total: Tensor  # [T, B, 1], sum of `normed` over the channels, at least fp32
    square: Tensor  # [T, B, 1], of its squares


def head(hidden: Tensor, norm: Norm, noise: Noise | None, sigma: float) -> Head:
    """hidden [T, B, D] -> its norm, the noisy state (noise of `sigma` an element), and the sums that a norm after the norm needs."""
    normed = norm(hidden)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    noisy = hidden
    if noise is not None and sigma:
        noisy = hidden + (_normals(noise, hidden.shape[-1], Stream.STATE) * sigma).to(hidden.dtype)
    return Head(normed, noisy, normed.sum(-1, keepdim=True, dtype=wide), square_sum(normed))


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
    """g * hidden + (1 - g) * candidate with g = sigmoid((logits + bias + initial_bias) / temperature + noise), in at least fp32.

    Args:
        logits, hidden, candidate: [T, B, D].
        bias: [D], as an offset from `initial_bias`.
        noise: None for none.
        sigma: of the gate's noise.
        noise_per_token: one draw for all channels of a token.

    Returns:
        the new state [T, B, D] in the state's dtype, and the gate's mean over the channels [T, B], at least fp32, without gradient.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    tempered = (logits.to(wide) + (bias.to(wide) + initial_bias)) / temperature
    if noise is not None and sigma:
        tempered = tempered + _normals(noise, 1 if noise_per_token else hidden.shape[-1], Stream.GATE) * sigma
    gate = torch.sigmoid(tempered)
    return (gate * hidden + (1 - gate) * candidate).to(hidden.dtype), gate.detach().mean(-1)


def square_sum(x: Tensor) -> Tensor:
    """[..., D] -> [..., 1] in at least fp32."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)).square()


def _normals(noise: Noise, channels: int, stream: Stream) -> Tensor:
    return _opaque_normals(noise.positions, noise.counters, channels, int(stream))


@torch.library.custom_op("grt_reference::normals", mutates_args=())
def _opaque_normals(positions: Tensor, counters: Tensor, channels: int, stream: int) -> Tensor:
    return normals(counters[0], positions, channels, Stream(stream), counters[1]).contiguous()


@_opaque_normals.register_fake
def _(positions: Tensor, counters: Tensor, channels: int, stream: int) -> Tensor:
    return positions.new_empty(*positions.shape, channels, dtype=torch.float32)
