"""The parameters that a rank holds, by arithmetic: names, local shapes, and which part of the model owns each.

In the order in which the model makes them, which is ZeRO-3's order. tests/pretrain/test_parameters.py compares with a real model.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

from model.config import GRTConfig


@dataclass(frozen=True)
class Parameter:
    name: str  # as in the model's state dict
    shape: tuple[int, ...]  # of this tensor-parallel rank
    sharded: bool  # over the tensor-parallel ranks, else each has it whole

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def part(self) -> str:
        """Of the model: embedding, prelude, core, coda or final_norm."""
        return self.name.partition(".")[0]


@cache
def rank_parameters(model: GRTConfig, tensor_parallel: int) -> tuple[Parameter, ...]:
    """Those of one tensor-parallel rank, before ZeRO-3 partitions them."""
    return tuple(_parameters(model, tensor_parallel))


def count(parameters: Iterable[Parameter]) -> int:
    """Numbers in all of them."""
    return sum(parameter.numel for parameter in parameters)


def _parameters(model: GRTConfig, ranks: int) -> Iterator[Parameter]:
    d = model.hidden_size
    yield Parameter("embedding.tokens.weight", (model.padded_vocab_size // ranks, d), True)
    if model.position == "learned":
        yield Parameter("embedding.positions.weight", (model.max_positions, d), False)
    for i in range(model.prelude_blocks):
        yield from _block(model, ranks, f"prelude.{i}")
    if model.core_blocks:
        yield Parameter("core.projection.weight", (d, 2 * d), False)
        for i in range(model.core_blocks):
            yield from _block(model, ranks, f"core.blocks.{i}")
        yield Parameter("core.gate.state_norm.weight", (d,), False)
        yield Parameter("core.gate.anchor_norm.weight", (d,), False)
        if model.gate_input_norm:
            yield Parameter("core.gate.input_norm.weight", (2 * d,), False)
        yield Parameter("core.gate.w1.weight", (d, 2 * d), False)
        yield Parameter("core.gate.w2.weight", (d, d), False)
        yield Parameter("core.gate.w2.bias", (d,), False)
    for i in range(model.coda_blocks):
        yield from _block(model, ranks, f"coda.{i}")
    yield Parameter("final_norm.weight", (d,), False)


def _block(model: GRTConfig, ranks: int, name: str) -> Iterator[Parameter]:
    d, kv, f = model.hidden_size, model.kv_heads * model.head_size // ranks, model.ffn_size // ranks
    yield Parameter(f"{name}.attention_norm.weight", (d,), False)
    yield Parameter(f"{name}.attention.q.weight", (d // ranks, d), True)
    yield Parameter(f"{name}.attention.k.weight", (kv, d), True)
    yield Parameter(f"{name}.attention.v.weight", (kv, d), True)
    yield Parameter(f"{name}.attention.out.weight", (d, d // ranks), True)
    yield Parameter(f"{name}.mlp_norm.weight", (d,), False)
    yield Parameter(f"{name}.mlp.up.weight", (f, d), True)
    if model.mlp == "swiglu":
        yield Parameter(f"{name}.mlp.gate.weight", (f, d), True)
    yield Parameter(f"{name}.mlp.down.weight", (d, f), True)
