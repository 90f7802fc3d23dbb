"""Why a run stops before its end: a signal, or its time is up. Both end a step first, then save.

Slurm sends a signal some minutes before the time limit, and at a preemption. It is only noted here; after each step all ranks agree
on what any of them has noted. A second signal ends the process at once, also one that waits in a collective: the signals are read from
a pipe by a thread, where a Python handler would wait for the main thread. Slurm's own are several for one cause: see SAME_SIGNAL.
"""

import os
import re
import signal
import sys
import threading
import time
from enum import IntEnum

import torch
from torch.distributed import ProcessGroup

REQUEUE = 75  # exit code of a run that stopped in order and is to be started again; sysexits.h calls it EX_TEMPFAIL
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Seconds. A preemption sends SIGTERM twice within milliseconds, from slurmd and by srun (Slurm 22.05), and the deepspeed launcher
# passes on a signal that the ranks have had with it.
SAME_SIGNAL = 5.0


class Reason(IntEnum):
    """Why to stop; of several, the highest is told."""

    NONE = 0
    TIME_IS_UP = 1
    SIGNAL = 2


class StopRequest:
    """What this process has been asked.

    Args:
        seconds: from now, after which the time is up; None: never.
    """

    def __init__(self, seconds: float | None) -> None:
        self.signalled = False
        self._signal_time = 0.0  # of the first
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def listen(self) -> None:
        """From now on notes SIGNALS. Called in the main thread, once."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # what is left to do, the thread does
        threading.Thread(target=self._read, args=(read,), daemon=True, name="signals").start()

    def _read(self, pipe: int) -> None:
        while True:
            for number in os.read(pipe, 64):
                if number not in SIGNALS:
                    continue
                if self.signalled and time.monotonic() - self._signal_time < SAME_SIGNAL:
                    continue
                if self.signalled:
                    print(f"second signal ({signal.Signals(number).name}): ended without saving", file=sys.stderr, flush=True)
                    os._exit(REQUEUE)
                self.signalled, self._signal_time = True, time.monotonic()
                first = f"{signal.Signals(number).name}: the step under way is ended and saved"
                print(f"{first}; a signal more than {SAME_SIGNAL:g} s from now ends at once", file=sys.stderr, flush=True)

    def reason(self) -> Reason:
        """Of this process alone."""
        if self.signalled:
            return Reason.SIGNAL
        up = self._deadline is not None and time.monotonic() > self._deadline
        return Reason.TIME_IS_UP if up else Reason.NONE


def agreed(reason: Reason, saves: bool, group: ProcessGroup) -> tuple[Reason, bool]:
    """The highest of all ranks' reasons, and whether any wants to save again. Called by every rank; one all-reduce of 16 bytes."""
    found = torch.tensor([reason, saves], dtype=torch.int64)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group)
    return Reason(int(found[0])), bool(found[1])


def parse_duration(text: str) -> float:
    """Seconds of `hours:minutes:seconds`, with `days-` before it or without, as Slurm writes a time limit.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", text)
    if not found:
        raise ValueError(f"stop_before is {text!r}; it must be hours:minutes:seconds, as 23:50:00, or days-hours:minutes:seconds.")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
