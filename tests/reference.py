"""A Gated Recurrent Transformer in plain PyTorch, written from the equations, for tests to compare with.

No Megatron, no fused function, no cache: explicit softmax attention, one loop. It runs in the dtype of the parameters, so that float64
gives a yardstick. Parameters are a flat dict with the training model's names and full (unsharded) shapes.

Shapes: B batch, S sequence, d width, N heads, H head size, V vocabulary.
"""

import math

import torch
from torch import Tensor

from model.config import GRTConfig

Parameters = dict[str, Tensor]


def parameter_shapes(config: GRTConfig) -> dict[str, tuple[int, ...]]:
    """Full shape of every stored parameter of the training model, by name."""
    d, kv, f = config.hidden_size, config.kv_heads * config.head_size, config.ffn_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.tokens.weight": (config.padded_vocab_size, d), "final_norm.weight": (d,)}
    if config.position == "learned":
        shapes["embedding.positions.weight"] = (config.max_positions, d)
    for block in block_names(config):
        shapes |= {
            f"{block}.attention_norm.weight": (d,),
            f"{block}.attention.q.weight": (d, d),
            f"{block}.attention.k.weight": (kv, d),
            f"{block}.attention.v.weight": (kv, d),
            f"{block}.attention.out.weight": (d, d),
            f"{block}.mlp_norm.weight": (d,),
            f"{block}.mlp.up.weight": (f, d),
            f"{block}.mlp.down.weight": (d, f),
        }
        if config.mlp == "swiglu":
            shapes[f"{block}.mlp.gate.weight"] = (f, d)
    if config.core_blocks:
        shapes |= {
            "core.projection.weight": (d, 2 * d),
            "core.gate.state_norm.weight": (d,),
            "core.gate.anchor_norm.weight": (d,),
            "core.gate.w1.weight": (d, 2 * d),
            "core.gate.w2.weight": (d, d),
            "core.gate.w2.bias": (d,),
        }
        if config.gate_input_norm:
            shapes["core.gate.input_norm.weight"] = (2 * d,)
    return shapes


def block_names(config: GRTConfig) -> list[str]:
    """The stored blocks' prefixes: prelude, core, coda."""
    return (
        [f"prelude.{i}" for i in range(config.prelude_blocks)]
        + [f"core.blocks.{i}" for i in range(config.core_blocks)]
        + [f"coda.{i}" for i in range(config.coda_blocks)]
    )


