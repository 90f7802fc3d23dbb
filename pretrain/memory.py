"""How much memory a rank needs under ZeRO-3, by arithmetic alone: nothing here builds a model.

Activations are counted from what autograd keeps for each operation; the most that is alive at once comes from walking back over
them as the backward pass does. Checked against real engines in tests/distributed/test_plan.py.

Abbreviations: T tokens of a micro-batch, D hidden size, F width of the MLP, e bytes of a number in the compute dtype.
"""

from dataclasses import dataclass, replace
from typing import Literal

from model.config import ComputeConfig, GRTConfig
from model.loss import rows_per_slice, tokens_per_chunk
from pretrain.config import RunConfig
from pretrain.parameters import Parameter, count, rank_parameters

Residency = Literal["step", "fwd_bwd", "loop", "every_use"]
GIB = 2**30
MARGIN = 1.05  # activations are planned with so much room: for sums of single tokens and the kernels' scratch, which are not counted
SUB_GROUP = 10**9  # elements that DeepSpeed updates at once
HEADROOM = 0.92  # of a device's memory that a plan fills: the rest is for the CUDA context, NCCL's buffers and fragmentation
WIDE = 4  # bytes of the gate's, the loss's and the optimizer's fp32


@dataclass(frozen=True)
class Layout:
    """What the arithmetic depends on: a model, how it is computed, and how it is spread over ranks."""

    model: GRTConfig
    compute: ComputeConfig
    precision: Literal["bf16", "fp32"]
    sequence_length: int
    micro_batch_size: int = 1
    tensor_parallel: int = 1
    splits_sequence: bool = False
    data_parallel: int = 1
    accumulation_steps: int = 1
    core_residency: Literal["auto", "step", "fwd_bwd", "loop", "every_use"] = "step"
    composite_rms_norm: bool = False  # on a CPU torch puts RMSNorm together from operations that keep more

    @classmethod
    def of(cls, config: RunConfig, data_parallel: int, on_cpu: bool = False) -> "Layout":
        parallel = config.parallel
        return cls(
            model=config.model,
            compute=config.compute,
            precision=config.optim.precision,
            sequence_length=config.data.sequence_length,
            micro_batch_size=parallel.micro_batch_size,
            tensor_parallel=parallel.tensor_parallel,
            splits_sequence=parallel.splits_sequence,
            data_parallel=data_parallel,
            accumulation_steps=config.accumulation_steps(data_parallel),
            core_residency=parallel.core_residency,
            composite_rms_norm=on_cpu,
        )

    @property
    def element(self) -> int:
        """e."""
        return 2 if self.precision == "bf16" else 4

    @property
    def tokens(self) -> int:
        """T."""
        return self.micro_batch_size * self.sequence_length

    @property
    def state(self) -> int:
        """Bytes of a tensor [T, D] of this rank's own tokens."""
        return self._own_tokens * self.model.hidden_size * self.element

    @property
    def wide_state(self) -> int:
        """The same in fp32."""
        return self._own_tokens * self.model.hidden_size * WIDE

    @property
    def norm_statistics(self) -> int:
        """Bytes of a norm's mean and deviation of each token."""
        return 2 * self._own_tokens * self.element

    @property
    def whole_state(self) -> int:
        """Bytes of a tensor [T, D] of the whole tensor-parallel group's tokens."""
        return self.tokens * self.model.hidden_size * self.element

    @property
    def _own_tokens(self) -> int:
        return self.tokens // self.tensor_parallel if self.splits_sequence else self.tokens

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return rank_parameters(self.model, self.tensor_parallel)


@dataclass(frozen=True)
class Stretch:
    """A stretch of the backward pass, in bytes."""

    name: str
    before: int  # what it first makes again
    working: int  # what is alive in it at the most, besides
    after: int  # what it leaves (gradients that wait) less what it frees


@dataclass(frozen=True)
class Activations:
    """Of one micro-batch on one rank, in bytes."""

    kept: int  # from the forward pass to the backward pass
    peak: int  # the most at once, with the gradients that pass through
    peak_at: str  # the stretch of the backward pass with the peak


