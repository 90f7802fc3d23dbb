"""Initial weights: each full (unsharded) tensor is a function of (seed, parameter name) alone.

So every tensor-parallel, data-parallel and `zero.Init` layout starts from the same model, and adding a parameter changes
no other. Megatron's layers draw the full weight on each rank through `init_method` and keep their slice of it.
"""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn


def keyed_normal(seed: int, name: str, std: float) -> Callable[[Tensor], None]:
    """A function that fills a full weight with N(0, std^2), drawn in fp32 on the CPU by a generator keyed by (seed, name)."""

    def fill(weight: Tensor) -> None:
        if weight.is_meta:
            return
        key = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
        # Inside deepspeed.zero.Init torch.empty makes tensors of the training dtype; a tensor from NumPy stays fp32.
        values = torch.from_numpy(np.empty(tuple(weight.shape), dtype=np.float32))
        with torch.no_grad():
            weight.copy_(values.normal_(0.0, std, generator=generator))

    return fill


def replicated(shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], object]) -> nn.Parameter:
    """A parameter that every tensor-parallel rank holds whole, filled by `fill` (in place)."""
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype))
    with torch.no_grad():
        fill(parameter)
    return parameter
