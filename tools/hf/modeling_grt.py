"""A Gated Recurrent Transformer (GRT) for `transformers`: prelude blocks, a core that runs `num_steps` times, coda blocks.

Copied beside the weights and loaded with `trust_remote_code=True`, so it imports nothing of the project that wrote it. For inference and
finetuning: no noise, a fixed depth. Early exit is `model(..., num_steps=k)` or `model.generate(..., num_steps=k)`.

Every executed block has its own key-value cache slot, in the order prelude, coda, core by recurrence, so that no slot depends on the
depth. Shapes: B batch, S sequence, d width, N heads, H head size, V vocabulary.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple

from .configuration_grt import GRTConfig

# transformers 5.24 renamed the cache, from `past_key_values`, in every signature and output.
CACHE_NAME = "cache" if "cache" in inspect.signature(CausalLMOutputWithPast).parameters else "past_key_values"
MASK_ARGUMENTS = inspect.signature(create_causal_mask).parameters

Rotary = tuple[Tensor, Tensor]  # cos and sin, each [B, 1, S, H]


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def make_norm(config: GRTConfig, size: int) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(size, eps=config.norm_eps)
    return nn.LayerNorm(size, eps=config.norm_eps, bias=False)


def rotary_angles(config: GRTConfig, position_ids: Tensor, dtype: torch.dtype) -> Rotary:
    """cos and sin of position / theta^(2 i / H), computed here and not in a buffer: `from_pretrained` does not restore those.

    Rounded as in training: multiplying by the inverse instead moves the angle of position 2000 by 1e-4.
    """
    size = config.hidden_size // config.num_attention_heads
    channels = torch.arange(0, size, 2, device=position_ids.device, dtype=at_least_float32(dtype))
    angle = position_ids[:, None, :, None] / config.rope_theta ** (channels / size)  # [B, 1, S, H/2]
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotary embedding of `x [B, N, S, H]`; channels i and i + H/2 form a pair."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def eager_attention_forward(
    module: "GRTAttention", query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Attention in separate operators, for `attn_implementation="eager"`; the only one that returns weights."""
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=at_least_float32(query.dtype)).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights


