"""Counter-based noise: every normal is a function of (seed, token position, channel, stream, recurrence) alone.

Forward, recomputation and any tensor-, data- or sequence-parallel shard therefore see the same noise field with nothing
saved. The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11), the transform
Box-Muller. The layout below is frozen by golden values in tests/model/test_noise.py.

Key: the seed's two 32-bit halves. Counter words: channel // 4; position, low 32 bits; position, high 16 bits, with the
stream in bits 16..19 and the recurrence in bits 20..31; 0.
"""

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
# Counters at once: on a CPU the working set of the integer rounds stays in a core's L2 cache; a GPU wants few launches.
_CHUNK, _CPU_CHUNK = 1 << 22, 1 << 14
MAX_RECURRENCE = (1 << 12) - 1


class Stream(IntEnum):
    """What a draw is for; part of the counter, so that two uses never share a number."""

    STATE = 0
    GATE = 1
    DEPTH = 2


class Noise(NamedTuple):
    """Where one recurrence's draws for a batch lie in the field."""

    positions: Tensor  # int64 [T, B], global token positions
    counters: Tensor  # int64 [2]: seed, recurrence; a tensor, so that compiled code and CUDA graphs do not depend on the numbers


def philox4x32(counter: Sequence[Tensor] | Tensor, seed: int | Tensor) -> Tensor:
    """Philox4x32-10.

    Args:
        counter: 4 words, int64 of shapes that broadcast together, each in 0 .. 2^32 - 1. What differs along one dimension only
            is best given so: most of the first two rounds is then done on the small shapes.
        seed: 64-bit key, a number or an int64 scalar.

    Returns:
        int64 [4, ...], each word in 0 .. 2^32 - 1.
    """
    c0, c1, c2, c3 = counter
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        # An int64 product wraps modulo 2^64, so its bits are those of the unsigned product.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) ^ c1).bitwise_xor_(key0).bitwise_and_(_MASK)
        c2 = ((product0 >> 32) ^ c3).bitwise_xor_(key1).bitwise_and_(_MASK)
        c1, c3 = product1, product0  # their upper halves are masked away with the next xor
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return torch.stack((c0, c1.bitwise_and_(_MASK), c2, c3.bitwise_and_(_MASK)))


def uniform(words: Tensor) -> Tensor:
    """fp32 in (0, 1] from the upper 24 bits of each 32-bit word; exact, so equal on every device."""
    return (words >> 8).float().add_(1.0).mul_(2.0**-24)


def box_muller(words: Tensor) -> Tensor:
    """int64 words [4, ...] -> standard normals fp32 [..., 4]: words 0 and 1 make the first two, words 2 and 3 the others."""
    uniforms = uniform(words)
    radius = uniforms[0::2].log_().mul_(-2.0).sqrt_()
    angle = uniforms[1::2].mul_(2.0 * math.pi)
    out = torch.empty(*words.shape[1:], 4, device=words.device)
    by_word = out.movedim(-1, 0)
    torch.mul(radius, angle.cos(), out=by_word[0::2])
    torch.mul(radius, angle.sin_(), out=by_word[1::2])
    return out


@torch.no_grad()
def normals(seed: int | Tensor, positions: Tensor, channels: int, stream: Stream, recurrence: int | Tensor) -> Tensor:
    """Standard normals for each token and channel.

    Args:
        seed: 64-bit key.
        positions: int64 [...], global token positions: sequence number x sequence length + offset; below 2^48.
        channels: how many numbers a token.
        stream: what they are for.
        recurrence: 0 .. 4095; it and the seed are numbers or int64 scalars.

    Returns:
        fp32 [..., channels], on the device of `positions`.
    """
    groups = -(-channels // 4)
    flat = positions.reshape(-1)
    out = torch.empty(flat.numel(), groups * 4, device=flat.device)
    group = torch.arange(groups, device=flat.device)
    rows = max(1, (_CPU_CHUNK if flat.device.type == "cpu" else _CHUNK) // groups)
    for start in range(0, flat.numel(), rows):
        position = flat[start : start + rows, None]
        high = (position >> 32) | (int(stream) << 16) | (recurrence << 20)
        words = philox4x32((group, position & _MASK, high, torch.zeros_like(position)), seed)
        out[start : start + rows] = box_muller(words).flatten(1)
    return out[:, :channels].reshape(*positions.shape, channels)
