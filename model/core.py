"""The recurrent core: projection, shared blocks, gate, and the loop over recurrences.

`RecurrentCore` owns everything that is used more than once in a forward pass and is ONE module to ZeRO-3 (a leaf): its
parameters are gathered once for the whole loop and its gradients reduced once, whatever the depth.

Shapes: S sequence, B batch, D hidden size. `anchor` is the prelude's output (h_pre), constant over the recurrences.
"""

from dataclasses import dataclass

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import GRTConfig
from model.initialization import keyed_normal, replicated
from model.layers import Block, Norm, ReplicatedLinear
from model.noise import Stream, normals


class GateLogits(nn.Module):
    """W2 and b2 of the gate: [..., D] -> logits [..., D] in at least fp32.

    The bias is stored as an offset from `gate_bias`: in bf16, values near 4 would move in steps of 0.031.
    """

    def __init__(self, config: GRTConfig, name: str, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        d = config.hidden_size
        self.weight = replicated((d, d), dtype, keyed_normal(seed, f"{name}.weight", config.init_std))
        self.bias = replicated((d,), dtype, nn.init.zeros_)
        self.initial_bias = config.gate_bias

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x, self.weight).to(wide) + (self.bias.to(wide) + self.initial_bias)


class Gate(nn.Module):
    """How much of the old state each channel keeps: g = sigmoid(W2 SiLU(W1 LN_c[LN_x(h), LN_p(anchor)]) / tau + noise)."""

    def __init__(self, config: GRTConfig, name: str, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        d = config.hidden_size
        self.state_norm = Norm(d, config, dtype)
        self.anchor_norm = Norm(d, config, dtype)
        self.input_norm = Norm(2 * d, config, dtype) if config.gate_input_norm else None
        self.w1 = ReplicatedLinear(2 * d, d, f"{name}.w1", config, dtype, seed)
        self.w2 = GateLogits(config, f"{name}.w2", dtype, seed)
        self.temperature = config.gate_temperature

    def forward(self, hidden: Tensor, anchor: Tensor, noise: Tensor | None) -> Tensor:
        """[S, B, D] twice -> g [S, B, D] in at least fp32. `noise` [S, B, 1 or D] is added to the tempered logits."""
        z = torch.cat((self.state_norm(hidden), self.anchor_norm(anchor)), dim=-1)
        if self.input_norm is not None:
            z = self.input_norm(z)
        logits = self.w2(F.silu(self.w1(z))) / self.temperature
        return torch.sigmoid(logits if noise is None else logits + noise)


@dataclass(frozen=True)
class NoiseKey:
    """What the noise of a batch is a function of, besides the recurrence."""

    seed: int
    positions_SB: Tensor  # int64, global token positions


class RecurrentCore(nn.Module):
    """h <- g * h + (1 - g) * Blocks(W_proj [h + eps_x, anchor]), `depth` times from h = anchor."""

    def __init__(self, config: GRTConfig, name: str, parallel: ModelParallelConfig, seed: int) -> None:
        super().__init__()
        d, dtype = config.hidden_size, parallel.params_dtype
        self.config = config
        self.projection = ReplicatedLinear(2 * d, d, f"{name}.projection", config, dtype, seed)
        self.blocks = nn.ModuleList(Block(config, f"{name}.blocks.{i}", parallel, seed) for i in range(config.core_blocks))
        self.gate = Gate(config, f"{name}.gate", dtype, seed)

    def forward(
        self, anchor: Tensor, mask: Tensor | None, rotary: Tensor | None, depth: int, noise_key: NoiseKey | None, measure: bool
    ) -> tuple[Tensor, Tensor]:
        """Runs `depth` recurrences; depth 0 returns the anchor, but through this forward, on which ZeRO-3's trace relies.

        Args:
            anchor: [S, B, D].
            mask, rotary: as in `Attention`.
            noise_key: None for the noise-free core.
            measure: whether to take statistics of the gate.

        Returns:
            hidden [S, B, D], and statistics fp32 [depth, 2], detached: the gate's mean and the relative size of the update,
            |h_r - h_{r-1}| / |h_{r-1}|, by recurrence ([0, 2] unless asked for).
        """
        hidden = anchor
        measured = []
        for recurrence in range(1, depth + 1):
            gate, updated = self._recur(hidden, anchor, mask, rotary, recurrence, noise_key)
            if measure:
                with torch.no_grad():
                    measured.append(torch.stack((gate.float().mean(), (updated - hidden).float().norm() / hidden.float().norm())))
            hidden = updated
        return hidden, torch.stack(measured) if measured else torch.zeros(0, 2, device=anchor.device)

    def _recur(
        self, hidden: Tensor, anchor: Tensor, mask: Tensor | None, rotary: Tensor | None, recurrence: int, noise_key: NoiseKey | None
    ) -> tuple[Tensor, Tensor]:
        """One recurrence. Returns the gate and the new state."""
        gate = self.gate(hidden, anchor, self._gate_noise(noise_key, recurrence))
        candidate = self.projection(torch.cat((self._noisy(hidden, noise_key, recurrence), anchor), dim=-1))
        for block in self.blocks:
            candidate = block(candidate, mask, rotary)
        return gate, (gate * hidden + (1 - gate) * candidate).to(hidden.dtype)

    def _noisy(self, hidden: Tensor, noise_key: NoiseKey | None, recurrence: int) -> Tensor:
        """hidden + eps_x, one draw an element."""
        if noise_key is None or self.config.state_noise == 0:
            return hidden
        draw = normals(noise_key.seed, noise_key.positions_SB, hidden.shape[-1], Stream.STATE, recurrence)
        return hidden + (draw * self.config.state_noise).to(hidden.dtype)

    def _gate_noise(self, noise_key: NoiseKey | None, recurrence: int) -> Tensor | None:
        """eps_g, one draw a token [S, B, 1] or an element [S, B, D], in fp32."""
        if noise_key is None or self.config.gate_noise == 0:
            return None
        channels = 1 if self.config.gate_noise_per == "token" else self.config.hidden_size
        return normals(noise_key.seed, noise_key.positions_SB, channels, Stream.GATE, recurrence) * self.config.gate_noise
