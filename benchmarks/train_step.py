"""Speed and memory of a training step: this project's GRT against a plain PyTorch one and a dense GPT-2 with as many blocks executed.

One thread on the CPU, no DeepSpeed, the same optimizer for all, the full depth. Times are CPU seconds, medians of interleaved rounds, so
that whatever else the machine does counts for little and falls on all alike; memory is the allocator's count of a forward and backward
pass, not the process's size.

    python -m benchmarks.train_step --preset small-isoflop --precision bf16
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from benchmarks.allocations import allocations
from benchmarks.plain import PlainGRT
from benchmarks.world import world_of_one
from model.config import PRESETS, ComputeConfig, GRTConfig
from model.grt import GRT
from model.parallel import layer_config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OURS = {
    "GRT, ours, `gate_ops: ref`": ComputeConfig(gate_ops="ref"),
    "GRT, ours, `gate_ops: fused`": ComputeConfig(gate_ops="fused"),
    "GRT, ours, and `compile: recurrence`": ComputeConfig(gate_ops="fused", compile="recurrence"),
    "GRT, ours, leanest (`checkpointing: nested`)": ComputeConfig(gate_ops="fused", checkpointing="nested"),
}


@dataclass
class Contestant:
    """A model and what was measured of it."""

    name: str
    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]  # of tokens and targets, int64 [B, S]
    optimizer: AdamW = field(init=False)
    backward_seconds: list[float] = field(default_factory=list)  # forward and backward
    step_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, tokens_BS: Tensor, targets_BS: Tensor) -> None:
        """One training step, timed."""
        start = time.process_time()
        self.loss(tokens_BS, targets_BS).backward()
        self.backward_seconds.append(time.process_time() - start)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_seconds.append(time.process_time() - start)

    def peak_bytes(self, tokens_BS: Tensor, targets_BS: Tensor) -> tuple[int, int]:
        """The weights, and the most that one forward and backward pass (gradients included) has allocated on top of them."""
        peak, _ = allocations(lambda: self.loss(tokens_BS, targets_BS).backward())
        self.optimizer.zero_grad()
        weights = sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())
        return weights, peak


def dense_peer(config: GRTConfig) -> GRTConfig:
    """The dense transformer that executes as many blocks."""
    return replace(config, prelude_blocks=config.executed_blocks, core_blocks=0, coda_blocks=0, max_depth=0, min_depth=0)


def flop_floor(config: GRTConfig, length: int) -> float:
    """FLOPs of the GRT over those of its dense peer, with the anchor's 4 d^2 of projection and gate computed once."""
    repeated = (config.max_depth - 1) * 4 * config.hidden_size**2
    hoisted = config.forward_flops_per_token(length, config.max_depth) - repeated
    return hoisted / dense_peer(config).forward_flops_per_token(length, 0)


def contestants(config: GRTConfig, dtype: torch.dtype) -> list[Contestant]:
    """Dense, plain, and ours with each of the settings."""

    def plain(name: str, sizes: GRTConfig) -> Contestant:
        model = PlainGRT(sizes).to(dtype)
        return Contestant(name, model, lambda tokens, targets: model(tokens, targets, sizes.max_depth))

    def ours(name: str, compute: ComputeConfig) -> Contestant:
        model = GRT(config, layer_config(1, dtype), seed=0, compute=compute)

        def loss(tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
            return model(tokens_BS, targets_BS, depth=config.max_depth, sequences_B=torch.arange(len(tokens_BS)))[0]

        return Contestant(name, model, loss)

    return [
        plain("dense GPT-2, plain", dense_peer(config)),
        plain("GRT, plain", config),
        *(ours(name, compute) for name, compute in OURS.items()),
    ]


def batch(config: GRTConfig, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Random tokens and targets, int64 [B, S]."""
    drawn = torch.randint(config.vocab_size, (size, length + 1), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def main() -> None:
    presets = [name for name, config in PRESETS.items() if config.core_blocks and config.position == "learned"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=presets, default="small-isoflop")
    parser.add_argument("--precision", choices=list(DTYPES), default="fp32")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step, where speed is measured")
    parser.add_argument("--length", type=int, default=256, help="tokens a sequence there")
    parser.add_argument("--memory-batch", type=int, default=2, help="sequences a step, where memory is counted")
    parser.add_argument("--memory-length", type=int, default=1024, help="tokens a sequence there")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each model, after one that is not")
    arguments = parser.parse_args()

    world_of_one()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = PRESETS[arguments.preset]
    models = contestants(config, DTYPES[arguments.precision])
    tokens_BS, targets_BS = batch(config, arguments.batch, arguments.length)
    for _ in range(1 + arguments.rounds):
        for contestant in models:
            contestant.step(tokens_BS, targets_BS)

    print(
        f"{arguments.preset}, {arguments.precision}, depth {config.max_depth} on one thread. "
        f"Speed: {arguments.batch} x {arguments.length} tokens, medians of {arguments.rounds} interleaved rounds.\n"
    )
    print_speed(models, tokens_BS.numel(), flop_floor(config, arguments.length))
    print(f"\nMemory, counted: {arguments.memory_batch} x {arguments.memory_length} tokens, vocabulary {config.vocab_size}.\n")
    print_memory(models, *batch(config, arguments.memory_batch, arguments.memory_length))


def print_speed(models: list[Contestant], tokens: int, floor: float) -> None:
    """A table; ratios are medians of the rounds' ratios."""
    dense, plain, *_ = models

    def ratio(over: list[float], under: list[float]) -> float:
        return median(a / b for a, b in zip(over, under, strict=True))

    print("| model | forward + backward, tokens/s | speed / plain | time / dense | whole step, tokens/s | speed / plain | time / dense |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for model in models:
        cells = []
        for seconds in ("backward_seconds", "step_seconds"):
            own = getattr(model, seconds)
            cells += [
                f"{tokens / median(own):.0f}",
                f"{ratio(getattr(plain, seconds), own):.3f}",
                f"{ratio(own, getattr(dense, seconds)):.3f}",
            ]
        print(f"| {model.name} | {' | '.join(cells)} |")
    print(f"\nThe GRT has at least {floor:.3f} times the FLOPs of the dense model, which sets the floor of its time against it.")


def print_memory(models: list[Contestant], tokens_BS: Tensor, targets_BS: Tensor) -> None:
    """A table of the peak of a forward and backward pass. The optimizer's state is in none of the numbers."""
    measured = {model.name: model.peak_bytes(tokens_BS, targets_BS) for model in models}
    plain_weights, plain_rest = measured[models[1].name]
    print("| model | peak, GiB | / plain | of it above the weights, GiB | / plain |")
    print("|---|--:|--:|--:|--:|")
    for name, (weights, rest) in measured.items():
        peak, plain_peak = weights + rest, plain_weights + plain_rest
        print(f"| {name} | {peak / 2**30:.3f} | {peak / plain_peak:.3f} | {rest / 2**30:.3f} | {rest / plain_rest:.3f} |")


if __name__ == "__main__":
    main()
