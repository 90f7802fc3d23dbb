"""The fused gate operators: the noise field, gradients, precision, odd shapes and strides, and what the rest of PyTorch asks of operators.

What is exact is written here again in float64 (`exact_head`, `exact_tail`, `exact_normals`), apart from model/ops/reference.py.
Operands are rows [T, B, D], and a weight or bias [D]; what `head` and `tail` compute stands in model/ops/reference.py.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters as dynamo_counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from model.config import GRTConfig
from model.layers import Norm
from model.noise import MAX_RECURRENCE, Noise, Stream, normals, philox4x32
from model.ops import fused, reference
from tests.model.test_noise import GOLDEN, KNOWN_ANSWERS

pytestmark = pytest.mark.usefixtures("fused_operators")

OPS = torch.ops.grt
SIGMA, INITIAL_BIAS, TEMPERATURE = 0.3, 4.0, 0.7
LOW = [torch.float32, torch.bfloat16, torch.float16]


class Operator(NamedTuple):
    """`head` or `tail` in one of its variants."""

    exact: Callable[..., tuple[Tensor, ...]]  # of noise and operands
    run: Callable[..., tuple[Tensor, ...]]  # of the module that computes it, noise and operands
    draw: Callable[[int, int, int, torch.dtype], tuple[list[Tensor], list[Tensor]]]  # operands, and directions for the outputs


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def noise_for(tokens: int, batch: int = 1, *, seed: int = 2**40 + 3, recurrence: int = 5, first: int = 2**33 + 1) -> Noise:
    """[T, B]; each sequence's tokens are consecutive."""
    positions = first + torch.arange(batch * tokens).reshape(batch, tokens).t()
    return Noise(positions, torch.tensor([seed, recurrence]))


