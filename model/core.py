"""The recurrent core: projection, shared blocks, gate, and the loop over recurrences.

`RecurrentCore` owns everything that is used more than once in a forward pass and is ONE module to ZeRO-3 (a leaf): its
parameters are gathered once for the whole loop and its gradients reduced once, whatever the depth. The anchor, which does not
change over the recurrences, has its halves of the projection and of the gate's first layer computed once (`hoist`).

Shapes: T tokens of this rank (the whole sequence without sequence parallelism), B batch, D hidden size. `anchor` is the
prelude's output (h_pre).
"""

import warnings
from typing import NamedTuple

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import ComputeConfig, GRTConfig
from model.initialization import replicated
from model.layers import Block, Norm, ReplicatedLinear, checkpointed
from model.noise import MAX_RECURRENCE, Noise
from model.ops import fused, reference
from model.ops.reference import Head, square_sum


class GateLogits(ReplicatedLinear):
    """W2 of the gate, and b2, which `tail` adds.

    The bias is stored as an offset from `gate_bias`: in bf16, values near 4 would move in steps of 0.031.
    """

    def __init__(self, config: GRTConfig, name: str, dtype: torch.dtype, seed: int) -> None:
        super().__init__(config.hidden_size, config.hidden_size, name, config, dtype, seed)
        self.bias = replicated((config.hidden_size,), dtype, nn.init.zeros_)


class HalfLinear(NamedTuple):
    """W [x, a] for a fixed a: the half of W that meets x, and the other half's product."""

    weight: Tensor  # [D, D]
    product: Tensor  # [T, B, D]

    def apply(self, x: Tensor) -> Tensor:
        """[T, B, D] -> [T, B, D]."""
        return torch.addmm(self.product.flatten(0, -2), x.flatten(0, -2), self.weight.t()).view_as(x)


def half_linear(weight: Tensor, fixed: Tensor) -> HalfLinear:
    """weight [D, 2 D], fixed [T, B, D]. The weight is split here, once: a slice at each use would cost a padded gradient each."""
    first, second = weight.split(fixed.shape[-1], dim=1)
    return HalfLinear(first, F.linear(fixed, second))


class GateAnchor(NamedTuple):
    """What the gate's first layer needs of the anchor: W1 with LN_c's weight folded in, and sums for LN_c's statistics."""

    first: HalfLinear
    row_sums: Tensor  # [D], of the folded W1
    total: Tensor  # [T, B, 1], sum over the channels of LN_p(anchor), at least fp32
    square: Tensor  # [T, B, 1], of the squares


