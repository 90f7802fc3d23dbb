"""What it costs to survive: `python -m benchmarks.faults`. Checkpoints beside training, agreement, watchdog, stragglers, digests.

One rank trains; beside it there is a core for the thread that writes. Steps with and without each part are interleaved, and medians
compared. What can be counted is counted: bytes that a checkpoint makes the loop wait for, collectives and their bytes.
"""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from benchmarks.collectives import CollectiveCounter
from model.config import GRTConfig
from pretrain import saving
from pretrain.checkpoint import Keep
from pretrain.config import OptimConfig
from pretrain.data import Batch
from pretrain.digest import global_batch_digest, weights_digest
from pretrain.stopping import StopRequest, agreed
from pretrain.stragglers import Stragglers
from pretrain.topology import Topology
from pretrain.train import train_step
from pretrain.watchdog import Watchdog
from tests.distributed.runs import small_run, start
from tests.ranks import run_ranks

MODEL = GRTConfig(vocab_size=8192, hidden_size=512, num_heads=8, core_blocks=4, max_depth=4, max_positions=256)
ROUNDS = 12


def measure() -> dict[str, float]:
    """In a rank of one: seconds and counts by name."""
    config = replace(small_run(Path("unused"), model=MODEL), optim=OptimConfig(global_batch_size=2, precision="fp32"))
    engine = start(config)
    device = torch.device("cpu")
    tokens = torch.randint(MODEL.vocab_size, (2, 257), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(2, 256, dtype=torch.bool), torch.tensor([0, 1]))
    folder = Path(tempfile.mkdtemp())
    watchdog = Watchdog(Topology.from_environment(os.environ), folder / "hang", 1800)
    stop, control = StopRequest(None), torch.distributed.new_group(backend="gloo")
    saver = saving.CheckpointSaver(folder / "checkpoints", Keep(newest=1), 0, print)
    stragglers = Stragglers(engine.module, control, print)
    step = 0

    def seconds(extra: Callable[[], None]) -> float:
        begin = time.perf_counter()
        train_step(engine, [batch], 4, 1e-4, device, measure=False)
        extra()
        return time.perf_counter() - begin

    def watched() -> None:
        watchdog.at(step, "reading its batch")
        watchdog.at(step, "forward, backward and optimizer")
        agreed(stop.reason(), saver.wants_retry(), control)

    def compared() -> None:
        stragglers.compare({"data_wait": 0.0})

    def digests() -> None:
        global_batch_digest([batch], device)
        weights_digest(engine)

    seconds(watched)
    seconds(digests)
    rows: dict[str, list[float]] = {"plain": [], "watched": [], "while a checkpoint is written": [], "with digests": []}
    stalls, written_cpu = [], []
    for step in range(1, ROUNDS + 1):
        rows["plain"].append(seconds(lambda: None))
        rows["watched"].append(seconds(watched))
        rows["with digests"].append(seconds(digests))
        before = time.process_time()
        stall, copied = saver.save(engine, {"step": step, "position": 0}, {}, {})
        stalls.append(stall)
        while any(thread.name == "checkpoint" for thread in threading.enumerate()):
            own = time.thread_time()
            rows["while a checkpoint is written"].append(seconds(watched))
            before += time.thread_time() - own  # of the loop, not of the writer
        written_cpu.append(time.process_time() - before)
    counts: dict[str, float] = {}
    world = torch.distributed.distributed_c10d._get_default_group()
    for name, group, extra in (("agreement", control, watched), ("stragglers", control, compared), ("digests", world, digests)):
        with CollectiveCounter(group) as counter:
            extra()
        counts |= {f"collectives, {name}": sum(counter.calls.values()), f"bytes, {name}": 8 * sum(counter.elements.values())}
    watchdog.pause()
    shutil.rmtree(folder)
    medians = {name: median(times) for name, times in rows.items()}
    return medians | counts | {"stall": median(stalls), "copied": float(copied), "writer": median(written_cpu)}


def main() -> None:
    found, *_ = run_ranks(measure, 1, timeout=600)
    plain = found["plain"]
    print("| steps | time / plain |\n|---|---|")
    for name in ("watched", "while a checkpoint is written", "with digests"):
        print(f"| {name} | {found[name] / plain:.3f} |")
    size = f"{found['copied'] / 2**20:.0f} MiB"
    print(f"\nA plain step takes {plain:.3f} s. The copy of {size} for a checkpoint stalls the loop for {found['stall']:.3f} s; the writer")
    print(f"takes {found['writer']:.2f} CPU seconds, hashes included.")
    for name in ("agreement", "stragglers", "digests"):
        print(f"{name}: {found[f'collectives, {name}']:.0f} collectives, {found[f'bytes, {name}']:.0f} bytes a rank")


if __name__ == "__main__":
    main()
