"""A full-size preset on 2 CPU ranks: `python -m benchmarks.large_on_cpu --preset grt-1b --passes 1`.

Really runs ZeRO-3 in bf16 with checkpointing on short sequences: forward and backward passes, or with --steps whole optimizer steps.
Prints the loss, the time, the collectives counted and planned, and the memory of a rank, measured and planned. grt-1b needs two
tensor-parallel ranks and 20 GiB; as two data-parallel ranks it does not fit into 24 GiB.
"""

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.collectives import CollectiveCounter
from model.config import PRESETS, ComputeConfig
from model.parallel import ParallelGroups
from pretrain.communication import optimizer_step
from pretrain.config import OptimConfig, ParallelConfig, RunConfig
from pretrain.ds_config import load_ds_config
from pretrain.memory import Layout, memory
from pretrain.schedule import ScheduleConfig
from pretrain.sources import DataConfig
from pretrain.zero_replay import ZeroSettings
from tests.distributed.runs import start
from tests.ranks import REPOSITORY, run_ranks

GIB = 2**30


def run_config(preset: str, length: int, tensor_parallel: int, residency: Any, checkpointing: Any) -> RunConfig:
    """One sequence a micro-batch, one micro-batch a step."""
    return RunConfig(
        run_dir=Path("unused"),
        model=PRESETS[preset],
        data=DataConfig(path="unused", sequence_length=length),
        schedule=ScheduleConfig(total_tokens=10**9, learning_rate=1e-4),
        optim=OptimConfig(global_batch_size=2 // tensor_parallel),
        parallel=ParallelConfig(tensor_parallel, micro_batch_size=1, core_residency=residency),
        compute=ComputeConfig(checkpointing=checkpointing),
    )


def high_water() -> int:
    """Most memory that this process has had resident, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def passes(config: RunConfig, count: int, with_step: bool) -> list[dict[str, Any]]:
    """In a rank: what each pass at full depth gave."""
    imported = high_water()
    engine = start(config)
    built = high_water()
    generator = torch.Generator().manual_seed(ParallelGroups().get_data_parallel_rank())
    tokens = torch.randint(config.model.vocab_size, (1, config.data.sequence_length), generator=generator)
    rows = []
    for _ in range(count):
        begun = time.perf_counter()
        with CollectiveCounter(ParallelGroups().get_data_parallel_group()) as counted:
            loss, _ = engine(tokens, tokens, depth=config.model.max_depth, sequences_B=torch.tensor([0]))
            engine.backward(loss)
            if with_step:
                engine.step()
        rows.append(
            {
                "loss": loss.item(),
                "seconds": time.perf_counter() - begun,
                "calls": dict(counted.calls),
                "elements": dict(counted.elements),
                "imported": imported,
                "built": built - imported,
                "peak": high_water() - imported,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="grt-1b", choices=sorted(PRESETS))
    parser.add_argument("--length", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--tensor-parallel", type=int, default=2, choices=(1, 2))
    parser.add_argument("--residency", default="loop", choices=("step", "fwd_bwd", "loop"))
    parser.add_argument("--checkpointing", default="nested", choices=("none", "recurrence", "block", "nested"))
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--steps", action="store_true", help="with the optimizer's step, which needs its moments")
    arguments = parser.parse_args()
    config = run_config(arguments.preset, arguments.length, arguments.tensor_parallel, arguments.residency, arguments.checkpointing)
    data_parallel = 2 // arguments.tensor_parallel
    settings = ZeroSettings.of(load_ds_config(REPOSITORY / "configs" / "ds_zero3.json", config, data_parallel))
    layout = Layout.of(config, data_parallel)
    planned = memory(layout, config.model.max_depth, settings.reduce_bucket)
    moments = 0 if arguments.steps else planned.optimizer * 2 // 3
    print(
        f"{arguments.preset}: {config.model.parameter_count:,} parameters, TP {arguments.tensor_parallel} x DP {data_parallel}, "
        f"{arguments.length} tokens, depth {config.model.max_depth}, {arguments.residency}, {arguments.checkpointing}"
    )
    without = "" if arguments.steps else " (without Adam's moments)"
    print(f"planned for a rank: {(planned.total - moments) / GIB:.2f} GiB{without}", flush=True)
    for name, traffic in optimizer_step(layout, config.model.max_depth, settings).items():
        if name.group == "data":
            print(f"planned {name.operation}: {traffic.calls} calls, {traffic.elements:,} elements")
    for row in run_ranks(passes, 2, config, arguments.passes, arguments.steps, timeout=3000)[0]:
        print(f"loss {row['loss']:.4f}, {row['seconds']:.1f} s; counted {row['calls']}, elements {row['elements']}")
        print(
            f"rank 0: {row['peak'] / GIB:.2f} GiB at most ({row['built'] / GIB:.2f} while it was built), "
            f"above {row['imported'] / GIB:.2f} of imports"
        )


if __name__ == "__main__":
    main()
