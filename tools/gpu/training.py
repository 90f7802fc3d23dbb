"""Does training on this GPU give the CPU's losses, and how fast is a training step? With the trainer's own engine and step.

One process, data of random tokens. DeepSpeed looks for GPUs when it is imported and takes seconds to, so it is imported late.
"""

import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from model.config import ComputeConfig, GRTConfig
from model.depth import sample_depth
from model.ops import fused
from model.parallel import initialize_model_parallel
from pretrain.config import OptimConfig, ParallelConfig, RunConfig
from pretrain.data import Batch
from pretrain.determinism import make_deterministic
from pretrain.ds_config import load_ds_config
from pretrain.memory import GIB, Layout, fits, memory
from pretrain.schedule import ScheduleConfig
from pretrain.sources import DataConfig
from pretrain.topology import Topology
from tools.gpu.runner import Row, Setting
from tools.planning import Machine

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

REPOSITORY = Path(__file__).parents[2]
GateOps = Literal["ref", "fused"]
SMALL = GRTConfig(vocab_size=512, hidden_size=64, num_heads=4, core_blocks=2, max_depth=4, max_positions=32)
# A second, of matrix products with 16-bit numbers and without sparsity.
PEAK_FLOPS = {
    r"\bH[12]00 NVL": 835e12,
    r"\bH100 PCIe": 756e12,
    r"\bH[12]00\b": Machine.peak_flops,
    r"\bA100\b": 312e12,
    r"\bB200\b": 2250e12,
}


def run_config(model: GRTConfig, length: int, batch: int, micro_batch: int, precision: Any, compute: ComputeConfig) -> RunConfig:
    return RunConfig(
        run_dir=Path("unused"),
        model=model,
        data=DataConfig(path="unused", sequence_length=length, workers=0),
        schedule=ScheduleConfig(total_tokens=10**9, learning_rate=1e-3),
        optim=OptimConfig(global_batch_size=batch, precision=precision),
        parallel=ParallelConfig(micro_batch_size=micro_batch, core_residency="step"),
        compute=compute,
    )


@contextmanager
def engine_of(config: RunConfig) -> Iterator["DeepSpeedEngine"]:
    """In a world of this process alone."""
    from pretrain.engine import build_engine, initialize_distributed

    if not torch.distributed.is_initialized():
        initialize_distributed(Topology.from_environment(os.environ), 1)
        initialize_model_parallel(1)
    engine = build_engine(config, load_ds_config(REPOSITORY / "configs" / "ds_zero3.json", config, 1))
    try:
        yield engine
    finally:
        engine.destroy()
        torch._dynamo.reset()  # compiled code holds on to the model
        gc.collect()


def batches(config: RunConfig, count: int) -> Iterator[Batch]:
    """Micro-batches of random tokens, endlessly the same `count`."""
    generator, size, length = torch.Generator().manual_seed(0), config.parallel.micro_batch_size, config.data.sequence_length
    drawn = torch.randint(config.model.vocab_size, (count, size, length + 1), generator=generator)
    sequences = torch.arange(count * size).view(count, size)
    rows = [Batch(x[:, :-1], x[:, 1:], torch.ones(size, length, dtype=torch.bool), s) for x, s in zip(drawn, sequences, strict=True)]
    return cycle(rows)


@cache
def losses(gate_ops: GateOps, device: str, steps: int) -> list[float]:
    """Of a small run in fp32, at random depths, learning 16 sequences by heart. The engine takes a GPU where it sees one."""
    from pretrain.train import train_step

    config = run_config(SMALL, 32, 8, 2, "fp32", ComputeConfig(gate_ops=gate_ops))
    found = []
    with engine_of(config) as engine:
        data = batches(config, 8)
        for step in range(steps):
            depth = sample_depth(config.model, config.seed, step)
            micro_batches = list(islice(data, engine.gradient_accumulation_steps()))
            loss, _ = train_step(engine, micro_batches, depth, 1e-3, torch.device(device), measure=False)
            found.append(float(loss))
    return found


@cache
def cpu_losses(steps: int) -> list[float]:
    """In another process, which sees no GPU. To be called before this one has put its place in a world into the environment."""
    program = f"import json; from tools.gpu.training import losses; print(json.dumps(losses('ref', 'cpu', {steps})))"
    # One thread is enough, and never waits for another.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True, timeout=90, check=True)
    print(done.stdout)
    return list(json.loads(done.stdout.splitlines()[-1]))


def same_losses(setting: Setting, gate_ops: GateOps) -> Iterator[Row]:
    """Tolerances are relative: between devices matrix products differ in rounding, and Adam makes more of it."""
    steps = setting.training_steps
    name = f"training, {steps} steps, fp32, {gate_ops}"
    expected = cpu_losses(steps)
    found = losses(gate_ops, setting.device, steps)
    yield Row(name, f"loss from {found[0]:.4f} to {found[-1]:.4f}", "learns", found[-1] < found[0])
    yield agreement(f"{name}, to the CPU's", found, expected, 1e-4)
    if gate_ops == "fused":
        yield agreement(f"{name}, to ref's", found, losses("ref", setting.device, steps), 1e-5)


