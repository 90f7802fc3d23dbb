"""Does it hurt that autograd sums the gradients of the R recurrences in bf16?

A weight of the core is used at each of R recurrences; its gradient is a sum of R contributions, each a bf16 tensor. Autograd's sum in bf16
(with the anchor's halves hoisted, and computed at each recurrence) and a sum in fp32 of contributions taken one by one are compared with
the float64 gradient of the same bf16 weights, tokens and noise. What summing alone costs is the distance of the bf16 sum from the exact
sum of the same contributions, and its bias: how much longer it is along the exact sum. To compare: the distance between the gradients of
two batches.

    python -m benchmarks.gradient_precision
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.world import world_of_one
from model.config import ComputeConfig, GRTConfig
from model.core import RecurrentCore
from model.depth import sample_depth
from model.grt import GRT
from model.parallel import layer_config

DEPTHS = (4, 8, 16, 32)
SIZES = GRTConfig(vocab_size=256, hidden_size=256, num_heads=4, max_depth=max(DEPTHS), max_positions=256)
KINDS = {  # of the core's parameters: what is in their names
    "attention": ("attention.",),
    "MLP": ("mlp.",),
    "block norms": ("attention_norm.", "mlp_norm."),
    "projection": ("projection.",),
    "gate matrices": ("w1.weight", "w2.weight"),
    "gate norms and bias": ("state_norm.", "anchor_norm.", "input_norm.", "w2.bias"),
    "whole core": ("",),
}

Gradients = dict[str, Tensor]  # of the core's parameters


def text_batches(size: int, count: int) -> Tensor:
    """Bytes of this repository's Python files, int64 [count, size, length + 1]."""
    folders = ("model", "pretrain", "tokenizer", "tools", "launchers")
    text = b"".join(path.read_bytes() for folder in folders for path in sorted(Path(folder).glob("*.py")))
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - SIZES.max_positions - 1, (count, size, 1), generator=generator)
    return torch.tensor(list(text))[starts + torch.arange(SIZES.max_positions + 1)]


def build(dtype: torch.dtype, compute: ComputeConfig, weights: dict[str, Tensor]) -> GRT:
    model = GRT(SIZES, layer_config(1, dtype), seed=0, compute=compute)
    model.load_state_dict(weights, strict=False)  # Megatron's layers list an empty extra state
    return model


def backward(model: GRT, batch: Tensor, depth: int) -> float:
    """Leaves the gradients of the mean loss in the model; returns the loss."""
    loss, _ = model(batch[:, :-1], batch[:, 1:], depth=depth, sequences_B=torch.arange(len(batch)))
    loss.backward()
    return loss.item()


