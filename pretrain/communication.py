"""The collectives of a rank in a micro-step and in an optimizer step, by arithmetic: how many, and how many elements.

Elements are those of the whole tensor: of n ranks, each moves (n - 1) / n of them in an all-gather or a reduce-scatter, and twice that
in an all-reduce. Checked against real ranks in tests/distributed/test_plan.py. Exact for every residency in steps like the one before:
with `every_use` a change of depth costs more, see `pretrain/zero_replay.py`. All-reduces of single numbers are left out.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from model.loss import tokens_per_chunk
from pretrain.memory import WIDE, Layout, keep_last_limit
from pretrain.parameters import Parameter
from pretrain.zero_replay import ZeroSettings, gathers, small


class Kind(NamedTuple):
    group: str  # "data" or "tensor" parallel
    operation: str  # "all-gather", "reduce-scatter" or "all-reduce"


class Traffic(NamedTuple):
    calls: int
    elements: int
    bytes: int

    def plus(self, calls: int, elements: int, size: int) -> "Traffic":
        """With more elements of `size` bytes."""
        return Traffic(self.calls + calls, self.elements + elements, self.bytes + elements * size)


Communication = dict[Kind, Traffic]
NONE = Traffic(0, 0, 0)
GATHER, SCATTER = Kind("data", "all-gather"), Kind("data", "reduce-scatter")
TP_GATHER, TP_SCATTER, TP_REDUCE = Kind("tensor", "all-gather"), Kind("tensor", "reduce-scatter"), Kind("tensor", "all-reduce")


def optimizer_step(layout: Layout, depth: int, settings: ZeroSettings) -> Communication:
    """All micro-steps, and after the update the gathers of small parameters, which stay whole."""
    total: Communication = defaultdict(lambda: NONE, micro_step(layout, depth, settings, first=True))
    for kind, traffic in micro_step(layout, depth, settings, first=False).items():
        total[kind] = Traffic(*(a + (layout.accumulation_steps - 1) * b for a, b in zip(total[kind], traffic, strict=True)))
    if layout.data_parallel > 1:
        kept = small(layout.parameters, settings)
        total[GATHER] = total[GATHER].plus(len(kept), _padded(kept, layout.data_parallel), layout.element)
    return total


def micro_step(layout: Layout, depth: int, settings: ZeroSettings, first: bool) -> Communication:
    """One forward and backward pass: the first of an optimizer step, or a later one."""
    total: Communication = defaultdict(lambda: NONE)
    if layout.data_parallel > 1:
        gathered = gathers(layout.model, layout.tensor_parallel, depth, layout.core_residency, layout.compute.hoist, settings, first)
        total[GATHER] = NONE.plus(gathered.calls, _padded(gathered.parameters, layout.data_parallel), layout.element)
        reduced = _padded(layout.parameters, layout.data_parallel)
        total[SCATTER] = NONE.plus(reductions(layout, settings.reduce_bucket), reduced, layout.element)
    if layout.tensor_parallel > 1:
        _add_tensor_parallel(total, layout, depth)
    return total


def reductions(layout: Layout, bucket: int) -> int:
    """Reduce-scatters of a micro-step: gradients are collected, in the order of the backward pass, until the bucket overflows."""
    calls, collected = 0, 0
    for parameter in _reduction_order(layout.parameters):
        if collected and collected + parameter.numel > bucket:
            calls, collected = calls + 1, 0
        collected += parameter.numel
    return calls + 1


def _reduction_order(parameters: Sequence[Parameter]) -> list[Parameter]:
    """Last module first, so the tied embedding, which waits, at the end; in a leaf matrices before vectors, as the optimizer has them."""
    modules: dict[str, list[Parameter]] = defaultdict(list)
    for parameter in parameters:
        parts = parameter.name.split(".")
        modules["core" if parameter.part == "core" else ".".join(parts[:2])].append(parameter)
    ordered = reversed(modules.values())
    return [p for group in ordered for p in sorted(group, key=lambda p: len(p.shape) != 2)]


def _padded(parameters: Sequence[Parameter], ranks: int) -> int:
    """Elements with what fills the last rank's partition of each."""
    return sum(-(-parameter.numel // ranks) * ranks for parameter in parameters)


def _add_tensor_parallel(total: Communication, layout: Layout, depth: int) -> None:
    passes = _block_passes(layout, depth)
    hidden = layout.tokens * layout.model.hidden_size
    # A block enters tensor parallelism before its attention and its MLP and leaves it after each; embedding and head do one of these.
    entries = 2 * (passes.forward + passes.again) + 1, 2 * passes.backward + 1  # forward, backward: embedding's leave counts as exit
    exits = 2 * (passes.forward + passes.again) - passes.cut_short + 1, 2 * passes.backward + 1
    if layout.splits_sequence:
        total[TP_GATHER] = NONE.plus(entries[0] + exits[1], (entries[0] + exits[1]) * hidden, layout.element)
        total[TP_SCATTER] = NONE.plus(exits[0] + entries[1], (exits[0] + entries[1]) * hidden, layout.element)
        replicated = [p for p in layout.parameters if not p.sharded]
        total[TP_REDUCE] = NONE.plus(len(replicated), sum(p.numel for p in replicated), layout.element)
    else:
        total[TP_REDUCE] = NONE.plus(exits[0] + entries[1], (exits[0] + entries[1]) * hidden, layout.element)
    chunks = -(-layout.tokens // tokens_per_chunk(layout.parameters[0].shape[0]))
    total[TP_REDUCE] = total[TP_REDUCE].plus(2 * chunks, 3 * layout.tokens, WIDE)  # largest logit; sum and target's logit


class _Passes(NamedTuple):
    """How often blocks run in a micro-step."""

    forward: int
    again: int  # computed again in the backward pass
    cut_short: int  # of these, without the last collective: what is needed is there before it
    backward: int


def _block_passes(layout: Layout, depth: int) -> _Passes:
    model, compute = layout.model, layout.compute
    with_gradient = model.recurrences_with_gradient(depth)
    outside, core = model.prelude_blocks + model.coda_blocks, model.core_blocks
    backward = outside + core * with_gradient
    by_block = backward if compute.checkpoints_blocks else 0
    by_recurrence = core * (with_gradient - min(keep_last_limit(layout, depth), with_gradient))
    return _Passes(outside + core * depth, by_block + by_recurrence, by_block, backward)