def agreement(name: str, found: list[float], expected: list[float], limit: float) -> Row:
    differences = [abs(a / b - 1) for a, b in zip(found, expected, strict=True)]
    agree = all(difference <= limit for difference in differences)  # not so if one is not a number
    return Row(name, f"losses differ by {max(differences):.1e}", f"<= {limit:.0e}", agree, {"difference": max(differences)})


def same_twice(setting: Setting) -> Iterator[Row]:
    """In deterministic mode two runs end with the same weights, bit for bit: bf16, as long sequences as the timed model takes."""
    make_deterministic(os.environ)
    try:
        for documents in (False, True):
            first, second = (weights_after(setting, 4, documents) for _ in range(2))
            yield Row(f"training twice{', documents' if documents else ''}", f"{first:016x}, {second:016x}", "equal", first == second)
    finally:
        torch.use_deterministic_algorithms(False)


def weights_after(setting: Setting, steps: int, documents: bool) -> int:
    """Their digest."""
    from pretrain.digest import weights_digest
    from pretrain.train import train_step

    size, length = min(2, setting.micro_batch), setting.model.max_positions
    offsets = torch.arange(0, size * length + 1, length // 4, dtype=torch.int32) if documents else None
    config = run_config(setting.model, length, 2 * size, size, "bf16", ComputeConfig(gate_ops="fused", deterministic=True))
    with engine_of(config) as engine:
        data = batches(config, 4)
        for _ in range(steps):
            micro_batches = [batch._replace(cu_seqlens=offsets) for batch in islice(data, 2)]
            train_step(engine, micro_batches, setting.model.max_depth, 1e-3, torch.device(setting.device), measure=False)
        return weights_digest(engine)[0]


def step_speed(setting: Setting, gate_ops: GateOps, compile_: Literal["none", "recurrence"]) -> Iterator[Row]:
    """Forward, backward and optimizer at the full depth, bf16, micro-batch by the memory plan."""
    from pretrain.train import train_step

    if gate_ops == "fused":
        fused.chosen("fused")
    model, compute = setting.model, ComputeConfig(gate_ops=gate_ops, compile=compile_)
    config, planned = fitting(setting, compute)
    if setting.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with engine_of(config) as engine:
        data = batches(config, 4)

        def steps(count: int) -> float:
            """Seconds a step."""
            setting.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                micro_batches = list(islice(data, engine.gradient_accumulation_steps()))
                train_step(engine, micro_batches, model.max_depth, 1e-4, torch.device(setting.device), measure=False)
            setting.synchronize()
            return (time.perf_counter() - start) / count

        steps(3)
        seconds = steps(max(1, setting.repeats // 5))
    rate = config.tokens_per_step / seconds
    flops = 3 * model.forward_flops_per_token(config.data.sequence_length, model.max_depth)
    numbers = {"seconds": seconds, "tokens_per_second": rate, "micro_batch": config.parallel.micro_batch_size}
    value = f"{seconds * 1e3:.1f} ms, {rate:,.0f} tokens/s"
    if peak := peak_flops(setting):
        numbers["mfu"] = rate * flops / peak
        value += f", MFU {numbers['mfu']:.1%} of {peak / 1e12:.0f} TFLOP/s"
    else:
        value += ", MFU unknown: give --peak-flops"
    yield Row(f"step, {gate_ops}, compile {compile_}", value, numbers=numbers)
    if setting.on_gpu:
        used = torch.cuda.max_memory_allocated()
        value = f"{used / GIB:.1f} GiB, planned {planned / GIB:.1f}, at {config.parallel.micro_batch_size} sequences"
        yield Row(f"memory, {gate_ops}, compile {compile_}", value, numbers={"bytes": used, "planned_bytes": planned})


def fitting(setting: Setting, compute: ComputeConfig) -> tuple[RunConfig, int]:
    """The run with the largest micro-batch that the plan says fits, and its planned bytes."""
    model = setting.model
    available = torch.cuda.mem_get_info()[0] if setting.on_gpu else 2 * GIB
    size = setting.micro_batch
    while True:
        config = run_config(model, model.max_positions, size, size, "bf16", compute)
        planned = memory(Layout.of(config, 1), model.max_depth, 16 * model.hidden_size**2)
        if fits(planned, available) or size == 1:
            return config, planned.total
        size //= 2


def peak_flops(setting: Setting) -> float | None:
    if setting.peak_flops or not setting.on_gpu:
        return setting.peak_flops
    name = torch.cuda.get_device_name(0)
    return next((flops for pattern, flops in PEAK_FLOPS.items() if re.search(pattern, name)), None)
