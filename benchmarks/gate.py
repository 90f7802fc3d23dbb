"""The gate's operators, head and tail of a recurrence, forward and backward: eager, torch.compile, and the fused kernels.

One thread on the CPU. Counted: operators that run (kernels), and the bytes that they read and write for each number of the
state; timed: CPU seconds, medians of interleaved rounds. Eager and compiled draw their noise with torch.randn, as one would
without this project; ours is the counter-based field, and also makes the sums that the hoisted LayerNorm needs. A draw of `ref`, hundreds
of PyTorch's operators, is counted as one.

    python -m benchmarks.gate --tokens 2048 --width 768
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch._inductor.metrics as inductor
from torch import Tensor
from torch._inductor import compile_fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from model.config import GRTConfig
from model.layers import Norm
from model.noise import Noise
from model.ops import fused, reference
from model.ops.build import build

SIGMA, BIAS = 0.1, 4.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# operators that touch no memory
VIEWS = ("view", "expand", "t", "transpose", "unsqueeze", "squeeze", "slice", "select", "detach", "alias", "as_strided", "_unsafe_view")


@dataclass
class Operands:
    """What head and tail read: [T, 1, D], and [D] for weight and bias; and the gradients that come back."""

    hidden: Tensor
    logits: Tensor
    candidate: Tensor
    bias: Tensor
    norm: Norm
    noise: Noise | None
    grads: list[Tensor]

    @classmethod
    def make(cls, tokens: int, width: int, dtype: torch.dtype, device: str = "cpu") -> "Operands":
        rows = [torch.randn(tokens, 1, width, dtype=dtype, device=device) for _ in range(6)]
        noise = Noise(torch.arange(tokens, device=device)[:, None], torch.tensor([1, 1], device=device))
        norm = Norm(width, GRTConfig(hidden_size=width, num_heads=1), dtype).to(device)
        hidden, logits, candidate, bias = (x.requires_grad_() for x in (*rows[:3], torch.zeros_like(rows[0][0, 0])))
        return cls(hidden, logits, candidate, bias, norm, noise, rows[3:])

    @property
    def leaves(self) -> list[Tensor]:
        return [self.hidden, self.logits, self.candidate, self.bias, self.norm.weight]


def plain(
    hidden: Tensor, logits: Tensor, candidate: Tensor, bias: Tensor, weight: Tensor, *, sigma: float = SIGMA
) -> tuple[Tensor, Tensor, Tensor]:
    """Head and tail as one would write them: the normed state, the noisy state, the new state. A sigma of 0 is evaluation."""
    normed = F.layer_norm(hidden, weight.shape, weight, None, 1e-5)
    noisy, tempered = hidden, logits + (bias + BIAS)
    if sigma:
        noisy = hidden + sigma * torch.randn_like(hidden)
        tempered = tempered + sigma * torch.randn_like(logits[..., :1])
    gate = torch.sigmoid(tempered)
    return normed, noisy, gate * hidden + (1 - gate) * candidate


def ours(ops: Any, x: Operands) -> tuple[Tensor, Tensor, Tensor]:
    head = ops.head(x.hidden, x.norm, x.noise, SIGMA)
    options = {"initial_bias": BIAS, "temperature": 1.0, "sigma": SIGMA, "noise_per_token": True}
    updated, _ = ops.tail(x.logits, x.bias, x.hidden, x.candidate, x.noise, **options)
    return head.normed, head.noisy, updated


class TrafficCounter(TorchDispatchMode):
    """Counts operators that touch memory, and the bytes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.bytes = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        if function._opname not in VIEWS and not function._opname.startswith(("empty", "new_empty")):
            self.kernels += 1
            self.bytes += tensor_bytes(arguments) + tensor_bytes(result)
        return result


def tensor_bytes(x: Any) -> int:
    if isinstance(x, Tensor):
        return x.numel() * x.element_size()
    return sum(tensor_bytes(part) for part in x) if isinstance(x, list | tuple) else 0


@dataclass
class Contestant:
    name: str
    forward: Callable[[], Sequence[Tensor]]
    kernels: int = 0
    bytes: int = 0
    seconds: list[float] = field(default_factory=list)

    def run(self, x: Operands) -> None:
        """Forward and backward."""
        outputs = self.forward()
        torch.autograd.grad(outputs, x.leaves, x.grads)

    def count(self, x: Operands) -> None:
        with TrafficCounter() as counter:
            self.run(x)
        self.kernels, self.bytes = counter.kernels, counter.bytes

    def count_generated(self, x: Operands) -> None:
        """By the compiler's own account of what it generates on the first run."""
        inductor.reset()
        compile_fx.inductor_metrics_log.setLevel("INFO")  # it counts bytes only if they are to be logged
        self.run(x)
        self.kernels, self.bytes = inductor.generated_kernel_count, inductor.num_bytes_accessed

    def time(self, x: Operands) -> None:
        start = time.process_time()
        self.run(x)
        self.seconds.append(time.process_time() - start)


def contest(x: Operands, rounds: int) -> list[Contestant]:
    compiled = torch.compile(plain, fullgraph=True)
    leaves = (x.hidden, x.logits, x.candidate, x.bias, x.norm.weight)
    entrants = [
        Contestant("eager", lambda: plain(*leaves)),
        Contestant("torch.compile", lambda: compiled(*leaves)),
        Contestant("ours, `gate_ops: ref`", lambda: ours(reference, x)),
        Contestant("ours, `gate_ops: fused`", lambda: ours(fused, x)),
    ]
    for entrant in entrants:
        entrant.count_generated(x) if entrant.name == "torch.compile" else entrant.count(x)
        entrant.run(x)
    for _ in range(rounds):
        for entrant in entrants:
            entrant.time(x)
    return entrants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch._inductor.config.fallback_random = True  # else the compiled peer draws its noise a number at a time on a CPU
    build()
    assert fused.load()
    print(f"{arguments.tokens} tokens x {arguments.width}, one thread, medians of {arguments.rounds} interleaved rounds.\n")
    print("| dtype | | kernels | bytes / number | ns / number | speed / eager |\n|---|---|--:|--:|--:|--:|")
    for dtype_name, dtype in DTYPES.items():
        torch.manual_seed(0)
        x = Operands.make(arguments.tokens, arguments.width, dtype)
        numbers = x.hidden.numel()
        entrants = contest(x, arguments.rounds)
        eager = median(entrants[0].seconds)
        for entrant in entrants:
            seconds = median(entrant.seconds)
            row = f"{entrant.kernels} | {entrant.bytes / numbers:.0f} | {seconds / numbers * 1e9:.2f} | {eager / seconds:.2f}"
            print(f"| {dtype_name} | {entrant.name} | {row} |")


if __name__ == "__main__":
    main()