def block_inside(layout: Layout) -> int:
    """Kept by a block besides its input."""
    model, ranks = layout.model, layout.tensor_parallel
    inputs = 2 * layout.whole_state  # of q, k, v and of the MLP, behind their norms
    second_norm = layout.state + 2 * layout.norm_statistics
    queries = 2 * layout.whole_state // ranks  # and the attention's output
    keys = 2 * layout.whole_state * model.kv_heads // model.num_heads // ranks  # and values
    sums = layout.tokens * model.num_heads // ranks * WIDE  # the softmax's logarithms
    ffn = _ffn_state(layout) * (2 if model.mlp == "gelu" else 4)
    return inputs + second_norm + queries + keys + sums + ffn + 2 * _norm_extra(layout, input_kept=False)


def _ffn_state(layout: Layout) -> int:
    return layout.tokens * layout.model.ffn_size // layout.tensor_parallel * layout.element


def _block_working(layout: Layout) -> int:
    """Where the MLP's activation goes back: gradients before and after it, the block's own, and one weight's."""
    model = layout.model
    own = layout.state + (layout.whole_state if layout.tensor_parallel > 1 else 0)
    weight = model.ffn_size * model.hidden_size // layout.tensor_parallel * layout.element
    return own + _ffn_state(layout) * (1 if model.mlp == "gelu" else 2) + weight


def _norm_extra(layout: Layout, input_kept: bool) -> int:
    """What RMSNorm keeps more than LayerNorm where it is composite: its input and the quotient in fp32, for its input."""
    if layout.model.norm != "rmsnorm" or not layout.composite_rms_norm:
        return 0
    if layout.precision == "fp32":
        return layout.state
    return 2 * layout.wide_state - (0 if input_kept else layout.state)


def _block(layout: Layout, name: str, recomputed: bool) -> tuple[int, Stretch]:
    """What a block keeps, and its backward pass."""
    inside, working = block_inside(layout), _block_working(layout)
    kept = layout.state if recomputed else layout.state + inside
    return kept, Stretch(name, inside if recomputed else 0, working, -layout.state - inside)


def _recurrence(layout: Layout) -> tuple[int, list[Stretch]]:
    """What a recurrence keeps when it is not checkpointed as a whole, and its backward pass."""
    model, state, wide = layout.model, layout.state, layout.wide_state
    fused = layout.compute.gate_ops == "fused"  # auto is planned as ref, which keeps more
    norm = 0 if fused else _norm_extra(layout, input_kept=True)
    if layout.compute.hoist:
        gate = 3 * state + norm + (state if model.gate_input_norm else 0)  # normed; W1's product, scaled; SiLU
        projection = state if model.state_noise else 0
    else:
        gate = 4 * state + norm + _norm_extra(layout, True) + ((2 * state + 2 * _norm_extra(layout, False)) if model.gate_input_norm else 0)
        projection = 2 * state
    if fused:
        blend = 2 * state  # logits, candidate
        logits_gradient, working = state, 3 * state
    else:
        blend = 2 * wide + state  # g, 1 - g, candidate
        logits_gradient, working = wide, 3 * wide + state
    # Gradients of logits, state and candidate are left.
    stretches = [Stretch("blend", 0, working, logits_gradient + 2 * state - blend)]
    kept = state + gate + projection + blend
    for i in reversed(range(model.core_blocks)):
        block_kept, stretch = _block(layout, f"core.blocks.{i}", layout.compute.checkpoints_blocks)
        kept += block_kept
        stretches.append(stretch)
    stretches.append(Stretch("projection", 0, 2 * state, -projection - state))
    stretches.append(Stretch("gate", 0, 2 * state if fused else 2 * wide + state, -gate - logits_gradient - state))
    return kept, stretches


def keep_last_limit(layout: Layout, depth: int) -> int:
    """Recurrences, at the end of the loop, of `depth` that are not checkpointed as a whole."""
    if layout.compute.checkpointing in ("recurrence", "nested"):
        return min(layout.compute.keep_last, depth)
    return depth


