"""Which rank is slow, when all take the same time for a step because they wait for it in collectives.

What a rank computes alone is timed: the forward passes of the prelude's and coda's blocks and of the core. ZeRO-3 gathers their weights
before they begin, so that no waiting for other data-parallel ranks lies in them, except with `core_residency: every_use`. The ranks of a
tensor-parallel group wait for each other there, and look alike: any of them may be the slow one.
"""

import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from model.core import RecurrentCore
from model.layers import Block

SLOW = 1.2  # times the median, from which a rank is named; every rank of the run waits for it so long
WAITS = 0.1  # share of the time that a rank waits for data above the median's, from which it is named
# In so many one after the other it must be the same rank. On two cores with three times as much to do, 26 of 60 rows of two ranks passed
# 1.2, at most two in a row of one rank; of four ranks nearly all did, at most four in a row of one.
ROWS = 5


class ComputeTime:
    """Adds up the seconds of the forward passes in training that this rank does by itself.

    Attributes:
        seconds: so far; on a GPU, of what it has finished.
    """

    def __init__(self, model: nn.Module) -> None:
        self.seconds = 0.0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._begun: Any = None
        self._cuda = torch.cuda.is_available()
        for module in _outermost(model):
            # Inside of DeepSpeed's hooks, which gather and release the weights.
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end, prepend=True)

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if module.training:
            self._begun = self._now()

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not module.training:
            return
        if not self._cuda:
            self.seconds += self._now() - self._begun
            return
        self._pending.append((self._begun, self._now()))
        while self._pending[0][1].query() and len(self._pending) > 1:  # no step's events are kept for long, and nothing is waited for
            self._add_first()

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _add_first(self) -> None:
        begin, end = self._pending.popleft()
        self.seconds += begin.elapsed_time(end) / 1e3

    def read(self) -> float:
        """The seconds since the last reading. Waits for the GPU."""
        while self._pending:
            self._pending[0][1].synchronize()
            self._add_first()
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def _outermost(model: nn.Module) -> list[nn.Module]:
    """Blocks of prelude and coda, and the core; not the blocks in it."""
    core = [module for module in model.modules() if isinstance(module, RecurrentCore)]
    inside = {module for outer in core for module in outer.modules()}
    return core + [module for module in model.modules() if isinstance(module, Block) and module not in inside]


class Stragglers:
    """Compares the ranks. Made and asked by all of them.

    Args:
        group: of all ranks, over gloo.
        say: told who is slow.
    """

    def __init__(self, model: nn.Module, group: ProcessGroup, say: Callable[[str], None]) -> None:
        self._compute, self._group = ComputeTime(model), group
        hosts: list[Any] = [None] * group.size()
        torch.distributed.all_gather_object(hosts, socket.gethostname(), group)
        self._judge = Judge(hosts, say)

    def compare(self, speed: dict[str, float]) -> dict[str, float]:
        """`speed` of this rank since its last reading, with who was slowest. One all-gather of 16 bytes a rank."""
        mine = torch.tensor([self._compute.read(), speed["data_wait"]], dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self._group.size())]
        torch.distributed.all_gather(everyone, mine, self._group)
        seconds, waits = torch.stack(everyone).t().tolist()
        return {**speed, **self._judge.row(seconds, waits)} if len(everyone) > 1 else speed


class Judge:
    """Says which rank lies clearly above the others, once while it does.

    Args:
        hosts: by rank.
    """

    def __init__(self, hosts: Sequence[str], say: Callable[[str], None]) -> None:
        self._hosts, self._say = hosts, say
        self._computes, self._waits = Streak(), Streak()

    def row(self, seconds: Sequence[float], waits: Sequence[float]) -> dict[str, float]:
        """Args: of each rank the time of its own work, and the share of its time that it waited for data."""
        slowest, longest = (list(values).index(max(values)) for values in (seconds, waits))
        slowdown = seconds[slowest] / (median_low(seconds) or 1.0)  # of two ranks, to the faster
        if self._computes.begins(slowest, slowdown > SLOW):
            self._say(f"WARNING: {self._name(slowest)} takes {slowdown:.2f} times as long for its own work as the median of the ranks")
        if self._waits.begins(longest, waits[longest] - median_low(waits) > WAITS):
            share = f"{waits[longest]:.0%} of the time, the median of the ranks {median_low(waits):.0%}"
            self._say(f"WARNING: {self._name(longest)} waits for data {share}")
        return {
            "slowest_rank": slowest,
            "slowest_rank_slowdown": slowdown,
            "longest_data_wait": waits[longest],
            "longest_data_wait_rank": longest,
        }

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}"


class Streak:
    """Readings in a row in which one rank stands out."""

    def __init__(self) -> None:
        self._rank, self._rows = -1, 0

    def begins(self, rank: int, stands_out: bool) -> bool:
        """Whether this is the ROWS-th of them: true once."""
        if not stands_out:
            self._rows = 0
        elif rank == self._rank:
            self._rows += 1
        else:
            self._rows = 1
        self._rank = rank
        return self._rows == ROWS
