"""Are the gate operators right on this device? Against the CPU, against float64, against themselves, and inside graphs.

Rows are [T, B, D] as in model/ops/reference.py. What is exact is the plain operators in float64, with noise in float64.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from model.config import GRTConfig
from model.layers import Norm
from model.noise import Noise, Stream, philox4x32
from model.ops import fused, reference
from tools.gpu.runner import Row, Setting

OPS = torch.ops.grt
# Tokens, sequences, width. 257 channels admit no 16-byte access; a row of 8448 takes a block several rounds.
SIZES = [(1, 1, 2048), (37, 3, 257), (5, 1, 8448), (1031, 2, 1000)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def at_most(check: str, what: str, value: float, limit: float) -> Row:
    numbers = {"value": value} if math.isfinite(value) else {}
    return Row(check, f"{what} {value:.2g}", f"<= {limit:g}", value <= limit, numbers)


def philox(setting: Setting) -> Iterator[Row]:
    fused.chosen("fused")
    counters = torch.randint(2**32, (1_000_000, 4), generator=torch.Generator().manual_seed(1))
    for seed in (0, -1, 0x1234_5678_9ABC_DEF0):
        expected = OPS.philox(counters, seed)
        on_device = counters.to(setting.device)
        for name, words in ("fused", OPS.philox(on_device, seed)), ("plain", philox4x32(on_device.t(), seed).t()):
            wrong = int((words.cpu() != expected).sum())
            yield Row(f"Philox words, {name}, seed {seed:x}", f"{wrong} of {words.numel():,} differ", "0", wrong == 0)


def noise_field(setting: Setting) -> Iterator[Row]:
    """Errors are relative to the radius of a number's pair, where that is above 1: the sine of a large radius has its rounding."""
    fused.chosen("fused")
    noise, width = noise_for(2048, 1, "cpu"), 512
    exact = exact_normals(noise, width, Stream.STATE)
    scale = exact.unflatten(-1, (-1, 2)).norm(dim=-1, keepdim=True).clamp(min=1).expand(-1, -1, -1, 2).flatten(-2)
    found = []
    for device in ("cpu", setting.device):
        positions, counters = noise.positions.to(device), noise.counters.to(device)
        zeros = torch.zeros(2048, 1, width, device=device)
        found.append(OPS.gate_head(zeros, zeros[0, 0], positions, counters, 1.0, 1e-5, False)[1].cpu())
    yield at_most("noise", "from float64 at most", float(((found[1] - exact) / scale).abs().max()), 1e-6)
    yield at_most("noise", "from the CPU's at most", float(((found[1] - found[0]) / scale).abs().max()), 1e-6)


def noise_for(tokens: int, batch: int, device: str) -> Noise:
    positions = 2**33 + 1 + torch.arange(batch * tokens, device=device).view(batch, tokens).t()
    return Noise(positions, torch.tensor([2**40 + 3, 5], device=device))