def _backward(layout: Layout, depth: int) -> tuple[int, list[Stretch]]:
    """What the forward pass keeps, and the whole backward pass."""
    model, state = layout.model, layout.state
    blocks = layout.compute.checkpoints_blocks
    kept = state + _norm_extra(layout, False)  # of the final norm
    stretches = [_loss(layout), Stretch("final_norm", 0, 2 * state, -kept)]
    for i in reversed(range(model.coda_blocks)):
        block_kept, stretch = _block(layout, f"coda.{i}", blocks)
        kept += block_kept
        stretches.append(stretch)
    if model.core_blocks:
        core_kept, core = _core(layout, depth)
        kept += core_kept
        stretches += core
    for i in reversed(range(model.prelude_blocks)):
        block_kept, stretch = _block(layout, f"prelude.{i}", blocks)
        kept += block_kept
        stretches.append(stretch)
    tied = _tied_gradient(layout)
    stretches.append(Stretch("embedding", 0, tied + state, -tied))
    if model.position == "rope":
        kept += 2 * layout.tokens * model.head_size * layout.element
    return kept, stretches


def _core(layout: Layout, depth: int) -> tuple[int, list[Stretch]]:
    model, state = layout.model, layout.state
    with_gradient = model.recurrences_with_gradient(depth)
    whole = min(keep_last_limit(layout, depth), with_gradient)  # kept whole
    gradients = sum(p.numel for p in layout.parameters if p.part == "core") * layout.element
    recurrence_kept, recurrence = _recurrence(layout)
    kept, hoisted = 0, 0
    if layout.compute.hoist and depth:
        folded = 2 * model.hidden_size**2 * layout.element if model.gate_input_norm else 0
        hoisted = folded + state + _norm_extra(layout, True) + (2 * state if whole < with_gradient else 0)
        kept += hoisted
    stretches: list[Stretch] = []
    for r in range(with_gradient, 0, -1):
        if with_gradient - r < whole:
            kept += recurrence_kept
            stretches += recurrence
        else:
            kept += state
            stretches.append(Stretch("recomputed recurrence", recurrence_kept - state, 0, 0))
            stretches += recurrence
        if r == with_gradient:  # from here to the loop's beginning: gradients of the weights, and of what is made of the anchor
            stretches.append(Stretch("core gradients", 0, gradients + 2 * state, gradients + 2 * state))
    stretches.append(Stretch("anchor", 0, 0, -hoisted - (gradients + 2 * state if with_gradient else 0)))
    return kept, stretches


def _tied_gradient(layout: Layout) -> int:
    """The tied embedding's gradient: made with the loss, it waits for the embedding's own."""
    return layout.parameters[0].numel * layout.element


def _loss(layout: Layout) -> Stretch:
    """A chunk of logits, a slice of it in fp32, and both gradients."""
    columns = layout.parameters[0].shape[0]
    tokens = min(tokens_per_chunk(columns), layout.tokens)
    logits = columns * (tokens * layout.element + min(rows_per_slice(columns), tokens) * WIDE)
    tied = _tied_gradient(layout)
    if layout.precision == "bf16" and layout.tokens > tokens:
        tied = 2 * tied + max(tied - logits, 0)  # the sum over chunks in fp32; rounded when the logits are gone
    forward = 2 * layout.whole_state + logits + tied  # with the hidden states and their gradients
    backward = 2 * layout.whole_state + _tied_gradient(layout)
    return Stretch("loss", 0, max(forward, backward), _tied_gradient(layout))


def activations(layout: Layout, depth: int) -> Activations:
    """Of one micro-batch at `depth`."""
    kept, stretches = _backward(layout, depth)
    alive, peak, peak_at = kept, 0, ""
    for stretch in stretches:
        within = alive + stretch.before + stretch.working
        if within > peak:
            peak, peak_at = within, stretch.name
        alive += stretch.before + stretch.after
    return Activations(kept, peak, peak_at)


@dataclass(frozen=True)
class Memory:
    """Of one rank, in bytes, by kind."""

    weights: int  # ZeRO-3's partitions in the compute dtype
    optimizer: int  # fp32 master weights, and Adam's two moments
    gradients: int  # fp32 partitions
    bucket: int  # gradients on their way to the partitions' owners
    gathered: int  # weights that are whole during a micro-step
    activations: Activations

    @property
    def resident(self) -> int:
        """What is always there."""
        return self.weights + self.optimizer + self.gradients + self.bucket

    @property
    def total(self) -> int:
        """The most at once: in a micro-step, or in the optimizer step, which copies the gradients of a group of parameters."""
        return self.resident + max(self.gathered + self.activations.peak, min(self.gradients, WIDE * SUB_GROUP))


