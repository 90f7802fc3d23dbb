"""Counter-based noise: every normal is a function of (seed, token position, channel, stream, recurrence) alone.

Forward, recomputation and any tensor-, data- or sequence-parallel shard therefore see the same noise field with nothing
saved. The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11), the transform
Box-Muller. The layout below is frozen by golden values in tests/model/test_noise.py.

Key: the seed's two 32-bit halves. Counter words: channel // 4; position, low 32 bits; position, high 16 bits, with the
stream in bits 16..19 and the recurrence in bits 20..31; 0.
"""

import math
from enum import IntEnum

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


def philox4x32(counter: Tensor, seed: int) -> Tensor:
    """Philox4x32-10.

    Args:
        counter: int64 [4, N], each word in 0 .. 2^32 - 1.
        seed: 64-bit key.

    Returns:
        int64 [4, N], each word in 0 .. 2^32 - 1.
    """
    c0, c1, c2, c3 = counter.clone()
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        # An int64 product wraps modulo 2^64, so its bits are those of the unsigned product.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) & _MASK).bitwise_xor_(c1).bitwise_xor_(key0)
        c2 = ((product0 >> 32) & _MASK).bitwise_xor_(c3).bitwise_xor_(key1)
        c1, c3 = product1.bitwise_and_(_MASK), product0.bitwise_and_(_MASK)
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return torch.stack((c0, c1, c2, c3))


def uniform(words: Tensor) -> Tensor:
    """fp32 in (0, 1] from the upper 24 bits of each 32-bit word; exact, so equal on every device."""
    return ((words >> 8) + 1).float() * 2.0**-24


def box_muller(words: Tensor) -> Tensor:
    """int64 words [4, N] -> standard normals fp32 [N, 4]: words 0 and 1 make the first two, words 2 and 3 the others."""
    radius = uniform(words[0::2]).log_().mul_(-2.0).sqrt_()
    angle = uniform(words[1::2]).mul_(2.0 * math.pi)
    pairs = torch.stack((radius * angle.cos(), radius * angle.sin()))  # [cos | sin, pair, N]
    return pairs.permute(2, 1, 0).reshape(-1, 4)


@torch.no_grad()
def normals(seed: int, positions: Tensor, channels: int, stream: Stream, recurrence: int) -> Tensor:
    """Standard normals for each token and channel.

    Args:
        seed: 64-bit key.
        positions: int64 [...], global token positions: sequence number x sequence length + offset; below 2^48.
        channels: how many numbers a token.
        stream: what they are for.
        recurrence: 0 .. 4095.

    Returns:
        fp32 [..., channels], on the device of `positions`.
    """
    assert 0 <= recurrence <= MAX_RECURRENCE
    groups = -(-channels // 4)
    flat = positions.reshape(-1)
    out = torch.empty(flat.numel(), groups * 4, device=flat.device)
    group = torch.arange(groups, device=flat.device)
    rows = max(1, (_CPU_CHUNK if flat.device.type == "cpu" else _CHUNK) // groups)
    for start in range(0, flat.numel(), rows):
        position = flat[start : start + rows, None]
        high = (position >> 32) | (int(stream) << 16) | (recurrence << 20)
        words = torch.broadcast_tensors(group, position & _MASK, high, torch.zeros_like(position))
        drawn = philox4x32(torch.stack(words).reshape(4, -1), seed)
        out[start : start + rows] = box_muller(drawn).reshape(-1, groups * 4)
    return out[:, :channels].reshape(*positions.shape, channels)
