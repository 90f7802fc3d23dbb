"""Configuration of a Gated Recurrent Transformer (GRT) for `transformers`.

Copied beside the weights and loaded with `trust_remote_code=True`, so it imports nothing of the project that wrote it.
"""

from typing import Any

from transformers import PreTrainedConfig


class GRTConfig(PreTrainedConfig):
    """Sizes and switches of a GRT: `prelude_blocks + core_blocks x max_depth + coda_blocks`.

    `max_depth` is the number of recurrences when `forward` or `generate` is not given `num_steps`. A model with `core_blocks` 0 is an
    ordinary dense transformer.
    """

    model_type = "grt"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    def __init__(
        self,
        vocab_size: int = 50304,
        hidden_size: int = 768,
        intermediate_size: int = 3072,
        num_attention_heads: int = 12,
        num_key_value_heads: int = 12,
        prelude_blocks: int = 1,
        core_blocks: int = 1,
        coda_blocks: int = 1,
        max_depth: int = 10,
        max_position_embeddings: int = 1024,
        position: str = "learned",
        rope_theta: float = 10000.0,
        norm: str = "layernorm",
        norm_eps: float = 1e-5,
        mlp: str = "gelu",
        gate_temperature: float = 1.0,
        gate_input_norm: bool = True,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            position: `learned` (absolute) or `rope`.
            norm: `layernorm` (weight only) or `rmsnorm`.
            mlp: `gelu` (exact) or `swiglu`.
            gate_temperature: divides the gate's logits.
            gate_input_norm: whether the gate's two normalised inputs are normalised together once more.
        """
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.prelude_blocks = prelude_blocks
        self.core_blocks = core_blocks
        self.coda_blocks = coda_blocks
        self.max_depth = max_depth
        self.max_position_embeddings = max_position_embeddings
        self.position = position
        self.rope_theta = rope_theta
        self.norm = norm
        self.norm_eps = norm_eps
        self.mlp = mlp
        self.gate_temperature = gate_temperature
        self.gate_input_norm = gate_input_norm
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        super().__init__(**{"tie_word_embeddings": True} | kwargs)
        # What `transformers` allocates cache slots by: one for every block that is executed, not stored.
        self.num_hidden_layers = prelude_blocks + core_blocks * max_depth + coda_blocks
