"""The shape of a Gated Recurrent Transformer (GRT), and the arithmetic that follows from it.

`GRTConfig` is the single source of every size: layers, tools and the Hugging Face export read it. A dense GPT-2 is a
config without core blocks. Parameter counts and FLOPs are formulas here and are checked against real modules in
`tests/model/test_config.py`.
"""

from dataclasses import dataclass
from typing import Any, Literal

from model.noise import MAX_RECURRENCE

POISSON_LIMIT = 4  # times R: the deepest that the poisson sampler draws
VOCAB_MULTIPLE = 128  # fixed, whatever the tensor-parallel size, so that a checkpoint's shapes do not depend on the layout


@dataclass(frozen=True)
class GRTConfig:
    """Sizes and switches of one GRT, written `prelude_blocks + core_blocks x max_depth + coda_blocks`.

    Raises:
        ValueError: a field is out of range; the message names the field, its value and what is allowed.
    """

    vocab_size: int = 50304  # the tokenizer's own size; storage is padded to `padded_vocab_size`
    hidden_size: int = 768  # d
    num_heads: int = 12
    num_kv_heads: int | None = None  # fewer than num_heads: grouped-query attention; None: as many
    ffn_hidden_size: int | None = None  # None: 4 d for gelu, 8/3 d rounded up to a multiple of 128 for swiglu
    prelude_blocks: int = 1
    core_blocks: int = 1  # 0: a dense transformer
    coda_blocks: int = 1
    max_depth: int = 10  # R: the most recurrences in training, and the default at evaluation
    min_depth: int = 1  # the fewest recurrences in training
    depth_sampler: Literal["uniform", "fixed", "poisson", "stratified"] = "uniform"
    backprop_depth: int | None = None  # gradients go through the last so many recurrences only; None: through all
    max_positions: int = 1024  # the longest sequence
    position: Literal["learned", "rope"] = "learned"
    rope_theta: float = 10000.0
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = 1e-5
    mlp: Literal["gelu", "swiglu"] = "gelu"
    init_std: float = 0.02
    gate_bias: float = 4.0  # g starts at sigmoid(4) = 0.982: the state is nearly copied through
    gate_temperature: float = 1.0  # tau
    gate_input_norm: bool = True  # LN_c over concat[state, anchor]; the published counts need it
    state_noise: float = 0.1  # sigma_x, per element of the state
    gate_noise: float = 0.1  # sigma_g, on the gate's logits
    gate_noise_per: Literal["token", "element"] = "token"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_heads", "max_positions"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        for name in ("prelude_blocks", "core_blocks", "coda_blocks"):
            self._require(getattr(self, name) >= 0, name, "at least 0")
        self._require(self.executed_blocks >= 1, "prelude_blocks", "at least 1 when there is neither core nor coda")
        self._require(self.hidden_size % self.num_heads == 0, "num_heads", f"a divisor of hidden_size {self.hidden_size}")
        self._require(
            1 <= self.kv_heads <= self.num_heads and self.num_heads % self.kv_heads == 0,
            "num_kv_heads",
            f"a divisor of num_heads {self.num_heads}",
        )
        self._require(self.ffn_hidden_size is None or self.ffn_hidden_size >= 1, "ffn_hidden_size", "at least 1, or null for the default")
        if self.core_blocks:
            self._require(self.max_depth >= 1, "max_depth", "at least 1 when there is a core")
            self._require(0 <= self.min_depth <= self.max_depth, "min_depth", f"0 to max_depth {self.max_depth}")
            most = MAX_RECURRENCE * self.max_depth // self.deepest
            self._require(self.deepest <= MAX_RECURRENCE, "max_depth", f"at most {most} with depth_sampler {self.depth_sampler}")
        else:
            self._require(self.max_depth == 0, "max_depth", "0 when core_blocks is 0 (a dense model)")
            self._require(self.min_depth == 0, "min_depth", "0 when core_blocks is 0 (a dense model)")
        self._require(self.backprop_depth is None or self.backprop_depth >= 1, "backprop_depth", "at least 1, or null for all recurrences")
        self._require(self.position == "learned" or self.head_size % 2 == 0, "num_heads", "such that the head size is even (for rope)")
        for name in ("rope_theta", "norm_eps", "init_std", "gate_temperature"):
            self._require(getattr(self, name) > 0, name, "greater than 0")
        for name in ("state_noise", "gate_noise"):
            self._require(getattr(self, name) >= 0, name, "at least 0")
        for name, allowed in (
            ("depth_sampler", ("uniform", "fixed", "poisson", "stratified")),
            ("position", ("learned", "rope")),
            ("norm", ("layernorm", "rmsnorm")),
            ("mlp", ("gelu", "swiglu")),
            ("gate_noise_per", ("token", "element")),
        ):
            self._require(getattr(self, name) in allowed, name, "one of " + ", ".join(allowed))

    def _require(self, condition: bool, name: str, allowed: str) -> None:
        if not condition:
            raise ValueError(f"model.{name} is {getattr(self, name)!r}; it must be {allowed}.")

    def validate_tensor_parallel(self, size: int) -> None:
        """Raises ValueError unless `size` ranks can share every sharded dimension evenly."""
        for name, value in (
            ("num_heads", self.num_heads),
            ("num_kv_heads", self.kv_heads),
            ("ffn_hidden_size", self.ffn_size),
            ("padded vocabulary", self.padded_vocab_size),
        ):
            if value % size:
                raise ValueError(
                    f"parallel.tensor_parallel is {size}, which does not divide the model's {name} ({value}). Choose a common divisor."
                )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return 4 * self.hidden_size if self.mlp == "gelu" else -(-8 * self.hidden_size // 3 // 128) * 128

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def stored_blocks(self) -> int:
        return self.prelude_blocks + self.core_blocks + self.coda_blocks

    @property
    def executed_blocks(self) -> int:
        """Block-steps of one forward pass at `max_depth`: n_eff of the residual-scaled initialisation."""
        return self.prelude_blocks + self.core_blocks * self.max_depth + self.coda_blocks

    @property
    def residual_init_std(self) -> float:
        """Standard deviation of the projections that write to the residual stream."""
        return self.init_std / (2 * self.executed_blocks) ** 0.5

    @property
    def _block_matrix_parameters(self) -> int:
        d = self.hidden_size
        attention = 2 * d * d + 2 * d * self.kv_heads * self.head_size
        return attention + (2 if self.mlp == "gelu" else 3) * d * self.ffn_size

    @property
    def block_parameter_count(self) -> int:
        """Parameters of one block."""
        return self._block_matrix_parameters + 2 * self.hidden_size

    @property
    def core_parameter_count(self) -> int:
        """Parameters of the core: its blocks, W_proj 2 d^2, the gate 3 d^2; b2, LN_x, LN_p 3 d, LN_c 2 d."""
        if not self.core_blocks:
            return 0
        d = self.hidden_size
        return self.core_blocks * self.block_parameter_count + 5 * d * d + 3 * d + (2 * d if self.gate_input_norm else 0)

    @property
    def parameter_count(self) -> int:
        """Parameters stored, the tied head once, without vocabulary padding."""
        d = self.hidden_size
        count = (self.prelude_blocks + self.coda_blocks) * self.block_parameter_count + self.core_parameter_count + self.vocab_size * d + d
        return count + (self.max_positions * d if self.position == "learned" else 0)

    @property
    def deepest(self) -> int:
        """The largest depth that training samples."""
        return POISSON_LIMIT * self.max_depth if self.depth_sampler == "poisson" else self.max_depth

    def recurrences_with_gradient(self, depth: int) -> int:
        """Of `depth` recurrences, those at the end that gradients go through."""
        return depth if self.backprop_depth is None else min(depth, self.backprop_depth)

    def forward_flops_per_token(self, sequence_length: int, depth: int) -> int:
        """Floating-point operations of one token's forward pass, by the nominal convention: full (not causal) attention, 10 d^2 a
        recurrence for projection and gate, 2 V d for the head. Training costs three times this; recomputation is not counted."""
        d = self.hidden_size
        blocks = self.prelude_blocks + self.core_blocks * depth + self.coda_blocks
        block = 2 * self._block_matrix_parameters + 4 * sequence_length * d
        return blocks * block + (depth * 10 * d * d if self.core_blocks else 0) + 2 * self.vocab_size * d


@dataclass(frozen=True)
class ComputeConfig:
    """How the same arithmetic is run: speed and memory, not the mathematics. Free to change at a resume.

    Checkpointing keeps less in the forward pass and computes it again in the backward pass:
    `recurrence` keeps the state before each recurrence; `block` the input of each block (and what projection and gate need);
    `nested` the state before each recurrence and, while one is computed again, the input of its blocks. Prelude and coda are
    checkpointed by block in the last two.

    Raises:
        ValueError: a field is out of range, or two contradict each other.
    """

    checkpointing: Literal["none", "recurrence", "block", "nested"] = "none"
    keep_last: int = 0  # recurrences at the end of each loop that are not checkpointed (with `recurrence` or `nested`)
    activation_budget_gib: float | None = None  # of one micro-batch's activations on one rank: keep_last follows from it
    hoist: bool = True  # compute what projection and gate make of the anchor once, not at each recurrence
    compile: Literal["none", "recurrence"] = "none"  # torch.compile of one recurrence
    gate_ops: Literal["auto", "ref", "fused"] = "auto"  # the gate's operators: fused kernels (auto: where they are built) or plain PyTorch
    deterministic: bool = False  # the same bits in each run of one layout on GPUs, at a price; CPUs give them anyway

    def __post_init__(self) -> None:
        if self.keep_last < 0:
            raise ValueError(f"compute.keep_last is {self.keep_last}; it must be at least 0.")
        budget = self.activation_budget_gib
        if budget is not None and budget <= 0:
            raise ValueError(f"compute.activation_budget_gib is {budget}; it must be above 0, or null.")
        if self.keep_last and budget is not None:
            raise ValueError("compute.keep_last and compute.activation_budget_gib both say how much to keep; set one of them.")
        if (self.keep_last or budget is not None) and self.checkpointing not in ("recurrence", "nested"):
            raise ValueError(
                f"compute.{'keep_last' if self.keep_last else 'activation_budget_gib'} needs compute.checkpointing recurrence or nested; "
                f"it is {self.checkpointing}."
            )

    @property
    def checkpoints_blocks(self) -> bool:
        return self.checkpointing in ("block", "nested")


def _grt(layout: tuple[int, int, int, int], d: int, heads: int, **other: Any) -> GRTConfig:
    prelude, core, depth, coda = layout
    return GRTConfig(
        hidden_size=d,
        num_heads=heads,
        prelude_blocks=prelude,
        core_blocks=core,
        max_depth=depth,
        min_depth=min(1, depth),
        coda_blocks=coda,
        **other,
    )


PRESETS: dict[str, GRTConfig] = {
    "small-isoflop": _grt((1, 1, 10, 1), 768, 12),
    "medium-isoflop": _grt((2, 5, 4, 2), 1024, 16),
    "large-isoflop": _grt((1, 5, 6, 5), 1280, 20),
    "small-isoparam": _grt((1, 10, 10, 1), 768, 12),
    "medium-isoparam": _grt((2, 20, 4, 2), 1024, 16),
    "large-isoparam": _grt((3, 30, 6, 3), 1280, 20),
    "dense-small": _grt((12, 0, 0, 0), 768, 12),
    "dense-medium": _grt((24, 0, 0, 0), 1024, 16),
    "dense-large": _grt((36, 0, 0, 0), 1280, 20),
    "grt-1b": _grt((2, 20, 4, 2), 2048, 16, position="rope", max_positions=2048),
    "grt-1b-isoflop": _grt((2, 5, 4, 2), 2048, 16, position="rope", max_positions=2048),
}
