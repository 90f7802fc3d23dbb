"""Runs checks in a process of their own, so that no crash, CUDA error or hang of one keeps the others from running.

A check is a generator of rows, of which each is reported as it comes. After an error that leaves the GPU unusable to its process, and
after a check that ended or held up its process, the next check gets a new one. What they print is appended to a log.
"""

import faulthandler
import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from model.config import PRESETS, GRTConfig

START_SECONDS = 60
READY = "ready"  # what a worker sends first


@dataclass(frozen=True)
class Setting:
    """What the checks run on, and how much of it."""

    device: str = "cuda"
    tokens: int = 16384
    width: int = 2048
    repeats: int = 50  # of what is timed
    flush_bytes: int = 2**29  # written before each timed call: several times any cache
    training_steps: int = 20  # that are compared with the CPU's
    model: GRTConfig = PRESETS["medium-isoflop"]  # whose training step is timed
    micro_batch: int = 16  # sequences at most
    peak_flops: float | None = None  # None: by the device's name

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    check: str
    value: str
    expected: str = ""
    ok: bool | None = True  # None: was not run
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A function of some module, or a partial of one."""

    name: str
    rows: Callable[[Setting], Iterator[Row]]
    seconds: float  # what it may take on a slow machine; it is stopped after twice as long


def run(checks: Sequence[Check], setting: Setting, deadline: float, log: Path) -> Iterator[Row]:
    """Rows of the checks, in their order; a check for which too little time is left is skipped.

    Args:
        deadline: in time.monotonic()'s seconds.
        log: what the checks print is appended to it.
    """
    worker = None
    try:
        for check in checks:
            left = deadline - time.monotonic()
            if left < check.seconds:
                yield Row(check.name, f"not begun: {max(0, left):.0f} s are left, and it may take {check.seconds:.0f} s", ok=None)
                continue
            if worker is not None and not worker.usable:
                worker.stop()  # it may be slow to end, with the GPU's memory
                worker = None
            worker = worker or Worker(setting, log)
            yield from worker.rows(check, min(2 * check.seconds, left))
    finally:
        if worker is not None:
            worker.stop()


class Worker:
    """A process that runs checks one after another."""

    def __init__(self, setting: Setting, log: Path) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, setting, log))
        self.process.start()
        theirs.close()  # so that the end of the process is seen
        self.usable = True
        # Imports take long on a cold disk, and are no check's fault. A process that fails to start fails the check.
        with suppress(EOFError, OSError):
            if self.pipe.poll(START_SECONDS):
                self.pipe.recv()

    def rows(self, check: Check, limit: float) -> Iterator[Row]:
        end = time.monotonic() + limit
        try:
            self.pipe.send((check, limit))
            while self.pipe.poll(max(0.0, end - time.monotonic())):
                message = self.pipe.recv()
                if message == READY:  # it took longer to start than was waited for
                    continue
                if isinstance(message, bool):
                    self.usable = message
                    return
                yield message
            what = f"stopped: no answer in {limit:.0f} s"
        except (EOFError, OSError):
            self.process.join(10)
            what = f"its process ended, exit code {self.process.exitcode}"
        self.usable = False
        yield Row(check.name, what, ok=False)

    def stop(self) -> None:
        self.pipe.close()
        if self.usable:
            self.process.join(5)  # it waits for checks, and ends when none can come
        self.process.kill()
        self.process.join(10)  # not for ever: a process that waits for a broken GPU cannot be killed


def work(pipe: Connection, setting: Setting, log: Path) -> None:
    """In the process: sends the rows of each check that comes, and then whether the process can run another."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    pipe.send(READY)
    usable = True
    while usable:
        try:
            check, limit = pipe.recv()
        except EOFError:
            return
        print(f"\n== {check.name}", flush=True)
        faulthandler.dump_traceback_later(max(1.0, limit - 2))
        try:
            for row in check.rows(setting):
                pipe.send(row)
            setting.synchronize()  # kernels fail later than their calls
        except Exception as error:
            traceback.print_exc()
            message = str(error).strip().split("\n")[0][:200]  # the log has all of it
            pipe.send(Row(check.name, f"{type(error).__name__}: {message}", ok=False))
        usable = is_usable(setting)
        faulthandler.cancel_dump_traceback_later()
        pipe.send(usable)


def is_usable(setting: Setting) -> bool:
    """Frees memory. A kernel that failed leaves its process without the GPU: every call repeats the error."""
    gc.collect()
    try:
        setting.synchronize()
        if setting.on_gpu:
            torch.cuda.empty_cache()
    except Exception:
        traceback.print_exc()
        return False
    return True