def memory(layout: Layout, depth: int, reduce_bucket: int) -> Memory:
    """Of a rank at `depth`; `reduce_bucket` is DeepSpeed's setting, in elements."""
    partition = sum(-(-parameter.numel // layout.data_parallel) for parameter in layout.parameters)
    return Memory(
        weights=partition * layout.element,
        optimizer=3 * partition * WIDE,
        gradients=partition * WIDE,
        bucket=reduce_bucket * layout.element,
        gathered=0 if layout.data_parallel == 1 else gathered_elements(layout) * layout.element,  # one rank's partition is the whole
        activations=activations(layout, depth),
    )


def gathered_elements(layout: Layout) -> int:
    """Elements of the weights that are whole at once in a micro-step.

    With `step` and `fwd_bwd` nothing is freed between a module's forward and its backward; with `loop` it is. With `every_use`, too, but in
    the backward pass deepspeed 0.19.8 frees what a module with several uses has gathered after the first of them only.
    """
    parameters = layout.parameters
    if layout.core_residency in ("step", "fwd_bwd", "auto"):
        return count(parameters)
    blocks = [count([p for p in parameters if p.name.startswith(f"{name}.")]) for name in ("prelude.0", "coda.0", "core.blocks.0")]
    held = max(blocks) * (1 if layout.core_residency == "loop" else 2)
    return count(p for p in parameters if p.part == "core") + held + parameters[0].numel


def keep_last_for_budget(layout: Layout, budget_gib: float) -> int:
    """The most recurrences, at the end of the loop, that need no checkpoint for activations to stay within the budget at any depth.

    The last one is free: it goes back first, so to keep it takes no more than to compute it again.

    Raises:
        ValueError: the budget is too small even with every recurrence checkpointed.
    """
    depth = layout.model.deepest
    for keep in range(depth, -1, -1):
        compute = replace(layout.compute, keep_last=keep, activation_budget_gib=None)
        found = activations(replace(layout, compute=compute), depth).peak * MARGIN
        if found <= budget_gib * GIB:
            return keep
    raise ValueError(
        f"compute.activation_budget_gib is {budget_gib}, but activations need {found / GIB:.3g} GiB at depth {depth} even "
        f"with every recurrence checkpointed ({layout.compute.checkpointing}). Raise it, lower parallel.micro_batch_size, or "
        "choose checkpointing nested."
    )


def settle(config: RunConfig, data_parallel: int, device_bytes: int, reduce_bucket: int, stage: int) -> RunConfig:
    """The run with definite settings in the place of residency `auto` and of an activation budget.

    Below ZeRO stage 3, of which the rest of the memory plan is, nothing is ever freed, which is residency `step`.

    Raises:
        ValueError: the budget is too small.
    """
    budget = config.compute.activation_budget_gib
    if budget is not None:
        keep = keep_last_for_budget(Layout.of(config, data_parallel), budget)
        config = replace(config, compute=replace(config.compute, keep_last=keep, activation_budget_gib=None))
    if config.parallel.core_residency == "auto":
        residency = choose_residency(Layout.of(config, data_parallel), device_bytes, reduce_bucket) if stage == 3 else "step"
        config = replace(config, parallel=replace(config.parallel, core_residency=residency))
    return config


def choose_residency(layout: Layout, device_bytes: int, reduce_bucket: int) -> Residency:
    """The residency for `auto`: the first of step, fwd_bwd and loop that fits the device; loop if none does."""
    residencies: tuple[Residency, ...] = ("step", "fwd_bwd")
    for residency in residencies:
        if fits(memory(replace(layout, core_residency=residency), layout.model.deepest, reduce_bucket), device_bytes):
            return residency
    return "loop"


def fits(needed: Memory, device_bytes: int) -> bool:
    return needed.total <= device_bytes * HEADROOM
