"""What a run tells its user: metrics.jsonl, TensorBoard, and lines or a progress bar on the console. Rank 0 only."""

import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from pretrain.config import RunConfig
from pretrain.resume import Progress

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# Dense bf16 FLOP/s by device name; model FLOPs utilisation is reported for these devices only.
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


class Speedometer:
    """Tokens a second, model FLOPs utilisation, and the share of the time spent waiting for data, since the last reading.

    FLOPs follow the nominal convention of `GRTConfig.forward_flops_per_token` at the depth that each step ran, without recomputation.
    """

    def __init__(self, config: RunConfig, world_size: int) -> None:
        self.config = config
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        peak = next((flops for device, flops in PEAK_FLOPS.items() if device in name), None)
        self.peak = peak * world_size if peak is not None and config.optim.precision == "bf16" else None
        self._start()

    def _start(self) -> None:
        self.since, self.tokens, self.flops, self.waited = time.perf_counter(), 0, 0, 0.0

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.waited += time.perf_counter() - start

    def step(self, depth: int, sequences: int) -> None:
        tokens = sequences * self.config.data.sequence_length
        self.tokens += tokens
        self.flops += 3 * tokens * self.config.model.forward_flops_per_token(self.config.data.sequence_length, depth)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Takes work that is not training off the clock."""
        start = time.perf_counter()
        yield
        self.since += time.perf_counter() - start

    def read(self) -> dict[str, float]:
        seconds = time.perf_counter() - self.since
        speed = {"tokens_per_second": self.tokens / seconds, "data_wait": self.waited / seconds}
        if self.peak is not None:
            speed["mfu"] = self.flops / seconds / self.peak
        self._start()
        return speed


def peak_memory_gib() -> float:
    """Peak of this process: allocated on the GPU, or resident on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class MetricsLog:
    """Appends rows to metrics.jsonl and TensorBoard, and shows them. On other ranks than 0 it does nothing.

    At a resume, rows later than the checkpoint are cut: their steps will be run again.
    """

    def __init__(self, config: RunConfig, rank: int, start_step: int, total_steps: int) -> None:
        self.enabled = rank == 0
        if not self.enabled:
            return
        path = config.run_dir / "metrics.jsonl"
        first_step = start_step + 1 if start_step else 0  # step 0 is the validation before a fresh start
        _cut_rows(path, first_step)
        self.file = path.open("a", buffering=1)
        self.writer = _tensorboard(config.run_dir / "tensorboard", first_step) if config.log.tensorboard else None
        self.total_steps = total_steps
        self.skipped_steps = 0
        terminal = sys.stderr.isatty()
        self.bar = tqdm(total=total_steps, initial=start_step, unit="step", dynamic_ncols=True) if terminal else None

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.enabled:
            with suppress(OSError):  # what a full disk did not take is tried again here
                self.file.close()
            with suppress(OSError):
                if self.writer is not None:
                    self.writer.close()
            if self.bar is not None:
                self.bar.close()

    def advance(self, step: int, applied: bool, spike: bool) -> None:
        """A step is done. One whose loss is a spike, or whose gradients are not finite, may not have been applied, on all ranks alike;
        everything but the weights advances."""
        if not self.enabled:
            return
        if self.bar is not None:
            self.bar.update()
        if not applied:
            self.skipped_steps += 1
            self.say(f"step {step}/{self.total_steps}  SKIPPED: {'its loss is a spike' if spike else 'the gradients are not finite'}")

    def train_step(
        self,
        progress: Progress,
        loss: float,
        depth: int,
        learning_rate: float,
        gradient_norm: float,
        speed: dict[str, float],
        core_statistics: Tensor,
    ) -> None:
        """A row of the step just made. `core_statistics` fp32 [depth, 2]: the gate's mean and the relative update, by recurrence."""
        if not self.enabled:
            return
        values = {
            "tokens": progress.tokens,
            "loss": loss,
            "depth": depth,
            "learning_rate": learning_rate,
            "gradient_norm": gradient_norm,
            "skipped_steps": self.skipped_steps,  # since the last row
            **speed,
            "memory_gib": peak_memory_gib(),
        }
        for recurrence, (mean, update) in enumerate(core_statistics.tolist(), start=1):
            values |= {f"gate_mean/recurrence_{recurrence}": mean, f"update_size/recurrence_{recurrence}": update}
        self.skipped_steps = 0
        mfu = f"  mfu {speed['mfu']:.1%}" if "mfu" in speed else ""
        self._write(
            progress.step,
            values,
            f"loss {loss:.4f}  depth {depth}  lr {learning_rate:.2e}  grad norm {gradient_norm:.3f}  "
            f"{speed['tokens_per_second']:,.0f} tokens/s{mfu}  data wait {speed['data_wait']:.1%}  memory {values['memory_gib']:.2f} GiB",
        )

    def digests(self, step: int, batch: int, weights: int, differing: tuple[int, int] | None) -> None:
        """A row of what a step reads and the weights that it starts from: see `pretrain/digest.py`."""
        if differing is not None:
            who = f"ranks {differing[0]} and {differing[1]} hold the same weights with different values"
            self.say(f"step {step}/{self.total_steps}  WARNING: {who}: memory or a computation may be at fault (docs/operations.md)")
        row = {"batch_digest": f"{batch:016x}", "weights_digest": f"{weights:016x}"}
        self._write(step, row, f"digests: batch {batch:016x}  weights {weights:016x}")

    def spike(self, step: int, loss: float, first_position: int, end_position: int) -> None:
        """A row of a step whose loss stands out, with the positions [first, end) of its batch."""
        row = {"spike_loss": loss, "spike_first_position": first_position, "spike_end_position": end_position}
        self._write(step, row, f"SPIKE: loss {loss:.4f} at positions {first_position} to {end_position - 1}")

    def rollback(self, step: int, checkpoint: str, first_position: int, end_position: int) -> None:
        """A row of a return to the weights of a checkpoint; the steps that have read the positions [first, end) then have no effect."""
        row = {"rollback_to": checkpoint, "rollback_first_position": first_position, "rollback_end_position": end_position}
        line = f"ROLLED BACK to the weights of {checkpoint}: positions {first_position} to {end_position - 1} have no effect"
        self._write(step, row, line)

    def checkpoint(self, step: int, stall_seconds: float, copied_bytes: int) -> None:
        """A row of what it cost the loop to begin a checkpoint; it is written meanwhile."""
        values = {"checkpoint_stall_seconds": stall_seconds, "checkpoint_copied_bytes": copied_bytes}
        line = f"checkpoint: {copied_bytes / 2**20:,.1f} MiB copied on this rank, {stall_seconds:.3f} s; it is being written"
        self._write(step, values, line)

    def validation(self, step: int, losses: dict[int, float], by_source: dict[str, dict[int, float]], full_depth: int) -> None:
        """A row of validation losses by depth, with what the core and what depth gain; gains are absent for a dense model.

        Args:
            losses: over all sources.
            by_source: of each source of a mixture; empty where there is one.
        """
        values = {f"validation_loss/depth_{depth}": loss for depth, loss in losses.items()}
        for source, of_source in by_source.items():
            values |= {f"validation_loss/{source}/depth_{depth}": loss for depth, loss in of_source.items()}
        if full_depth:
            values |= {"core_gain": losses[0] - losses[full_depth], "depth_gain": losses[1] - losses[full_depth]}
        shown = "  ".join(f"depth {depth}: {loss:.4f}" for depth, loss in losses.items())
        gains = f"  core gain {values['core_gain']:.4f}  depth gain {values['depth_gain']:.4f}" if full_depth else ""
        sources = "".join(f"  {source}: {of_source[full_depth]:.4f}" for source, of_source in by_source.items())
        self._write(step, values, f"validation loss  {shown}{gains}{f'  at depth {full_depth}{sources}' if sources else ''}")

    def _write(self, step: int, values: dict[str, Any], line: str) -> None:
        if not self.enabled:
            return
        # JSON has no NaN.
        finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()}
        try:
            self.file.write(json.dumps({"step": step, **finite}) + "\n")
            if self.writer is not None:
                for name, value in values.items():
                    if not isinstance(value, str):
                        self.writer.add_scalar(name, value, step)
        except OSError as error:  # a full disk ends no run
            self.say(f"step {step}/{self.total_steps}  NOT LOGGED: {self.file.name} cannot be written: {error.strerror}")
        self.say(f"step {step}/{self.total_steps}  {line}")

    def say(self, line: str) -> None:
        if not self.enabled:
            return
        with suppress(OSError):  # a log on a full disk
            if self.bar is not None:
                self.bar.write(line)
            else:
                print(line, flush=True)


def _tensorboard(directory: Path, first_step: int) -> "SummaryWriter":
    from torch.utils.tensorboard import SummaryWriter  # a second to import, which ranks that log nothing need not wait for

    return SummaryWriter(str(directory), purge_step=first_step)


def _cut_rows(path: Path, first_step: int) -> None:
    """Removes the rows from `first_step` on, and lines that are no rows, such as a last one that a killed run left half-written."""
    if not path.exists():
        return
    kept, unreadable = [], 0
    for line in path.read_text(errors="replace").splitlines():
        step = _step_of(line)
        unreadable += step is None
        if step is not None and step < first_step:
            kept.append(line + "\n")
    if unreadable:
        print(f"{path}: {unreadable} unreadable lines left out", file=sys.stderr)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    temporary.replace(path)


def _step_of(line: str) -> int | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return step if isinstance(step, int) else None