def random_parameters(config: GRTConfig, seed: int, dtype: torch.dtype) -> Parameters:
    """Random values for every parameter, drawn in float64 and cast to `dtype`.

    None is special: norm weights differ from 1, the gate's bias from 0, and matrices keep activations near 1, so that a wrong term shows.
    `core.gate.w2.bias` is, as in training, an offset from `config.gate_bias`.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for name, shape in parameter_shapes(config).items():
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        if "norm" in name:
            value = 1 + 0.2 * value
        elif "embedding" in name:
            value = 0.5 * value
        elif name.endswith(".weight"):
            value = value / math.sqrt(shape[1])
        parameters[name] = value.to(dtype)
    return parameters


def reference_forward(
    parameters: Parameters,
    config: GRTConfig,
    tokens_BS: Tensor,
    depth: int,
    state_noise: list[Tensor] | None = None,
    gate_noise: list[Tensor] | None = None,
    gate_value: float | None = None,
) -> Tensor:
    """Logits `[B, S, vocab_size]` (padding columns cut) after `depth` recurrences.

    Args:
        state_noise: eps_x of each recurrence, already scaled by sigma_x, each `[B, S, d]`.
        gate_noise: eps_g of each recurrence, already scaled by sigma_g, each `[B, S, 1]` or `[B, S, d]`.
        gate_value: a constant to put in the place of g.
    """
    embedding = parameters["embedding.tokens.weight"]
    hidden = embedding[tokens_BS]  # [B, S, d]
    if config.position == "learned":
        hidden = hidden + parameters["embedding.positions.weight"][: tokens_BS.shape[1]]

    for i in range(config.prelude_blocks):
        hidden = _block(parameters, config, f"prelude.{i}", hidden)

    anchor = hidden
    for r in range(depth if config.core_blocks else 0):
        if config.backprop_depth is not None and r == depth - config.backprop_depth > 0:
            hidden = hidden.detach()
        gate = _gate(parameters, config, hidden, anchor, 0.0 if gate_noise is None else gate_noise[r])
        if gate_value is not None:
            gate = torch.full_like(gate, gate_value)
        noisy = hidden if state_noise is None else hidden + state_noise[r]
        candidate = torch.cat([noisy, anchor], dim=-1) @ parameters["core.projection.weight"].T
        for j in range(config.core_blocks):
            candidate = _block(parameters, config, f"core.blocks.{j}", candidate)
        hidden = gate * hidden + (1 - gate) * candidate

    for i in range(config.coda_blocks):
        hidden = _block(parameters, config, f"coda.{i}", hidden)
    return _norm(parameters, config, "final_norm", hidden) @ embedding[: config.vocab_size].T


def _gate(parameters: Parameters, config: GRTConfig, hidden: Tensor, anchor: Tensor, noise: Tensor | float) -> Tensor:
    z = torch.cat(
        [_norm(parameters, config, "core.gate.state_norm", hidden), _norm(parameters, config, "core.gate.anchor_norm", anchor)], dim=-1
    )
    if config.gate_input_norm:
        z = _norm(parameters, config, "core.gate.input_norm", z)
    u = z @ parameters["core.gate.w1.weight"].T
    a = (u * torch.sigmoid(u)) @ parameters["core.gate.w2.weight"].T + parameters["core.gate.w2.bias"] + config.gate_bias
    return torch.sigmoid(a / config.gate_temperature + noise)


def _block(parameters: Parameters, config: GRTConfig, block: str, x: Tensor) -> Tensor:
    x = x + _attention(parameters, config, f"{block}.attention", _norm(parameters, config, f"{block}.attention_norm", x))
    return x + _mlp(parameters, config, f"{block}.mlp", _norm(parameters, config, f"{block}.mlp_norm", x))


def _norm(parameters: Parameters, config: GRTConfig, name: str, x: Tensor) -> Tensor:
    if config.norm == "layernorm":
        x = x - x.mean(dim=-1, keepdim=True)
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + config.norm_eps) * parameters[f"{name}.weight"]


def _mlp(parameters: Parameters, config: GRTConfig, name: str, x: Tensor) -> Tensor:
    up = x @ parameters[f"{name}.up.weight"].T
    if config.mlp == "gelu":
        inner = up * 0.5 * (1 + torch.erf(up / math.sqrt(2)))
    else:
        gate = x @ parameters[f"{name}.gate.weight"].T
        inner = gate * torch.sigmoid(gate) * up
    return inner @ parameters[f"{name}.down.weight"].T


def _attention(parameters: Parameters, config: GRTConfig, name: str, x: Tensor) -> Tensor:
    batch, sequence, _ = x.shape
    q, k, v = (
        (x @ parameters[f"{name}.{part}.weight"].T).view(batch, sequence, -1, config.head_size).transpose(1, 2) for part in ("q", "k", "v")
    )  # [B, N, S, H]; k and v have fewer heads under grouped-query attention
    if config.position == "rope":
        q, k = _rotate(config, q), _rotate(config, k)
    group = config.num_heads // config.kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    scores = q @ k.transpose(-1, -2) / math.sqrt(config.head_size)
    later = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
    out = torch.softmax(scores.masked_fill(later, -math.inf), dim=-1) @ v
    return out.transpose(1, 2).reshape(batch, sequence, -1) @ parameters[f"{name}.out.weight"].T


def _rotate(config: GRTConfig, x: Tensor) -> Tensor:
    """Rotary embedding, half-split: channels i and i + H/2 turn by position * theta^(-2 i / H)."""
    half = config.head_size // 2
    frequency = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequency  # [S, H/2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