class GRTAttention(nn.Module):
    def __init__(self, config: GRTConfig) -> None:
        super().__init__()
        self.config = config
        self.head_size = config.hidden_size // config.num_attention_heads
        # `is_causal`, `num_key_value_groups` and `scaling` are read by the attention functions of transformers.
        self.is_causal = True
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_size**-0.5
        kv_size = config.num_key_value_heads * self.head_size
        self.q = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, *, slot: int, mask: Tensor | None, rotary: Rotary | None, cache: Cache | None, **kwargs: Any) -> Tensor:
        """`x [B, S, d]` to `[B, S, d]`. `slot`: where in the cache the keys and values of this execution of the block are."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for projection in (self.q, self.k, self.v)
        )  # [B, N, S, H]
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        if cache is not None:
            key, value = cache.update(key, value, slot)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, _ = attend(self, query, key, value, mask, scaling=self.scaling, dropout=0.0, **kwargs)  # [B, S, N, H]
        return self.out(output.flatten(2))


class GRTMLP(nn.Module):
    def __init__(self, config: GRTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False) if config.mlp == "swiglu" else None
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))


class GRTBlock(nn.Module):
    """A pre-norm transformer block. `attention` holds what GRTAttention.forward takes."""

    def __init__(self, config: GRTConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, config.hidden_size)
        self.attention = GRTAttention(config)
        self.mlp_norm = make_norm(config, config.hidden_size)
        self.mlp = GRTMLP(config)

    def forward(self, x: Tensor, **attention: Any) -> Tensor:
        x = x + self.attention(self.attention_norm(x), **attention)
        return x + self.mlp(self.mlp_norm(x))


class GRTGate(nn.Module):
    """How much of the old state each channel of each token keeps, from state and anchor."""

    def __init__(self, config: GRTConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.temperature = config.gate_temperature
        self.state_norm = make_norm(config, d)
        self.anchor_norm = make_norm(config, d)
        self.input_norm = make_norm(config, 2 * d) if config.gate_input_norm else nn.Identity()
        self.w1 = nn.Linear(2 * d, d, bias=False)
        self.w2 = nn.Linear(d, d, bias=True)

    def forward(self, state: Tensor, anchor: Tensor) -> Tensor:
        """Gate `[B, S, d]` in (0, 1), in at least float32: near its starting value of 0.98, bfloat16 is too coarse."""
        inputs = self.input_norm(torch.cat([self.state_norm(state), self.anchor_norm(anchor)], dim=-1))
        logits = F.linear(F.silu(self.w1(inputs)), self.w2.weight)
        wide = at_least_float32(logits.dtype)
        return torch.sigmoid((logits.to(wide) + self.w2.bias.to(wide)) / self.temperature)


class GRTCore(nn.Module):
    """The shared blocks, run once a recurrence on the state and the anchor (the prelude's output); the gate blends old and new."""

    def __init__(self, config: GRTConfig) -> None:
        super().__init__()
        self.projection = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.blocks = nn.ModuleList(GRTBlock(config) for _ in range(config.core_blocks))
        self.gate = GRTGate(config)

    def forward(self, state: Tensor, anchor: Tensor, *, first_slot: int, **attention: Any) -> Tensor:
        """One recurrence: `state [B, S, d]` to the next state."""
        gate = self.gate(state, anchor)
        candidate = self.projection(torch.cat([state, anchor], dim=-1))
        for j, block in enumerate(self.blocks):
            candidate = block(candidate, slot=first_slot + j, **attention)
        return (gate * state + (1 - gate) * candidate).to(state.dtype)


class GRTPreTrainedModel(PreTrainedModel):
    config: GRTConfig
    config_class = GRTConfig
    base_model_prefix = "model"
    _no_split_modules = ["GRTBlock", "GRTGate"]
    # Values near 4 are 0.03 apart in bfloat16; the gate's weights need no such care.
    _keep_in_fp32_modules_strict = ["gate.w2.bias"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True


class GRTModel(GRTPreTrainedModel):
    """Token ids to final hidden states."""

    def __init__(self, config: GRTConfig) -> None:
        super().__init__(config)
        d = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, d)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, d) if config.position == "learned" else None
        self.prelude = nn.ModuleList(GRTBlock(config) for _ in range(config.prelude_blocks))
        self.core = GRTCore(config) if config.core_blocks else None
        self.coda = nn.ModuleList(GRTBlock(config) for _ in range(config.coda_blocks))
        self.final_norm = make_norm(config, d)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        num_steps: int | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Final hidden states `[B, S, d]` after `num_steps` recurrences (default `config.max_depth`; 0 skips the core).

        `cache` and `past_key_values` are two names of one argument. Without `position_ids`, positions count the tokens that
        `attention_mask [B, past + S]` marks, so padding on the left does not shift them.

        Raises:
            ValueError: num_steps is not possible, the cache was filled by fewer recurrences, or the sequence is longer than
                `config.max_position_embeddings`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        num_steps = self._checked_steps(num_steps)
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds  # [B, S, d]

        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        past = 0 if cache is None else cache.get_seq_length()
        if cache is not None:
            self._prepare_cache(cache, past, num_steps)

        position_ids = self._checked_positions(position_ids, attention_mask, hidden, past)
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(position_ids)
        attention = {
            "mask": self._causal_mask(hidden, attention_mask, cache, position_ids, past),
            "rotary": rotary_angles(self.config, position_ids, hidden.dtype) if self.config.position == "rope" else None,
            "cache": cache,
            **kwargs,
        }

        first_coda = self.config.prelude_blocks
        first_core = first_coda + self.config.coda_blocks
        for i, block in enumerate(self.prelude):
            hidden = block(hidden, slot=i, **attention)
        anchor = hidden
        if self.core is not None:
            for r in range(num_steps):
                hidden = self.core(hidden, anchor, first_slot=first_core + r * self.config.core_blocks, **attention)
        for i, block in enumerate(self.coda):
            hidden = block(hidden, slot=first_coda + i, **attention)
        cached: dict[str, Any] = {CACHE_NAME: cache}
        return BaseModelOutputWithPast(last_hidden_state=self.final_norm(hidden), **cached)

    def _checked_steps(self, num_steps: int | None) -> int:
        if num_steps is None:
            return self.config.max_depth if self.core is not None else 0
        if num_steps < 0:
            raise ValueError(f"num_steps is {num_steps}; it must be at least 0.")
        if num_steps and self.core is None:
            raise ValueError(f"num_steps is {num_steps}, but this model is dense: it has no core to repeat. Leave num_steps out.")
        return num_steps

    def _prepare_cache(self, cache: Cache, past: int, num_steps: int) -> None:
        """Makes a slot for every block that will be executed, and checks that earlier tokens filled it."""
        slots = self.config.prelude_blocks + self.config.coda_blocks + self.config.core_blocks * num_steps
        if isinstance(cache, DynamicCache):
            cache.layers.extend(DynamicLayer() for _ in range(slots - len(cache.layers)))
            if any(cache.get_seq_length(slot) != past for slot in range(slots)):
                raise ValueError(
                    f"num_steps is {num_steps}, but some of the {past} tokens in the cache went through fewer recurrences. "
                    f"Use at most the depth of the earlier tokens, or start with an empty cache."
                )
        elif len(cache.layers) < slots:
            raise ValueError(
                f"num_steps {num_steps} needs {slots} cache slots, and this {type(cache).__name__} has {len(cache.layers)}. "
                f"Use a DynamicCache, or set config.num_hidden_layers to {slots} before the cache is made."
            )

    def _checked_positions(self, position_ids: Tensor | None, attention_mask: Tensor | None, hidden: Tensor, past: int) -> Tensor:
        """Position ids `[B or 1, S]` of the new tokens."""
        length = hidden.shape[1]
        if position_ids is None and attention_mask is not None and attention_mask.dim() == 2:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        elif position_ids is None:
            position_ids = torch.arange(length, device=hidden.device)[None] + past
        limit = self.config.max_position_embeddings
        # The maximum is only read when it can matter: on a GPU, reading it waits for the device.
        if past + length > limit and (longest := int(position_ids.max()) + 1) > limit:
            raise ValueError(f"The sequence has {longest} tokens; this model takes at most {limit} (max_position_embeddings).")
        return position_ids

    def _causal_mask(
        self, hidden: Tensor, attention_mask: Tensor | None, cache: Cache | None, position_ids: Tensor, past: int
    ) -> Tensor | None:
        arguments = {
            "config": self.config,
            "inputs_embeds": hidden,
            "input_embeds": hidden,  # the name in transformers 5.0
            "attention_mask": attention_mask,
            "cache": cache,
            "past_key_values": cache,
            "position_ids": position_ids,
            "cache_position": torch.arange(hidden.shape[1], device=hidden.device) + past,
        }
        return create_causal_mask(**{name: value for name, value in arguments.items() if name in MASK_ARGUMENTS})


class GRTForCausalLM(GRTPreTrainedModel, GenerationMixin):
    """Token ids to logits; the head is the token embedding."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: GRTConfig) -> None:
        super().__init__(config)
        self.model = GRTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_steps: int | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits `[B, S, V]`, or of the last `logits_to_keep` tokens; with `labels [B, S]` (unshifted, -100 ignored) the mean loss."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_steps=num_steps,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE_NAME: getattr(outputs, CACHE_NAME)})