def exact_normals(noise: Noise, channels: int, stream: Stream) -> Tensor:
    """float64 [T, B, channels]."""
    position = noise.positions[..., None]
    high = (position >> 32) | (int(stream) << 16) | (noise.counters[1] << 20)
    group = torch.arange(-(-channels // 4), device=position.device)
    words = philox4x32((group, position & 0xFFFFFFFF, high, torch.zeros_like(position)), noise.counters[0])
    uniforms = ((words >> 8) + 1).double() / 2**24
    radius, angle = (-2 * uniforms[0::2].log()).sqrt(), 2 * math.pi * uniforms[1::2]
    pairs = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1)  # [2, T, B, groups, 2]
    return pairs.movedim(0, -2).flatten(-3)[..., :channels]


def exact_head(hidden: Tensor, norm: Norm, noise: Noise | None, sigma: float) -> reference.Head:
    """In float64: the plain one, with noise in float64."""
    head = reference.head(hidden, norm, None, 0)
    return head if noise is None else head._replace(noisy=hidden + sigma * exact_normals(noise, hidden.shape[-1], Stream.STATE))


def exact_tail(
    logits: Tensor, bias: Tensor, hidden: Tensor, candidate: Tensor, noise: Noise | None, **options: Any
) -> tuple[Tensor, Tensor]:
    if noise is not None:
        normals = exact_normals(noise, 1 if options["noise_per_token"] else hidden.shape[-1], Stream.GATE)
        logits = logits + options["temperature"] * options["sigma"] * normals
    return reference.tail(logits, bias, hidden, candidate, None, **options)


EXACT = SimpleNamespace(head=exact_head, tail=exact_tail)


@dataclass
class Gate:
    """Head and tail with operands of their own, and directions for the gradients. Rows are [T, B, D]."""

    operands: dict[str, Tensor]
    directions: list[Tensor]
    norm: Norm
    noise: Noise | None
    noise_per_token: bool

    @classmethod
    def draw(
        cls, setting: Setting, dtype: torch.dtype, tokens: int, batch: int, width: int, norm: Any = "layernorm", per: str | None = "token"
    ) -> "Gate":
        generator = torch.Generator(setting.device).manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape, generator=generator, device=setting.device).to(dtype)

        operands = {name: normal(tokens, batch, width) for name in ("hidden", "logits", "state", "candidate")}
        operands["logits"] = operands["logits"] * 3 - 4  # gates from 0 to 1
        operands |= {"weight": normal(width), "bias": normal(width)}
        rows, sums = partial(normal, tokens, batch, width), partial(normal, tokens, batch, 1, dtype=torch.float32)
        noise = noise_for(tokens, batch, setting.device) if per else None
        return cls(
            operands, [rows(), rows(), sums(), sums(), rows()], Norm(width, GRTConfig(norm=norm), dtype), noise, per == "token"
        ).ready()

    def ready(self) -> "Gate":
        self.operands = {name: x.detach().requires_grad_() for name, x in self.operands.items()}
        self.norm.weight = self.operands["weight"] = nn.Parameter(self.operands["weight"].detach())
        return self

    def exactly(self, device: str) -> "Gate":
        """The same numbers in float64."""
        norm = Norm(self.norm.weight.numel(), GRTConfig(norm="rmsnorm" if self.norm.rms else "layernorm"), torch.float64)
        operands = {name: x.to(device, torch.float64) for name, x in self.operands.items()}
        noise = None if self.noise is None else Noise(*(x.to(device) for x in self.noise))
        return Gate(operands, [x.to(device, torch.float64) for x in self.directions], norm, noise, self.noise_per_token).ready()

    def forward(self, ops: Any) -> dict[str, Tensor]:
        x = self.operands
        head = ops.head(x["hidden"], self.norm, self.noise, 0.3)
        options = {"initial_bias": 4.0, "temperature": 0.7, "sigma": 0.3, "noise_per_token": self.noise_per_token}
        updated, gate_mean = ops.tail(x["logits"], x["bias"], x["state"], x["candidate"], self.noise, **options)
        return {**head._asdict(), "updated": updated, "gate_mean": gate_mean}

    def backward(self, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        differentiable = list(outputs.values())[: len(self.directions)]
        gradients = torch.autograd.grad(differentiable, list(self.operands.values()), self.directions)
        return {f"gradient of {name}": x for name, x in zip(self.operands, gradients, strict=True)}

    def results(self, ops: Any) -> dict[str, Tensor]:
        outputs = self.forward(ops)
        return {name: x.detach() for name, x in outputs.items()} | self.backward(outputs)


def precision(setting: Setting, dtype_name: str) -> Iterator[Row]:
    """Errors against float64 are at most twice those of the plain operators in the same dtype, plus a few roundings."""
    fused.chosen("fused")
    for tokens, batch, width in SIZES:
        yield errors(setting, dtype_name, tokens, batch, width, exact_device="cpu")
    # In float64 on a CPU this would take minutes.
    yield errors(setting, dtype_name, setting.tokens, 1, setting.width, exact_device=setting.device)


def errors(setting: Setting, dtype_name: str, tokens: int, batch: int, width: int, exact_device: str) -> Row:
    """Of all results, the largest error over what is allowed."""
    dtype = DTYPES[dtype_name]
    shares = {}
    for norm, per in ("layernorm", "token"), ("rmsnorm", "element"), ("layernorm", None):
        gate = Gate.draw(setting, dtype, tokens, batch, width, norm, per)
        exact = {name: x.to(setting.device) for name, x in gate.exactly(exact_device).results(EXACT).items()}
        expected, found = gate.results(reference), gate.results(fused)
        for name, x in exact.items():
            allowed = 2 * largest_error(expected[name], x) + few_roundings(name, dtype, width, x)
            share = largest_error(found[name], x) / allowed
            shares[f"{name}, {norm}, noise {per}"] = math.inf if math.isnan(share) else share
    worst = max(shares, key=lambda name: shares[name])
    return at_most(f"{dtype_name}, {tokens} x {batch} tokens x {width}", f"error / allowed, {worst}:", shares[worst], 1)


def few_roundings(name: str, dtype: torch.dtype, width: int, exact: Tensor) -> float:
    """For results of one token, where the plain operators may be right by luck. Inside, all of them compute in fp32."""
    unit, size = torch.finfo(dtype).eps, float(exact.abs().max())
    if name in ("total", "square"):  # added up in about log2(width) steps, from numbers around 1
        return unit * math.log2(width) * max(width**0.5, size)
    return unit * (4 if dtype == torch.float32 else 1) * max(1.0, size)


def largest_error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).abs().max())


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    return [name for name in a if not torch.equal(a[name], b[name])]


def same(check: str, a: dict[str, Tensor], b: dict[str, Tensor]) -> Row:
    names = differing(a, b)
    return Row(check, f"differ: {', '.join(names)}" if names else "bitwise equal", "equal", not names)


def determinism(setting: Setting) -> Iterator[Row]:
    fused.chosen("fused")
    gate = Gate.draw(setting, torch.bfloat16, setting.tokens, 1, setting.width)
    yield same("two runs", gate.results(fused), gate.results(fused))


def compiled(setting: Setting) -> Iterator[Row]:
    fused.chosen("fused")
    gate = Gate.draw(setting, torch.float32, 64, 1, 512)
    expected = gate.results(fused)
    forward = torch.compile(lambda: gate.forward(fused), fullgraph=True)
    outputs = forward()
    yield same("torch.compile, fullgraph", {name: x.detach() for name, x in outputs.items()} | gate.backward(outputs), expected)


def graph(setting: Setting) -> Iterator[Row]:
    """A CUDA graph of forward and backward, replayed with counters that were changed in place."""
    fused.chosen("fused")
    gate = Gate.draw(setting, torch.bfloat16, 128, 1, setting.width)
    assert gate.noise is not None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # nothing may be initialised while it is captured
        for _ in range(3):
            gate.results(fused)
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        replayed = gate.results(fused)
    before = None
    for recurrence in (5, 6):
        gate.noise.counters[1] = recurrence
        captured.replay()
        found = {name: x.clone() for name, x in replayed.items()}
        yield same(f"CUDA graph, recurrence {recurrence}", found, gate.results(fused))
        if before is not None:
            changed = differing(before, found)
            yield Row("CUDA graph, other noise", f"{len(changed)} results changed", "", "updated" in changed and "noisy" in changed)
        before = found
