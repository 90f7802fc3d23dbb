"""How fast are the gate operators? Each kernel against copying, head and tail against eager and compiled ones, and launches.

On a CPU the same code runs with another clock, for tests.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.gate import SIGMA, Operands, ours, plain
from model.ops import fused, reference
from tools.gpu.operators import OPS, Gate
from tools.gpu.runner import Row, Setting


def cold_seconds(function: Callable[[], object], setting: Setting) -> float:
    """Median time on the device of one call, from caches that hold none of its data."""
    for _ in range(3):
        function()
    if not setting.on_gpu:
        return median(seconds_a_call(function, replace(setting, repeats=1)) for _ in range(setting.repeats))
    flush = torch.empty(setting.flush_bytes, dtype=torch.int8, device=setting.device)
    times = []
    for _ in range(setting.repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()  # long enough for the call to be queued up behind it
        start.record()
        function()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in times) / 1e3


def seconds_a_call(function: Callable[[], object], setting: Setting) -> float:
    """Of calls in a row, with all that a caller waits for."""
    function()
    setting.synchronize()
    start = time.perf_counter()
    for _ in range(setting.repeats):
        function()
    setting.synchronize()
    return (time.perf_counter() - start) / setting.repeats


def launches(function: Callable[[], object], setting: Setting) -> int:
    """Kernels, copies and fills on the GPU of one call; operators where there is none."""
    function()
    setting.synchronize()
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA] if setting.on_gpu else [kinds.CPU]) as profile:
        function()
        setting.synchronize()
    counted = ("kernel", "gpu_memcpy", "gpu_memset") if setting.on_gpu else ("cpu_op",)
    events = [(event.activity_type, event.name) for event in profile.events()]
    print(events)  # to the log
    return sum(kind in counted for kind, _ in events)


def bandwidth(setting: Setting) -> Iterator[Row]:
    """Bytes that a kernel cannot avoid, over its time. Backward passes include the sum over the rows' partial sums."""
    numbers = setting.tokens * setting.width
    source = torch.randn(4 * numbers, device=setting.device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copying = 2 * source.numel() * 2 / cold_seconds(lambda: target.copy_(source), setting)
    yield Row("copy", f"{copying / 1e9:.0f} GB/s", numbers={"bytes_per_second": copying})
    fused.chosen("fused")
    for name, size, kernel, wanted in kernels(setting):
        least = wanted if setting.on_gpu else 0.0
        seconds = cold_seconds(kernel, setting)
        rate = size / seconds
        yield Row(
            name,
            f"{rate / 1e9:.0f} GB/s, {rate / copying:.0%} of copying ({size / 1e6:.0f} MB in {seconds * 1e6:.0f} us)",
            f">= {least:.0%}" if least else "",
            rate >= least * copying,
            {"bytes": size, "seconds": seconds, "bytes_per_second": rate, "share_of_copying": rate / copying},
        )


def kernels(setting: Setting) -> Iterator[tuple[str, int, Callable[[], object], float]]:
    """Name, bytes, call, and least share of the copy bandwidth. All in bf16; noise of the gate per token."""
    gate = Gate.draw(setting, torch.bfloat16, setting.tokens, 1, setting.width)
    x = {name: operand.detach() for name, operand in gate.operands.items()}
    assert gate.noise is not None
    positions, counters = gate.noise
    tensor, row, column = x["hidden"].numel() * 2, setting.tokens * 4, setting.width * 2
    normed, noisy, total, square, updated = gate.directions
    constants = (positions, counters, 4.0, 1.0, 0.1, True)
    operands = (x["logits"], x["bias"], x["state"], x["candidate"])
    mean, rstd = OPS.gate_head(x["hidden"], x["weight"], positions, counters, 0.1, 1e-5, False)[2:4]
    sums = (total[..., 0], square[..., 0])

    def head(noise: tuple[Tensor, Tensor] | tuple[None, None]) -> object:
        return OPS.gate_head(x["hidden"], x["weight"], *noise, 0.1, 1e-5, False)

    def head_backward() -> object:
        return OPS.gate_head_backward(normed, noisy, *sums, x["hidden"], x["weight"], mean, rstd, False)

    # Positions, int64, are two fp32 rows; the head writes mean, deviation and two sums, and reads them, or their gradients, backward.
    yield "tail", 4 * tensor + column + 3 * row, lambda: OPS.gate_tail(*operands, *constants), 0.8
    yield "tail backward", 7 * tensor + 2 * column + 2 * row, lambda: OPS.gate_tail_backward(updated, *operands, *constants), 0.8
    yield "head", 3 * tensor + column + 6 * row, lambda: head((positions, counters)), 0.0
    yield "head without noise", 2 * tensor + column + 4 * row, lambda: head((None, None)), 0.0
    yield "head backward", 4 * tensor + 2 * column + 4 * row, head_backward, 0.0


def contestants(x: Operands, sigma: float) -> dict[str, Callable[[], Sequence[Tensor]]]:
    """Ways of head and tail; a new function is compiled for each call of this."""
    leaves = x.leaves
    made = torch.compile(partial(plain, sigma=sigma), fullgraph=True, dynamic=False)
    return {
        "eager": lambda: plain(*leaves, sigma=sigma),
        "fused": lambda: ours(fused, x),
        "ref": lambda: ours(reference, x),
        "torch.compile": lambda: made(*leaves),
    }


def training_gate(setting: Setting) -> Iterator[Row]:
    """Head and tail together, forward and backward."""
    fused.chosen("fused")
    x = Operands.make(setting.tokens, setting.width, torch.bfloat16, setting.device)

    def measured(forward: Callable[[], Sequence[Tensor]]) -> float:
        return cold_seconds(lambda: torch.autograd.grad(forward(), x.leaves, x.grads), setting)

    eager = math.nan
    for name, forward in contestants(x, SIGMA).items():
        seconds = measured(forward)
        eager = seconds if name == "eager" else eager
        judged = name == "fused" and setting.on_gpu
        yield Row(
            f"gate, {setting.tokens} x {setting.width}, {name}",
            f"{seconds * 1e6:.0f} us, {eager / seconds:.2f} times eager's speed",
            "> 1" if judged else "",
            not judged or seconds < eager,
            {"seconds": seconds},
        )


def decoding_gate(setting: Setting) -> Iterator[Row]:
    """Head and tail as in generation: few tokens, forward only, without noise. Fused, each is one launch."""
    fused.chosen("fused")
    for tokens in (1, 8, 64):
        x = replace(Operands.make(tokens, setting.width, torch.bfloat16, setting.device), noise=None)
        for name, forward in contestants(x, 0.0).items():
            with torch.no_grad():
                seconds, launched = seconds_a_call(forward, setting), launches(forward, setting)
            judged = name == "fused" and setting.on_gpu
            yield Row(
                f"gate, {tokens} x {setting.width}, {name}",
                f"{seconds * 1e6:.1f} us a call, {launched} launches",
                "2" if judged else "",
                not judged or launched == 2,
                {"seconds": seconds, "launches": launched},
            )
