"""Memory, communication, time and settings of a run, before anyone pays for a GPU: reads a run config, needs neither data nor GPUs.

    python tools/plan.py --config configs/grt_1b.yaml --gpus 64
    python tools/plan.py --config configs/grt_1b.yaml --sweep 8,64,256,1024
    python tools/plan.py --config configs/grt_1b.yaml --gpus 8 --search
    python tools/plan.py --config configs/grt_1b.yaml --gpus 8 --gpu-memory 141GiB --parallel.micro_batch_size 8

The first prints the run as configured, and then the settings that it recommends. Settings of the run follow as in train.py.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from model.config import ComputeConfig
from pretrain.config import RunConfig, parse_run_config
from pretrain.ds_config import read_ds_config
from pretrain.memory import GIB, Layout, activations
from tools.planning import RESIDENCIES, Estimate, Machine, depths, estimate, search

DS_CONFIG = Path(__file__).parents[1] / "configs" / "ds_zero3.json"
CHECKPOINTING: tuple[Literal["none", "recurrence", "block", "nested"], ...] = ("none", "recurrence", "block", "nested")
UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def number(text: str) -> float:
    """80GiB, 50GB/s, 989T, 20e-6."""
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?) ?([KMGTP]?i?)(?:B|B/s|FLOP/s|FLOPS)?", text, re.IGNORECASE)
    if match is None or match[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number with a unit, as in 80GiB, 50GB/s or 989e12")
    found = float(match[1]) * UNITS[match[2].upper()]
    if not 0 < found < 1e30:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0, or beyond all measure")
    return found


def whole_number(text: str) -> int:
    return gpu_counts(text)[0]


def gpu_counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of GPU counts, as in 8,64,256")
    return counts


def describe(found: Estimate, budget_tokens: int, ds_config: Path) -> None:
    _describe_model(found)
    _describe_memory(found)
    _describe_communication(found, ds_config)
    print("\nTime of an optimizer step")
    print(f"  computing                  {found.compute_seconds:9.3f} s")
    print(f"  communicating              {found.communication_seconds:9.3f} s")
    print(f"  in all                     {found.step_seconds:9.3f} s")
    print(f"  MFU                        {found.mfu:9.1%}, with free communication {found.mfu_bound:.1%}")
    print(f"  {budget_tokens:,} tokens: {found.days(budget_tokens):.2f} days")


def _describe_model(found: Estimate) -> None:
    model, layout = found.config.model, found.layout
    executed = {
        r: model.parameter_count + (r - 1) * model.core_parameter_count if r else 0 for r in {1, model.max_depth} if model.core_blocks
    }
    print(f"Model {model.prelude_blocks}+{model.core_blocks}x{model.max_depth}+{model.coda_blocks}, width {model.hidden_size}")
    print(f"  parameters stored          {model.parameter_count:,}, of them {model.core_parameter_count:,} in the core")
    for depth, parameters in sorted(executed.items()):
        print(f"  executed at depth {depth:<8} {parameters:,}")
    print(f"Layout {layout.data_parallel * layout.tensor_parallel} GPUs: {settings(found)}")


def settings(found: Estimate) -> str:
    parallel, layout = found.config.parallel, found.layout
    return (
        f"TP {layout.tensor_parallel} x DP {layout.data_parallel}, micro-batch {layout.micro_batch_size}, "
        f"accumulation {layout.accumulation_steps}, residency {parallel.core_residency}, checkpointing {checkpointing(found)}"
    )


def checkpointing(found: Estimate) -> str:
    compute = found.config.compute
    return compute.checkpointing + (f" but for the last {compute.keep_last}" if compute.keep_last else "")


def _describe_memory(found: Estimate) -> None:
    needed, layout = found.memory, found.layout
    depth = layout.model.deepest
    core = sum(p.numel for p in layout.parameters if p.part == "core") * layout.element
    print(f"\nMemory of a GPU at depth {depth}, GiB")
    rows = {
        "weights (ZeRO-3 partition)": needed.weights,
        "fp32 weights, Adam's moments": needed.optimizer,
        "fp32 gradients": needed.gradients,
        "reduction bucket": needed.bucket,
        "gathered weights": needed.gathered,
        f"activations ({needed.activations.peak_at})": needed.activations.peak,
        "  of them kept for the backward": needed.activations.kept,
        "  the core's unsharded gradient": core,
        "most at once": needed.total,
    }
    for name, size in rows.items():
        print(f"  {name:32} {size / GIB:9.3f}")
    print(f"  {'fits' if found.fits else 'DOES NOT FIT'} in {found.machine.memory / GIB:.1f} GiB")
    print("  activations by checkpointing: " + ", ".join(f"{mode} {size / GIB:.3f}" for mode, size in activations_by_mode(layout).items()))


def activations_by_mode(layout: Layout) -> dict[str, int]:
    """Peak bytes at the largest depth."""
    found: dict[str, int] = {}
    ways = (ComputeConfig(mode, hoist=layout.compute.hoist, gate_ops=layout.compute.gate_ops) for mode in CHECKPOINTING)
    for compute in ways:
        found[compute.checkpointing] = activations(replace(layout, compute=compute), layout.model.deepest).peak
    return found


def _describe_communication(found: Estimate, ds_config: Path) -> None:
    print(f"\nCollectives of an optimizer step at depth {depths(found.layout.model)[-1]}, by residency")
    print(f"  {'residency':10} {'group':7} {'collective':15} {'calls':>8} {'GB':>10}")
    for residency in RESIDENCIES:
        parallel = replace(found.config.parallel, core_residency=residency)
        other = estimate(replace(found.config, parallel=parallel), _gpus(found), found.machine, ds_config)
        for (group, operation), traffic in sorted(other.communication.items()):
            print(f"  {residency:10} {group:7} {operation:15} {traffic.calls:8,} {traffic.bytes / 1e9:10.3f}")


def _gpus(found: Estimate) -> int:
    return found.layout.data_parallel * found.layout.tensor_parallel


def recommend(found: Estimate | None, machine: Machine) -> None:
    if found is None:
        print(f"No layout fits in {machine.memory / GIB:.1f} GiB a GPU. More GPUs or memory are needed.")
        return
    parallel, compute = found.config.parallel, found.config.compute
    print(f"Recommended: {found.step_seconds:.3f} s a step, MFU {found.mfu:.1%}, {found.memory.total / GIB:.1f} GiB")
    print("parallel:")
    for name in ("tensor_parallel", "micro_batch_size", "core_residency"):
        print(f"  {name}: {getattr(parallel, name)}")
    print("compute:")
    for name in ("checkpointing", "keep_last"):
        print(f"  {name}: {getattr(compute, name)}")
    print(f"# {found.layout.accumulation_steps} micro-steps an optimizer step")


def sweep(config: RunConfig, counts: list[int], machine: Machine, ds_config: Path, budget_tokens: int) -> None:
    """The fastest layout that fits, a row for each number of GPUs."""
    print(f"{'GPUs':>6} {'GiB':>6} {'s/step':>9} {'MFU':>6} {'bound':>6} {'days':>8}  settings")
    for gpus in counts:
        found = search(config, gpus, machine, ds_config)
        if found is None:
            print(f"{gpus:6}  no layout fits, or the global batch of {config.optim.global_batch_size} does not divide")
            continue
        print(
            f"{gpus:6} {found.memory.total / GIB:6.1f} {found.step_seconds:9.3f} {found.mfu:6.1%} {found.mfu_bound:6.1%} "
            f"{found.days(budget_tokens):8.2f}  {settings(found)}"
        )


def require_stage_3(ds_config: Path) -> None:
    stage = read_ds_config(ds_config)["zero_optimization"]["stage"]
    if stage != 3:
        raise ValueError(f"{ds_config} has zero_optimization.stage {stage}. Memory, communication and time are planned for stage 3 only.")


def main(arguments: Sequence[str] | None = None) -> int:
    args, overrides = _parser().parse_known_args(arguments)
    machine = Machine(
        memory=int(args.gpu_memory),
        peak_flops=args.peak_flops,
        attainable=args.attainable,
        gpus_per_node=args.gpus_per_node,
        node_bandwidth=args.node_bandwidth,
        bandwidth=args.bandwidth,
        latency=args.latency,
    )
    try:
        config = parse_run_config(["--config", str(args.config), *overrides])
        require_stage_3(args.ds_config)
        budget_tokens = int(args.budget_tokens or config.schedule.total_tokens)
        if args.sweep:
            sweep(config, args.sweep, machine, args.ds_config, budget_tokens)
        elif args.search:
            recommend(search(config, args.gpus, machine, args.ds_config), machine)
        else:
            describe(estimate(config, args.gpus, machine, args.ds_config), budget_tokens, args.ds_config)
            print()
            recommend(search(config, args.gpus, machine, args.ds_config), machine)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\nAssumptions")
    for line in machine.assumptions():
        print(f"- {line}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    default = Machine()
    parser.add_argument("--config", type=Path, required=True, help="YAML of the run, as for train.py")
    parser.add_argument("--ds_config", type=Path, default=DS_CONFIG, help="DeepSpeed's JSON (default: configs/ds_zero3.json)")
    parser.add_argument("--gpus", type=whole_number, default=8, help="default: %(default)s")
    parser.add_argument("--sweep", type=gpu_counts, help="a row for each of these GPU counts, as in 8,64,256,1024")
    parser.add_argument("--search", action="store_true", help="only the fastest layout that fits")
    parser.add_argument("--budget-tokens", type=number, help="tokens to train on (default: the run's schedule)")
    parser.add_argument("--gpu-memory", type=number, default=default.memory, help="default: 80GiB")
    parser.add_argument(
        "--peak-flops", type=number, default=default.peak_flops, help="a second, dense, in the compute dtype (default: H100)"
    )
    parser.add_argument("--attainable", type=number, default=default.attainable, help="share of the peak (default: %(default)s)")
    parser.add_argument("--gpus-per-node", type=whole_number, default=default.gpus_per_node, help="default: %(default)s")
    parser.add_argument(
        "--node-bandwidth", type=number, default=default.node_bandwidth, help="bytes/s a GPU inside a node (default: NVLink)"
    )
    parser.add_argument("--bandwidth", type=number, default=default.bandwidth, help="bytes/s a GPU between nodes (default: 50GB/s)")
    parser.add_argument("--latency", type=number, default=default.latency, help="seconds of a collective (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