def exact_normals(noise: Noise, channels: int, stream: Stream) -> Tensor:
    """float64 [T, B, channels]: Box-Muller of the words of model/noise.py."""
    seed, recurrence = noise.counters.tolist()
    position = noise.positions[..., None]
    high = (position >> 32) | (int(stream) << 16) | (recurrence << 20)
    words = philox4x32((torch.arange(-(-channels // 4)), position & 0xFFFFFFFF, high, torch.tensor(0)), seed)
    uniforms = ((words >> 8) + 1).double() / 2**24
    radius, angle = (-2 * uniforms[0::2].log()).sqrt(), 2 * math.pi * uniforms[1::2]
    pairs = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1)  # [2, T, B, groups, 2]
    return pairs.movedim(0, -2).flatten(-3)[..., :channels]


def exact_head(norm: str, noise: Noise | None, hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    mean = hidden.mean(-1, keepdim=True) if norm == "layernorm" else torch.zeros(1)
    variance = (hidden - mean).square().mean(-1, keepdim=True)
    normed = (hidden - mean) / (variance + 1e-5).sqrt() * weight
    noisy = hidden if noise is None else hidden + SIGMA * exact_normals(noise, hidden.shape[-1], Stream.STATE)
    return normed, noisy, normed.sum(-1, keepdim=True), normed.square().sum(-1, keepdim=True)


def exact_tail(per_token: bool, noise: Noise | None, logits: Tensor, bias: Tensor, hidden: Tensor, candidate: Tensor) -> tuple[Tensor, ...]:
    tempered = (logits + bias + INITIAL_BIAS) / TEMPERATURE
    if noise is not None:
        tempered = tempered + SIGMA * exact_normals(noise, 1 if per_token else hidden.shape[-1], Stream.GATE)
    gate = 1 / (1 + (-tempered).exp())
    return gate * hidden + (1 - gate) * candidate, gate.mean(-1)


def run_head(norm: Any, ops: ModuleType, noise: Noise | None, hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    module = Norm(len(weight), GRTConfig(norm=norm), weight.dtype)
    del module.weight
    module.weight = weight  # type: ignore[assignment]  # an operand like any other, where the model has a parameter
    return tuple(ops.head(hidden, module, noise, SIGMA))


def run_tail(per_token: bool, ops: ModuleType, noise: Noise | None, *operands: Tensor) -> tuple[Tensor, ...]:
    options = {"initial_bias": INITIAL_BIAS, "temperature": TEMPERATURE, "sigma": SIGMA, "noise_per_token": per_token}
    return tuple(ops.tail(*operands, noise, **options))


def draw_head(tokens: int, batch: int, channels: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    hidden, *directions = (draw(tokens, batch, channels, dtype=dtype, seed=seed) for seed in range(3))
    sums = [draw(tokens, batch, 1, dtype=torch.promote_types(dtype, torch.float32), seed=seed) for seed in (3, 4)]
    return [hidden, draw(channels, dtype=dtype, seed=5)], [*directions, *sums]


def draw_tail(tokens: int, batch: int, channels: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """With gates that are open, shut and between; no direction for the gate's mean, which has no gradient."""
    logits, hidden, candidate, direction = (draw(tokens, batch, channels, dtype=dtype, seed=seed) for seed in range(4))
    return [3 * logits - INITIAL_BIAS, draw(channels, dtype=dtype, seed=5), hidden, candidate], [direction]


OPERATORS = {
    **{f"head {norm}": Operator(partial(exact_head, norm), partial(run_head, norm), draw_head) for norm in ("layernorm", "rmsnorm")},
    "tail, noise per token": Operator(partial(exact_tail, True), partial(run_tail, True), draw_tail),
    "tail, noise per element": Operator(partial(exact_tail, False), partial(run_tail, False), draw_tail),
}
each_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)


def results(function: Callable[..., tuple[Tensor, ...]], operands: Sequence[Tensor], directions: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, and the gradients of the operands for as many outputs as there are directions."""
    leaves = [x.detach().requires_grad_() for x in operands]
    outputs = function(*leaves)
    gradients = torch.autograd.grad(outputs[: len(directions)], leaves, directions)
    return [*(x.detach() for x in outputs), *gradients]


def equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


# The noise field


def state_field(noise: Noise, channels: int) -> Tensor:
    """The normals [T, B, channels] that the head adds to a state."""
    hidden = torch.zeros(*noise.positions.shape, channels)
    return OPS.gate_head(hidden, torch.ones(channels), *noise, 1.0, 1e-5, False)[1]


def gate_field(noise: Noise, channels: int) -> Tensor:
    """The sigmoid [T, B, channels] of the normals that the tail adds to logits."""
    zeros = torch.zeros(*noise.positions.shape, channels)
    return OPS.gate_tail(zeros, zeros[0, 0], zeros + 1, zeros, *noise, 0.0, 1.0, 1.0, False)[0]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(counter: list[int], key: int, words: list[int]) -> None:
    signed_key = key - 2**64 if key >= 2**63 else key
    assert OPS.philox(torch.tensor([counter]), signed_key).tolist() == [words]


def test_philox_of_random_counters_equals_that_of_the_model() -> None:
    counters = torch.randint(2**32, (10_000, 4), generator=torch.Generator().manual_seed(1))
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0):
        assert torch.equal(OPS.philox(counters, seed), philox4x32(counters.t(), seed).t())


def test_noise_of_the_state_has_the_golden_values() -> None:
    noise = Noise(torch.tensor([[0], [5], [2**40 + 7]]), torch.tensor([1234, 3]))
    torch.testing.assert_close(state_field(noise, 6)[:, 0], torch.tensor(GOLDEN), rtol=0, atol=2e-6)


@pytest.mark.parametrize("channels", [1, 3, 64, 255, 256, 257, 1000])
@pytest.mark.parametrize(("seed", "recurrence", "first"), [(0, 0, 0), (-1, MAX_RECURRENCE, 2**48 - 64), (2**62 + 9, 7, 2**32 - 30)])
def test_noise_is_the_field_of_the_model(channels: int, seed: int, recurrence: int, first: int) -> None:
    noise = noise_for(64, seed=seed, recurrence=recurrence, first=first)
    found = state_field(noise, channels)
    torch.testing.assert_close(found.double(), exact_normals(noise, channels, Stream.STATE), rtol=0, atol=2e-6)
    torch.testing.assert_close(found, normals(seed, noise.positions, channels, Stream.STATE, recurrence), rtol=0, atol=4e-6)
    gates = torch.sigmoid(exact_normals(noise, channels, Stream.GATE))
    torch.testing.assert_close(gate_field(noise, channels).double(), gates, rtol=0, atol=1e-6)


def test_a_hundred_million_normals_are_normal_and_uncorrelated() -> None:
    """Each mean within 5 standard deviations of what it has to be. The deviations of a summand follow from the moments 1, 3, 15, 105."""
    tokens, channels, slices = 2000, 1000, 50
    sums: dict[str, float] = {}

    def add(name: str, x: Tensor, y: Tensor) -> None:
        sums[name] = sums.get(name, 0.0) + float((x * y).sum(dtype=torch.float64))

    for first in range(0, slices * tokens, tokens):
        noise = noise_for(tokens, first=first)
        x = state_field(noise, channels)[:, 0]
        square, gate, one = x * x, gate_field(noise, channels)[:, 0] - 0.5, torch.ones(())
        add("mean", x, one)
        add("variance", square - 1, one)
        add("skewness", square, x)
        add("kurtosis", square * square - 3, one)
        for lag in (1, 2, 3, 4):
            add(f"channels {lag} apart", x[:, lag:], x[:, :-lag])
        add("squares of channels 1 apart", square[:, 1:] - 1, square[:, :-1] - 1)
        add("tokens 1 apart", x[1:], x[:-1])
        add("recurrences", x, state_field(noise_for(tokens, first=first, recurrence=6), channels)[:, 0])
        add("seeds", x, state_field(noise_for(tokens, first=first, seed=2**40 + 4), channels)[:, 0])
        add("state and gate", x, gate)
        add("gate", gate, gate)
    count = tokens * channels * slices
    gate_deviation = math.sqrt(sums.pop("gate") / count)
    deviations = {
        "variance": 2**0.5,
        "skewness": 15**0.5,
        "kurtosis": 96**0.5,
        "squares of channels 1 apart": 2.0,
        "state and gate": gate_deviation,
    }
    scores = {name: total / deviations.get(name, 1.0) / math.sqrt(count) for name, total in sums.items()}
    assert all(abs(score) < 5 for score in scores.values()), scores
    assert gate_deviation == pytest.approx(0.2083, abs=1e-4)  # of sigmoid(x), x normal


@each_operator
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("dimension", [0, 1], ids=["sequence parallel", "data parallel, micro-batches"])
def test_a_batch_gets_the_same_noise_however_it_is_split(operator: Operator, dimension: int, dtype: torch.dtype) -> None:
    noise, (operands, _) = noise_for(12, 12), operator.draw(12, 12, 37, dtype)
    whole = operator.run(fused, noise, *operands)
    parts = []
    for start, length in ((0, 1), (1, 4), (5, 7)):
        part = Noise(noise.positions.narrow(dimension, start, length), noise.counters)
        rows = [x.narrow(dimension, start, length) if x.dim() == 3 else x for x in operands]
        parts.append(operator.run(fused, part, *rows))
    assert equal([torch.cat(outputs, dim=dimension) for outputs in zip(*parts, strict=True)], whole)


def test_counters_changed_in_place_change_the_noise() -> None:
    """As before a replay of a CUDA graph, which tools/gpu_check.py makes."""
    noise = noise_for(4)
    drawn = {tuple(noise.counters.tolist()): state_field(noise, 8)}
    for index in (0, 1):
        noise.counters[index] += 1
        drawn[tuple(noise.counters.tolist())] = state_field(noise, 8)
    assert not any(torch.equal(a, b) for a in drawn.values() for b in drawn.values() if a is not b)
    for (seed, recurrence), found in drawn.items():
        torch.testing.assert_close(found, normals(seed, noise.positions, 8, Stream.STATE, recurrence), rtol=0, atol=4e-6)


@each_operator
def test_no_number_of_a_tensor_is_read_in_python(operator: Operator) -> None:
    """Fake tensors, which have none, pass forward and backward: compiled code depends on shapes alone."""
    noise, (operands, directions) = noise_for(3, 2), operator.draw(3, 2, 5, torch.bfloat16)
    expected = results(partial(operator.run, fused, noise), operands, directions)
    with FakeTensorMode() as mode:
        noise = Noise(*map(mode.from_tensor, noise))
        found = results(partial(operator.run, fused, noise), [*map(mode.from_tensor, operands)], [*map(mode.from_tensor, directions)])
    assert [(x.dtype, x.shape, x.stride()) for x in found] == [(x.dtype, x.shape, x.stride()) for x in expected]


# Gradients and registration


@each_operator
@pytest.mark.parametrize("noisy", [False, True])
def test_gradients_are_those_of_finite_differences(operator: Operator, noisy: bool) -> None:
    operands, directions = operator.draw(3, 2, 5, torch.float64)
    noise = noise_for(3, 2) if noisy else None

    def differentiable(*operands: Tensor) -> tuple[Tensor, ...]:
        return operator.run(fused, noise, *operands)[: len(directions)]

    assert gradcheck(differentiable, [x.requires_grad_() for x in operands])


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_each_output_of_the_head_may_be_the_only_one_with_a_gradient(norm: str) -> None:
    operands, directions = draw_head(3, 2, 5, torch.float64)
    leaves = [x.requires_grad_() for x in operands]
    for index, direction in enumerate(directions):
        outputs = [run_head(norm, ops, noise_for(3, 2), *leaves)[index] for ops in (fused, reference)]
        found, expected = (torch.autograd.grad(output, leaves, direction, materialize_grads=True) for output in outputs)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@each_operator
def test_each_operand_may_be_the_only_one_that_wants_a_gradient(operator: Operator) -> None:
    operands, directions = operator.draw(3, 2, 5, torch.float64)
    expected = results(partial(operator.run, fused, None), operands, directions)[-len(operands) :]
    for index, gradient in enumerate(expected):
        leaves = [x.clone().requires_grad_(i == index) for i, x in enumerate(operands)]
        outputs = operator.run(fused, None, *leaves)
        loss = torch.stack([(x * direction).sum() for x, direction in zip(outputs, directions, strict=False)]).sum()
        assert equal(torch.autograd.grad(loss, leaves[index]), [gradient])


def test_gate_mean_has_no_gradient() -> None:
    operands, _ = draw_tail(3, 2, 5, torch.float32)
    _, mean = run_tail(True, fused, noise_for(3, 2), *(x.requires_grad_() for x in operands))
    assert not mean.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("noise", [None, noise_for(3, 2)], ids=["without noise", "with noise"])
def test_operators_pass_opcheck(noise: Noise | None, dtype: torch.dtype) -> None:
    """Schema, autograd, fake tensors (static and dynamic shapes) of all but philox, which is never traced."""
    positions, counters = noise or (None, None)
    (hidden, weight), (grad_normed, grad_noisy, grad_total, grad_square) = draw_head(3, 2, 5, dtype)
    mean, rstd = OPS.gate_head(hidden, weight, positions, counters, SIGMA, 1e-5, False)[2:4]
    grads = (grad_normed, grad_noisy if noise else None, grad_total[..., 0], grad_square[..., 0])
    opcheck(OPS.gate_head_backward.default, (*grads, hidden, weight, mean, rstd, False))
    opcheck(OPS.gate_head_backward.default, (None, None, None, None, hidden, weight, mean, rstd, True))
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    opcheck(OPS.gate_head.default, (*leaves, positions, counters, SIGMA, 1e-5, False))
    operands, (grad,) = draw_tail(3, 2, 5, dtype)
    constants = (positions, counters, INITIAL_BIAS, TEMPERATURE, SIGMA, True)
    opcheck(OPS.gate_tail_backward.default, (grad, *operands, *constants))
    opcheck(OPS.gate_tail.default, (*(x.requires_grad_() for x in operands), *constants))


# Precision


@each_operator
@pytest.mark.parametrize("channels", [1, 3, 4, 37, 256, 257, 768, 1000, 2048])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_errors_are_at_most_twice_those_of_plain_operators(operator: Operator, dtype: torch.dtype, channels: int) -> None:
    """Of outputs and gradients, against float64, and up to a few units of fp32. The longest batch has chunks of rows of two sizes."""
    for tokens, batch in [(1, 1), (37, 3), *([(1031, 1)] if channels <= 37 else [])]:
        operands, directions = operator.draw(tokens, batch, channels, dtype)
        for noise in (None, noise_for(tokens, batch)):
            exact = results(partial(operator.exact, noise), [x.double() for x in operands], [x.double() for x in directions])
            plain = results(partial(operator.run, reference, noise), operands, directions)
            found = results(partial(operator.run, fused, noise), operands, directions)
            for x, y, z in zip(exact, plain, found, strict=True):
                assert (z.dtype, z.shape) == (y.dtype, y.shape)
                small = 4 * torch.finfo(torch.float32).eps * max(1.0, float(x.abs().max()))
                if x.shape[-1:] == (1,):
                    small *= channels**0.5  # sums over the channels, in an order that depends on the instruction set
                assert (z - x).abs().max() <= 2 * (y - x).abs().max() + small


@each_operator
@pytest.mark.parametrize("dtype", [torch.float64, *LOW], ids=str)
def test_an_empty_batch_has_empty_results_and_zero_sums(operator: Operator, dtype: torch.dtype) -> None:
    for noise in (None, noise_for(0, 2)):
        operands, directions = operator.draw(0, 2, 37, dtype)
        found, expected = (results(partial(operator.run, ops, noise), operands, directions) for ops in (fused, reference))
        assert [(x.dtype, x.shape) for x in found] == [(x.dtype, x.shape) for x in expected]
        assert equal(found, expected)


SPECIAL = [0.0, -0.0, 1.0, -(2.0**100), 1e-30, math.inf, -math.inf, math.nan]
LOGITS = [0.0, 50.0, -50.0, 1e4, -1e4, math.inf, -math.inf, math.nan]


@each_operator
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_infinities_and_nans_propagate_as_in_plain_operators(operator: Operator, dtype: torch.dtype) -> None:
    """The tail gets every combination; the head a row with each, and a row of nothing else.

    The numbers beside them agree too, but not in bf16, where plain operators round each part of a sum.
    """
    if operator.draw is draw_tail:
        logits, hidden, candidate = torch.cartesian_prod(*(torch.tensor(x, dtype=dtype) for x in (LOGITS, SPECIAL, SPECIAL))).t()[
            :, None, None
        ]
        operands, directions = operator.draw(1, 1, logits.numel(), dtype)
        operands = [logits, operands[1], hidden, candidate]
    else:
        operands, directions = operator.draw(2 * len(SPECIAL), 1, 37, dtype)
        for row, value in enumerate(SPECIAL):
            operands[0][row, 0, row] = value
            operands[0][len(SPECIAL) + row] = value
    found, expected = (results(partial(operator.run, ops, noise_for(len(operands[0]))), operands, directions) for ops in (fused, reference))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.where(~x.isfinite(), 0.0), y.where(~y.isfinite(), 0.0), rtol=0, atol=0, equal_nan=True)
        if dtype != torch.bfloat16:
            torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5, equal_nan=True)


# Strides, shapes, threads

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "batch first": lambda x: x.transpose(0, x.dim() // 2).contiguous().transpose(0, x.dim() // 2),
    "every other channel": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "misaligned": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
}


@each_operator
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_do_not_depend_on_strides(operator: Operator, layout: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    noise = noise_for(6, 4)
    operands, directions = operator.draw(6, 4, 37, dtype)
    expected = results(partial(operator.run, fused, noise), operands, directions)
    noise = Noise(layout(noise.positions.contiguous()), layout(noise.counters))
    found = results(partial(operator.run, fused, noise), [layout(x) for x in operands], [layout(x) for x in directions])
    assert equal(found, expected)


@each_operator
def test_expanded_operands_and_gradients_are_read_as_if_they_were_whole(operator: Operator) -> None:
    noise = noise_for(6, 4)
    operands, directions = operator.draw(6, 4, 37, torch.float32)
    expanded = [x[:1].expand(x.shape) for x in operands]
    ones = [x.new_ones(()).expand(x.shape) for x in directions]  # what sum().backward() sends
    found = results(partial(operator.run, fused, noise), expanded, ones)
    expected = results(partial(operator.run, fused, noise), [x.contiguous() for x in expanded], [x.contiguous() for x in ones])
    assert equal(found, expected)


@each_operator
@pytest.mark.parametrize("shape", [(), (24,), (2, 3, 4)], ids=str)
def test_rows_may_come_in_any_number_of_dimensions(operator: Operator, shape: tuple[int, ...]) -> None:
    tokens = math.prod(shape)
    noise, (operands, directions) = noise_for(tokens), operator.draw(tokens, 1, 37, torch.float32)
    expected = results(partial(operator.run, fused, noise), operands, directions)

    def reshaped(x: Tensor) -> Tensor:
        return x.reshape((*shape, *x.shape[2:])) if x.dim() >= 2 else x

    noise = Noise(reshaped(noise.positions), noise.counters)
    found = results(partial(operator.run, fused, noise), [reshaped(x) for x in operands], [reshaped(x) for x in directions])
    assert equal(found, [reshaped(x) for x in expected])


@each_operator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_do_not_depend_on_the_number_of_threads(operator: Operator, dtype: torch.dtype) -> None:
    operands, directions = operator.draw(1031, 1, 257, dtype)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(results(partial(operator.run, fused, noise_for(1031)), operands, directions))
    finally:
        torch.set_num_threads(before)
    assert equal(found[1], found[0]) and equal(found[2], found[0])


# Checkpointing and torch.compile


def recurrence(norm: Norm, noise: Noise, hidden: Tensor, bias: Tensor) -> Tensor:
    """A core without blocks: head, something that uses all it returns, tail."""
    normed, noisy, total, square = fused.head(hidden, norm, noise, SIGMA)
    logits = normed * (total / (1 + square))
    options = {"initial_bias": 0.0, "temperature": TEMPERATURE, "sigma": SIGMA}
    return fused.tail(logits, bias, hidden, noisy, noise, noise_per_token=False, **options)[0]


def recurrence_operands() -> tuple[Norm, list[Tensor], Tensor]:
    norm = Norm(37, GRTConfig(), torch.float32)
    operands = [draw(6, 4, 37, dtype=torch.float32, seed=0), draw(37, dtype=torch.float32, seed=1)]
    return norm, operands, draw(6, 4, 37, dtype=torch.float32, seed=2)


def test_a_checkpointed_recurrence_draws_its_noise_again() -> None:
    norm, operands, direction = recurrence_operands()
    hidden, bias = (x.requires_grad_() for x in operands)
    found = []
    for way in (recurrence, partial(checkpoint, recurrence, use_reentrant=False)):
        first = way(norm, noise_for(6, 4, recurrence=1), hidden, bias)
        second = way(norm, noise_for(6, 4, recurrence=2), first, bias)
        found.append([first, second, *torch.autograd.grad(second, [hidden, bias, norm.weight], direction)])
    assert equal(*found)


def test_one_compiled_graph_serves_all_counters() -> None:
    """Whole (a break would raise), forward and backward, and equal to what is not compiled."""
    torch._dynamo.reset()
    dynamo_counters.clear()
    norm, operands, direction = recurrence_operands()
    leaves = [*(x.requires_grad_() for x in operands), norm.weight]
    compiled = torch.compile(recurrence, fullgraph=True)
    noises = [noise_for(6, 4, seed=seed, recurrence=recurrence) for seed, recurrence in ((1, 1), (1, 2), (2**40, 2))]
    noises[2].counters[1] += 1
    seen = []
    for noise in noises:
        found, expected = (
            [updated, *torch.autograd.grad(updated, leaves, direction)]
            for updated in (way(norm, noise, *leaves[:2]) for way in (compiled, recurrence))
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        seen.append(found[0])
    assert dynamo_counters["stats"]["unique_graphs"] == 1
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


# Wrong arguments

ROWS, CHANNELS, POSITIONS = torch.zeros(3, 2, 5), torch.zeros(5), torch.arange(6).reshape(3, 2)
NOISE = {"positions": POSITIONS, "counters": torch.tensor([1, 1]), "sigma": SIGMA}
HEAD = {"hidden": ROWS, "weight": CHANNELS, **NOISE, "eps": 1e-5, "rms": False}
TAIL = {
    "logits": ROWS,
    "bias": CHANNELS,
    "hidden": ROWS,
    "candidate": ROWS,
    **NOISE,
    "initial_bias": 0.0,
    "temperature": 1.0,
    "noise_per_token": True,
}
SAVED = {"hidden": ROWS, "weight": CHANNELS, "mean": ROWS[..., 0], "rstd": ROWS[..., 0], "rms": False}
GRADS = {"grad_normed": ROWS, "grad_noisy": ROWS, "grad_total": ROWS[..., 0], "grad_square": ROWS[..., 0]}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "gate_head": HEAD,
    "gate_head_backward": {**GRADS, **SAVED},
    "gate_tail": TAIL,
    "gate_tail_backward": {"grad": ROWS, **TAIL},
}


def wrong(name: str, value: Any, message: str, *operators: str) -> list[Any]:
    return [pytest.param(operator, name, value, message, id=f"{operator}: {message}") for operator in operators]


@pytest.mark.parametrize("operator", ARGUMENTS)
def test_the_arguments_that_are_spoiled_below_are_right(operator: str) -> None:
    getattr(OPS, operator)(**ARGUMENTS[operator])


@pytest.mark.parametrize(
    ("operator", "name", "value", "message"),
    [
        *wrong("hidden", torch.tensor(1.0), r"the state has shape \[\]", *ARGUMENTS),
        *wrong("hidden", ROWS[..., :0], r"the state has shape \[3, 2, 0\]", *ARGUMENTS),
        *wrong("hidden", ROWS.long(), "Long", *ARGUMENTS),
        *wrong("weight", torch.ones(4), r"weight has shape \[4\], the state \[3, 2, 5\]", "gate_head", "gate_head_backward"),
        *wrong("weight", torch.ones(1, 5), r"weight has shape \[1, 5\]", "gate_head", "gate_head_backward"),
        *wrong("weight", torch.ones(5).half(), "weight is Half, the state Float", "gate_head", "gate_head_backward"),
        *wrong("bias", torch.ones(()), r"bias has shape \[\]", "gate_tail", "gate_tail_backward"),
        *wrong("bias", torch.ones(5).bfloat16(), "bias is BFloat16, the state Float", "gate_tail", "gate_tail_backward"),
        *wrong("logits", ROWS[:2], r"logits has shape \[2, 2, 5\], the state \[3, 2, 5\]", "gate_tail", "gate_tail_backward"),
        *wrong("logits", ROWS.double(), "logits is Double, the state Float", "gate_tail", "gate_tail_backward"),
        *wrong("candidate", ROWS[:, :1], r"candidate has shape \[3, 1, 5\]", "gate_tail", "gate_tail_backward"),
        *wrong("grad", ROWS[..., :1], r"grad has shape \[3, 2, 1\]", "gate_tail_backward"),
        *wrong("grad_normed", ROWS.half(), "grad_normed is Half", "gate_head_backward"),
        *wrong("grad_noisy", ROWS[:1], "grad_noisy has shape", "gate_head_backward"),
        *wrong("grad_total", ROWS, r"grad_total is Float \[3, 2, 5\], not Float \[3, 2\]", "gate_head_backward"),
        *wrong("mean", ROWS[0, 0, :1], r"mean is Float \[1\], not Float \[3, 2\]", "gate_head_backward"),
        *wrong("rstd", ROWS[0, 0, :1], r"rstd is Float \[1\], not Float \[3, 2\]", "gate_head_backward"),
        *wrong("rstd", ROWS[..., 0].double(), r"rstd is Double \[3, 2\], not Float", "gate_head_backward"),
        *wrong("positions", POSITIONS.int(), "positions and counters are int64", "gate_head", "gate_tail", "gate_tail_backward"),
        *wrong("positions", POSITIONS[:2], "4 positions for 6 tokens", "gate_head", "gate_tail", "gate_tail_backward"),
        *wrong("counters", None, "noise needs counters", "gate_head", "gate_tail", "gate_tail_backward"),
        *wrong("counters", torch.ones(2), "positions and counters are int64", "gate_head", "gate_tail", "gate_tail_backward"),
        *wrong("counters", torch.tensor(3), r"counters are \(seed, recurrence\), not 1", "gate_head", "gate_tail", "gate_tail_backward"),
    ],
)
def test_a_wrong_argument_is_named(operator: str, name: str, value: Any, message: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        getattr(OPS, operator)(**{**ARGUMENTS[operator], name: value})


@pytest.mark.parametrize("counters", [torch.zeros(4).long(), torch.zeros(2, 3).long(), torch.zeros(2, 4)], ids=str)
def test_philox_wants_rows_of_four_words(counters: Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"counters are int64 \[n, 4\]"):
        OPS.philox(counters, 1)
