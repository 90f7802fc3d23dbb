"""The peers: a GRT and a dense GPT-2 in plain PyTorch, as one would write them without this project.

Eager, torch's own modules, concatenated inputs, torch.randn noise, whole logits. The same function as `model.grt.GRT` (noise aside) for
configs with learned positions, LayerNorm and GELU; a config without core blocks is the dense GPT-2.

Shapes: B batch, S sequence, D hidden size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import GRTConfig


def linear(size_in: int, size_out: int, std: float, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(size_in, size_out, bias)
    nn.init.normal_(layer.weight, std=std)
    return layer


class Block(nn.Module):
    """Pre-norm transformer block, [B, S, D] -> [B, S, D]."""

    def __init__(self, config: GRTConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(d, bias=False)
        self.qkv = linear(d, 3 * d, config.init_std)
        self.out = linear(d, d, config.residual_init_std)
        self.mlp_norm = nn.LayerNorm(d, bias=False)
        self.up = linear(d, config.ffn_size, config.init_std)
        self.down = linear(config.ffn_size, d, config.residual_init_std)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(hidden)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.out(attended)
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))


class Core(nn.Module):
    """One recurrence: state and anchor [B, S, D] -> the next state."""

    def __init__(self, config: GRTConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.config = config
        self.projection = linear(2 * d, d, config.init_std)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.core_blocks))
        self.state_norm = nn.LayerNorm(d, bias=False)
        self.anchor_norm = nn.LayerNorm(d, bias=False)
        self.input_norm = nn.LayerNorm(2 * d, bias=False)
        self.w1 = linear(2 * d, d, config.init_std)
        self.w2 = linear(d, d, config.init_std, bias=True)
        nn.init.constant_(self.w2.bias, config.gate_bias)

    def forward(self, hidden: Tensor, anchor: Tensor) -> Tensor:
        config = self.config
        z = self.input_norm(torch.cat((self.state_norm(hidden), self.anchor_norm(anchor)), dim=-1))
        logits = self.w2(F.silu(self.w1(z))) / config.gate_temperature
        gate = torch.sigmoid(logits + config.gate_noise * torch.randn_like(logits[..., :1]))
        candidate = self.projection(torch.cat((hidden + config.state_noise * torch.randn_like(hidden), anchor), dim=-1))
        for block in self.blocks:
            candidate = block(candidate)
        return gate * hidden + (1 - gate) * candidate


class PlainGRT(nn.Module):
    """GRT, or without core blocks a dense GPT-2."""

    def __init__(self, config: GRTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_positions, config.hidden_size)
        nn.init.normal_(self.tokens.weight, std=config.init_std)
        nn.init.normal_(self.positions.weight, std=config.init_std)
        self.prelude = nn.ModuleList(Block(config) for _ in range(config.prelude_blocks))
        self.core = Core(config) if config.core_blocks else None
        self.coda = nn.ModuleList(Block(config) for _ in range(config.coda_blocks))
        self.final_norm = nn.LayerNorm(config.hidden_size, bias=False)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor, depth: int) -> Tensor:
        """int64 [B, S] twice -> the mean loss."""
        hidden = self.tokens(tokens_BS) + self.positions.weight[: tokens_BS.shape[1]]
        for block in self.prelude:
            hidden = block(hidden)
        if self.core is not None:
            anchor = hidden
            for _ in range(depth):
                hidden = self.core(hidden, anchor)
        for block in self.coda:
            hidden = block(hidden)
        logits_BSV = F.linear(self.final_norm(hidden), self.tokens.weight)
        return F.cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten())
