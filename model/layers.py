"""The transformer block and its parts, on Megatron's tensor-parallel linears.

Matrices that read the residual stream are split by output rows, those that write to it by input columns; norms are
replicated. Dense, grouped-query, learned-position and rotary, GELU and SwiGLU models are the same block. Under sequence
parallelism a rank's residual stream holds its own tokens only.

Shapes: T tokens of this rank (the whole sequence without sequence parallelism), S sequence, B batch, D hidden size,
N query heads of this rank, K key-value heads of this rank, H head size.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from model.attention import causal_attention
from model.config import GRTConfig
from model.initialization import keyed_normal, replicated
from model.parallel import enter_tensor_parallel


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dimension, with a weight and no bias."""

    def __init__(self, size: int, config: GRTConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = replicated((size,), dtype, nn.init.ones_)
        self.eps = config.norm_eps
        self.rms = config.norm == "rmsnorm"

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], same dtype; statistics in at least fp32."""
        if self.rms:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, None, self.eps)


class ReplicatedLinear(nn.Module):
    """x -> x W^T, the whole matrix on every tensor-parallel rank."""

    def __init__(self, size_in: int, size_out: int, name: str, config: GRTConfig, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.weight = replicated((size_out, size_in), dtype, keyed_normal(seed, f"{name}.weight", config.init_std))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size_in] -> [..., size_out]."""
        return F.linear(x, self.weight)


def column_parallel(size_in: int, size_out: int, name: str, std: float, parallel: ModelParallelConfig, seed: int) -> ColumnParallelLinear:
    """[S, B, size_in] -> [S, B, size_out / TP]: weight split by output rows. Its input has gone through `enter_tensor_parallel`."""
    return ColumnParallelLinear(
        size_in,
        size_out,
        config=replace(parallel, sequence_parallel=False),
        init_method=keyed_normal(seed, f"{name}.weight", std),
        bias=False,
        gather_output=False,
        disable_grad_reduce=True,
    )


def row_parallel(size_in: int, size_out: int, name: str, std: float, parallel: ModelParallelConfig, seed: int) -> RowParallelLinear:
    """[S, B, size_in / TP] -> [T, B, size_out], summed over the tensor-parallel group: weight split by input columns."""
    return RowParallelLinear(
        size_in,
        size_out,
        config=parallel,
        init_method=keyed_normal(seed, f"{name}.weight", std),
        bias=False,
        input_is_parallel=True,
        skip_bias_add=False,
    )


def rotary_embedding(positions_BS: Tensor, head_size: int, theta: float, dtype: torch.dtype) -> Tensor:
    """Cosines and sines [2, S, B, 1, H] of Hugging Face's half-split convention, computed in at least fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    channels = torch.arange(0, head_size, 2, device=positions_BS.device, dtype=wide)
    angles = positions_BS.t().to(wide)[..., None] / theta ** (channels / head_size)  # [S, B, H / 2]
    angles = torch.cat((angles, angles), dim=-1)[:, :, None]
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def _rotate(x: Tensor, rotary: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * rotary[0] + torch.cat((-second, first), dim=-1) * rotary[1]


class Attention(nn.Module):
    """Causal self-attention, heads shared out over the tensor-parallel ranks."""

    def __init__(self, config: GRTConfig, name: str, parallel: ModelParallelConfig, seed: int) -> None:
        super().__init__()
        d, kv_size = config.hidden_size, config.kv_heads * config.head_size
        self.parallel = parallel
        self.head_size = config.head_size
        # Separate matrices: a fused one, split over ranks, would not be a slice of the whole.
        self.q = column_parallel(d, d, f"{name}.q", config.init_std, parallel, seed)
        self.k = column_parallel(d, kv_size, f"{name}.k", config.init_std, parallel, seed)
        self.v = column_parallel(d, kv_size, f"{name}.v", config.init_std, parallel, seed)
        self.out = row_parallel(d, d, f"{name}.out", config.residual_init_std, parallel, seed)

    def forward(self, x: Tensor, documents: Tensor | None, rotary: Tensor | None) -> Tensor:
        """[T, B, D] -> [T, B, D].

        Args:
            documents: from `attention_documents`; None: one document a sequence.
            rotary: [2, S, B, 1, H], or None.
        """
        x = enter_tensor_parallel(x, self.parallel)
        q_SBNH = self.q(x)[0].unflatten(-1, (-1, self.head_size))
        k_SBKH = self.k(x)[0].unflatten(-1, (-1, self.head_size))
        v_SBKH = self.v(x)[0].unflatten(-1, (-1, self.head_size))
        if rotary is not None:
            q_SBNH, k_SBKH = _rotate(q_SBNH, rotary), _rotate(k_SBKH, rotary)
        return self.out(causal_attention(q_SBNH, k_SBKH, v_SBKH, documents).flatten(2))[0]


class MLP(nn.Module):
    """GELU (exact, erf) or SwiGLU feed-forward network."""

    def __init__(self, config: GRTConfig, name: str, parallel: ModelParallelConfig, seed: int) -> None:
        super().__init__()
        d, f = config.hidden_size, config.ffn_size
        self.parallel = parallel
        self.up = column_parallel(d, f, f"{name}.up", config.init_std, parallel, seed)
        self.gate = column_parallel(d, f, f"{name}.gate", config.init_std, parallel, seed) if config.mlp == "swiglu" else None
        self.down = row_parallel(f, d, f"{name}.down", config.residual_init_std, parallel, seed)

    def forward(self, x: Tensor) -> Tensor:
        """[T, B, D] -> [T, B, D]."""
        x = enter_tensor_parallel(x, self.parallel)
        up = self.up(x)[0]
        return self.down(F.gelu(up) if self.gate is None else F.silu(self.gate(x)[0]) * up)[0]


class Block(nn.Module):
    """Pre-norm transformer block; carries its own residual connections.

    Args:
        keeps_input_only: compute everything inside again in the backward pass.
    """

    def __init__(self, config: GRTConfig, name: str, parallel: ModelParallelConfig, seed: int, keeps_input_only: bool) -> None:
        super().__init__()
        self.keeps_input_only = keeps_input_only
        self.attention_norm = Norm(config.hidden_size, config, parallel.params_dtype)
        self.attention = Attention(config, f"{name}.attention", parallel, seed)
        self.mlp_norm = Norm(config.hidden_size, config, parallel.params_dtype)
        self.mlp = MLP(config, f"{name}.mlp", parallel, seed)

    def forward(self, hidden: Tensor, documents: Tensor | None, rotary: Tensor | None) -> Tensor:
        """[T, B, D] -> [T, B, D]; documents and rotary as in `Attention`."""
        if self.keeps_input_only and torch.is_grad_enabled():
            return checkpointed(self._compute, hidden, documents, rotary)
        return self._compute(hidden, documents, rotary)

    def _compute(self, hidden: Tensor, documents: Tensor | None, rotary: Tensor | None) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), documents, rotary)
        return hidden + self.mlp(self.mlp_norm(hidden))


def checkpointed(function: Callable[..., Any], *inputs: Any) -> Any:
    """function(*inputs), of which only the inputs are kept for the backward pass.

    Never reentrant: under ZeRO-3 a reentrant checkpoint of a module that runs several times loses gradients. No generator is saved:
    the noise is counter-based and there is no dropout.
    """
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