class Gate(nn.Module):
    """The weights of the gate, and its logits W2 SiLU(W1 LN_c[LN_x(h), LN_p(anchor)]), to which `tail` adds bias and noise."""

    def __init__(self, config: GRTConfig, name: str, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        d = config.hidden_size
        self.state_norm = Norm(d, config, dtype)
        self.anchor_norm = Norm(d, config, dtype)
        self.input_norm = Norm(2 * d, config, dtype) if config.gate_input_norm else None
        self.w1 = ReplicatedLinear(2 * d, d, f"{name}.w1", config, dtype, seed)
        self.w2 = GateLogits(config, f"{name}.w2", dtype, seed)

    def forward(self, state: Head, anchor: Tensor | GateAnchor) -> Tensor:
        """The state as `head` made it and the anchor, whole or as `hoist` made it -> logits [T, B, D], without bias."""
        if isinstance(anchor, GateAnchor):
            first = self._first_layer(state, anchor)
        else:
            z = torch.cat((state.normed, self.anchor_norm(anchor)), dim=-1)
            first = self.w1(z if self.input_norm is None else self.input_norm(z))
        return self.w2(F.silu(first))

    def hoist(self, anchor: Tensor) -> GateAnchor:
        """The part of the first layer that depends on the anchor [T, B, D] alone."""
        normed = self.anchor_norm(anchor)
        wide = torch.promote_types(normed.dtype, torch.float32)
        weight = self.w1.weight if self.input_norm is None else self.w1.weight * self.input_norm.weight
        return GateAnchor(
            first=half_linear(weight, normed),
            row_sums=weight.sum(1, dtype=wide).to(weight.dtype),
            total=normed.sum(-1, keepdim=True, dtype=wide),
            square=square_sum(normed),
        )

    def _first_layer(self, state: Head, anchor: GateAnchor) -> Tensor:
        """W1 LN_c[state, LN_p(anchor)] without forming the concatenation: (W1' z - mean(z) W1' 1) / std(z), W1' = W1 diag(LN_c.weight)."""
        product = anchor.first.apply(state.normed)
        if self.input_norm is None:
            return product
        channels = 2 * state.normed.shape[-1]
        mean_square = (state.square + anchor.square) / channels
        if self.input_norm.rms:
            return product * (mean_square + self.input_norm.eps).rsqrt().to(product.dtype)
        mean = (state.total + anchor.total) / channels
        scale = (mean_square - mean.square() + self.input_norm.eps).rsqrt()
        return (product - mean.to(product.dtype) * anchor.row_sums) * scale.to(product.dtype)


class HoistedAnchor(NamedTuple):
    """All that a recurrence reads of the anchor, computed once for the loop."""

    projection: HalfLinear
    gate: GateAnchor


class RecurrentCore(nn.Module):
    """h <- g * h + (1 - g) * Blocks(W_proj [h + eps_x, anchor]), `depth` times from h = anchor."""

    def __init__(self, config: GRTConfig, name: str, parallel: ModelParallelConfig, seed: int, compute: ComputeConfig) -> None:
        super().__init__()
        d, dtype = config.hidden_size, parallel.params_dtype
        self.config = config
        self.compute = compute
        self.seed = seed
        self.head, self.tail = (fused.head, fused.tail) if fused.chosen(compute.gate_ops) else (reference.head, reference.tail)
        self.projection = ReplicatedLinear(2 * d, d, f"{name}.projection", config, dtype, seed)
        self.blocks = nn.ModuleList(
            Block(config, f"{name}.blocks.{i}", parallel, seed, compute.checkpoints_blocks) for i in range(config.core_blocks)
        )
        self.gate = Gate(config, f"{name}.gate", dtype, seed)
        self._recurrence = self._compute_recurrence
        if compute.compile == "recurrence":
            torch._dynamo.config.ignore_logging_functions.add(warnings.warn)  # megatron-core 0.16.1's linears warn at each call
            # The offsets of documents have a length for each power of two, in training and evaluation.
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
            whole = parallel.tensor_model_parallel_size == 1  # collectives break the graph
            self._recurrence = torch.compile(self._compute_recurrence, fullgraph=whole, dynamic=False)

    def forward(
        self, anchor: Tensor, documents: Tensor | None, rotary: Tensor | None, depth: int, positions: Tensor | None, measure: bool
    ) -> tuple[Tensor, Tensor]:
        """Runs `depth` recurrences; depth 0 returns the anchor, but through this forward, on which ZeRO-3's trace relies.

        Args:
            anchor: [T, B, D].
            documents, rotary: as in `Attention`.
            positions: int64 [T, B], global token positions, which key the noise; None for the noise-free core.
            measure: whether to take statistics of the gate.

        Returns:
            hidden [T, B, D], and statistics fp32 [depth, 2], detached, of this rank's tokens: the gate's mean and the relative size
            of the update, |h_r - h_{r-1}| / |h_{r-1}|, by recurrence ([0, 2] unless asked for).
        """
        fixed = self._hoist(anchor) if self.compute.hoist and depth else anchor
        without_gradient = depth - self.config.recurrences_with_gradient(depth)
        keeps_state_only = depth - self.compute.keep_last if self.compute.checkpointing in ("recurrence", "nested") else 0
        noises: list[Noise | None] = [None] * depth
        if positions is not None:
            noises = [Noise(positions, row) for row in _counters(self.seed, depth, positions.device)]
        hidden = anchor
        measured = []
        for recurrence, noise in enumerate(noises, start=1):
            inputs = (hidden, fixed, documents, rotary, noise, measure)
            if recurrence <= without_gradient:
                with torch.no_grad():
                    hidden, statistics = self._recur(*inputs)
            elif recurrence <= keeps_state_only:
                hidden, statistics = checkpointed(self._recur, *inputs)
            else:
                hidden, statistics = self._recur(*inputs)
            if measure:
                measured.append(statistics)
        return hidden, torch.stack(measured) if measured else torch.zeros(0, 2, device=anchor.device)

    def _hoist(self, anchor: Tensor) -> HoistedAnchor:
        return HoistedAnchor(half_linear(self.projection.weight, anchor), self.gate.hoist(anchor))

    def _recur(
        self,
        hidden: Tensor,
        anchor: Tensor | HoistedAnchor,
        documents: Tensor | None,
        rotary: Tensor | None,
        noise: Noise | None,
        measure: bool,
    ) -> tuple[Tensor, Tensor]:
        """One recurrence. Returns the new state, and its row of statistics (empty unless asked for)."""
        updated, gate_mean = self._recurrence(hidden, anchor, documents, rotary, noise)
        if not measure:
            return updated, hidden.new_empty(0)
        with torch.no_grad():
            return updated, torch.stack((gate_mean.float().mean(), (updated - hidden).float().norm() / hidden.float().norm()))

    def _compute_recurrence(
        self, hidden: Tensor, anchor: Tensor | HoistedAnchor, documents: Tensor | None, rotary: Tensor | None, noise: Noise | None
    ) -> tuple[Tensor, Tensor]:
        """The new state, and the gate's mean of each token. The recurrence is a number in a tensor here, so this is compiled once."""
        config = self.config
        state = self.head(hidden, self.gate.state_norm, noise, config.state_noise)
        if isinstance(anchor, HoistedAnchor):
            logits = self.gate(state, anchor.gate)
            candidate = anchor.projection.apply(state.noisy)
        else:
            logits = self.gate(state, anchor)
            candidate = self.projection(torch.cat((state.noisy, anchor), dim=-1))
        for block in self.blocks:
            candidate = block(candidate, documents, rotary)
        return self.tail(
            logits,
            self.gate.w2.bias,
            hidden,
            candidate,
            noise,
            initial_bias=config.gate_bias,
            temperature=config.gate_temperature,
            sigma=config.gate_noise,
            noise_per_token=config.gate_noise_per == "token",
        )


def _counters(seed: int, depth: int, device: torch.device) -> Tensor:
    """int64 [depth, 2]: seed and recurrence of each draw, made on the device."""
    assert depth <= MAX_RECURRENCE
    recurrences = torch.arange(1, depth + 1, device=device)
    return torch.stack((torch.full_like(recurrences, seed), recurrences), dim=1)