def trained_weights(steps: int) -> dict[str, Tensor]:
    """Weights after some steps of training in fp32 at random depth, rounded to bf16."""
    model = GRT(SIZES, layer_config(1, torch.float32), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = float("nan")
    for step, batch in enumerate(text_batches(size=2, count=steps)):
        loss = backward(model, batch, sample_depth(SIZES, seed=0, step=step))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if steps:
        print(f"Loss after {steps} steps: {loss:.2f}.")
    return {name: weight.detach().bfloat16() for name, weight in model.named_parameters()}


def summed_by_autograd(model: GRT, batch: Tensor, depth: int) -> Gradients:
    """The core's gradients as training has them."""
    assert model.core is not None
    backward(model, batch, depth)
    return {name: parameter.grad for name, parameter in model.core.named_parameters() if parameter.grad is not None}


class Recurrence(nn.Module):
    """One recurrence as a module, for `functional_call`."""

    def __init__(self, core: RecurrentCore) -> None:
        super().__init__()
        self.core = core
        self.forward = core._compute_recurrence


def contributions(model: GRT, batch: Tensor, depth: int) -> list[Gradients]:
    """The core's gradients, recurrence by recurrence: each is given a copy of the weights. The model must not hoist."""
    assert model.core is not None
    core: Any = model.core  # the method is replaced below
    recurrence = Recurrence(core)
    copies: list[Gradients] = []

    def with_own_weights(*inputs: object) -> tuple[Tensor, Tensor]:
        copies.append({name: parameter.detach().clone().requires_grad_() for name, parameter in core.named_parameters()})
        return functional_call(recurrence, {f"core.{name}": copy for name, copy in copies[-1].items()}, inputs)

    core._recurrence = with_own_weights
    backward(model, batch, depth)
    assert len(copies) == depth
    return [{name: copy.grad for name, copy in weights.items() if copy.grad is not None} for weights in copies]


def total(parts: list[Gradients], dtype: torch.dtype) -> Gradients:
    """The sum, accumulated in `dtype`."""
    sums = {name: torch.zeros_like(part, dtype=dtype) for name, part in parts[0].items()}
    for part in parts:
        for name, gradient in part.items():
            sums[name] += gradient
    return sums


def distance(gradients: Gradients, exact: Gradients, names: list[str]) -> float:
    """Norm of the difference over the norm of `exact`, over the parameters named."""
    difference = sum((gradients[name].double() - exact[name]).square().sum() for name in names)
    return float((difference / sum(exact[name].double().square().sum() for name in names)) ** 0.5)


def bias(gradients: Gradients, exact: Gradients, names: list[str]) -> float:
    """Length along `exact` over the length of `exact`, less 1, over the parameters named."""
    along = sum((gradients[name].double() * exact[name]).sum() for name in names)
    return float(along / sum(exact[name].double().square().sum() for name in names)) - 1


def print_table(weights: dict[str, Tensor], batch: Tensor, other_batch: Tensor) -> None:
    """A row for each depth and kind of parameter, in percent."""
    print("| R | parameters | autograd, hoisted | autograd | fp32 sum | summing in bf16 alone | its bias | another batch |")
    print("|--:|---|--:|--:|--:|--:|--:|--:|")
    direct = ComputeConfig(hoist=False)
    summary = []
    for depth in DEPTHS:
        exact = summed_by_autograd(build(torch.float64, ComputeConfig(hoist=False, checkpointing="recurrence"), weights), batch, depth)
        hoisted, other = (summed_by_autograd(build(torch.bfloat16, ComputeConfig(), weights), b, depth) for b in (batch, other_batch))
        autograd = summed_by_autograd(build(torch.bfloat16, direct, weights), batch, depth)
        parts = contributions(build(torch.bfloat16, direct, weights), batch, depth)
        fp32, faithful = total(parts, torch.float32), total(parts, torch.float64)
        for kind, substrings in KINDS.items():
            names = [name for name in exact if any(substring in name for substring in substrings)]
            pairs = ((hoisted, exact), (autograd, exact), (fp32, exact), (autograd, faithful))
            cells = [f"{100 * distance(of, to, names):.2f}" for of, to in pairs]
            cells += [f"{100 * bias(autograd, faithful, names):+.3f}", f"{100 * distance(other, exact, names):.0f}"]
            print(f"| {depth} | {kind} | {' | '.join(cells)} |", flush=True)
        before, after = (distance(gradients, exact, list(exact)) for gradients in (autograd, fp32))
        summary.append(f"{100 * before:.2f} to {100 * after:.2f} at R = {depth}")
    print(f"\nSumming in fp32 takes the whole core's distance from {', '.join(summary)}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 100], help="training steps before the gradients are compared")
    arguments = parser.parse_args()

    world_of_one()
    torch.set_num_threads(1)
    batches = text_batches(arguments.batch, 2)
    size = f"d {SIZES.hidden_size}, {arguments.batch} x {SIZES.max_positions} tokens"
    print(f"{size}; relative distances of the core's gradients from float64's, in percent.")
    for steps in arguments.steps:
        print(f"\nAfter {steps} training steps.\n")
        print_table(trained_weights(steps), *batches)


if __name__ == "__main__":
    main()
