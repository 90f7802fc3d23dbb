"""How many recurrences a training step runs: a pure function of (config, seed, step).

Every rank computes the same depth without communication and a resumed run draws what the uninterrupted one would have:
there is no state to store.
"""

import math

import torch

from model.config import POISSON_LIMIT, GRTConfig
from model.noise import Stream, box_muller, philox4x32, uniform

POISSON_SIGMA = 0.5  # spread of the log-normal rate, as in Huginn (Geiping et al., 2025)


def _words(seed: int, step: int, draw: int = 0) -> torch.Tensor:
    """int64 [4, 1]: one Philox block of the depth stream."""
    counter = torch.tensor([[draw], [step & 0xFFFFFFFF], [(step >> 32) | (int(Stream.DEPTH) << 16)], [0]])
    return philox4x32(counter, seed)


def _uniform_integer(seed: int, step: int, draw: int, count: int) -> int:
    """0 .. count - 1 from one 32-bit word; the bias of at most count / 2^32 is negligible for depths."""
    return (int(_words(seed, step, draw)[0]) * count) >> 32


def sample_depth(config: GRTConfig, seed: int, step: int) -> int:
    """Depth of optimizer step `step` (counted from 0), in `min_depth .. max_depth`; `poisson` alone may exceed `max_depth`.

    - uniform: each depth equally often (the paper's).
    - fixed: always `max_depth`.
    - stratified: every `max_depth - min_depth + 1` steps run a fresh permutation of all depths.
    - poisson: log-normal Poisson with mean `max_depth`, at most 4 times it (Huginn's heavy tail, cut so that memory is bounded).
    """
    low, high = config.min_depth, config.max_depth
    count = high - low + 1
    if config.depth_sampler == "fixed" or count == 1:
        return high
    if config.depth_sampler == "uniform":
        return low + _uniform_integer(seed, step, 0, count)
    if config.depth_sampler == "stratified":
        cycle, place = divmod(step, count)
        depths = list(range(low, high + 1))
        for last in range(count - 1, 0, -1):  # Fisher-Yates
            other = _uniform_integer(seed, cycle, last, last + 1)
            depths[last], depths[other] = depths[other], depths[last]
        return depths[place]
    return _log_normal_poisson(config, seed, step)


def _log_normal_poisson(config: GRTConfig, seed: int, step: int) -> int:
    """Inverts the Poisson distribution of a log-normal rate at one uniform number; mean `max_depth`."""
    words = _words(seed, step)
    normal = float(box_muller(words)[0, 0])
    rate = math.exp(math.log(max(config.max_depth - 1, 1e-9)) - POISSON_SIGMA**2 / 2 + POISSON_SIGMA * normal)
    target = float(uniform(words[3:]))
    extra, probability = 0, math.exp(-rate)
    cumulative = probability
    while cumulative < target and extra < POISSON_LIMIT * config.max_depth - 1:
        extra += 1
        probability *= rate / extra
        cumulative += probability
    return max(config.min_depth, 1 + extra)
