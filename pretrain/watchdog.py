"""Notices that a run hangs, says which rank is behind, leaves every rank's stack and last collectives, and ends the process.

A thread of each rank publishes how far its main thread has come in the store through which the ranks met. A main thread that has not
moved for `seconds` hangs, or waits for one that does: the thread then looks who has not come as far, or does not publish any more.
"""

import faulthandler
import math
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from torch.distributed import PrefixStore, Store, TCPStore

from pretrain.collectives import begun, last_collectives
from pretrain.topology import Topology

HUNG = 76  # exit code: start again
ANSWER_SECONDS = 10.0  # within which the store, on rank 0, answers
SILENT_BEATS = 3  # heartbeats that a rank may be late
LEAVING_SECONDS = 60  # after which the process ends without having left all that


class Sign(NamedTuple):
    """What a rank publishes."""

    progress: tuple[int, int]  # signs of progress of the main thread, and collectives begun
    time: float  # since 1970
    at: str

    def __str__(self) -> str:
        return f"{self.progress[0]} {self.progress[1]} {self.time} {self.at}"

    @classmethod
    def parse(cls, text: str) -> "Sign":
        done, collectives, seconds, at = text.split(" ", 3)
        return cls((int(done), int(collectives)), float(seconds), at)


class Watchdog:
    """Watches this rank from its first `at` on.

    Args:
        directory: where stacks are left, one file a rank.
        seconds: without a sign of progress, after which the run hangs.
    """

    def __init__(self, topology: Topology, directory: Path, seconds: float) -> None:
        self._topology, self._directory, self._seconds = topology, directory, seconds
        self._beat = min(seconds / 4, 10.0)
        self._done = 0  # signs of progress
        self._at = ""
        self._since = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watchdog")

    def at(self, step: int, phase: str) -> None:
        """The main thread begins a part of a step: a sign of progress. The same sequence of calls on every rank."""
        self._at, self._done, self._since = f"step {step}, {phase}", self._done + 1, time.monotonic()
        if self._done == 1:
            self._thread.start()

    def pause(self) -> None:
        """What follows, to the next `at`, may take as long as it takes."""
        self._since = math.inf

    def _watch(self) -> None:
        store = PrefixStore("watchdog", TCPStore(self._topology.master_addr, self._topology.master_port, is_master=False))
        while True:
            self._look(store)
            time.sleep(self._beat)

    def _look(self, store: Store) -> None:
        """Publishes how far this rank is; ends the process if it hangs."""
        with suppress(RuntimeError):  # rank 0, which holds the store, is gone: the main thread meets that too
            store.set(f"rank {self._topology.rank}", str(Sign((self._done, begun()), time.time(), self._at)))
        since = self._since
        if time.monotonic() - since > self._seconds:
            time.sleep(2 * self._beat)  # for the others to publish that they wait
            who = self._who_is_behind(store)
            if self._since == since:  # it may have gone on
                self._end(who)

    def _who_is_behind(self, store: Store) -> str:
        """From what all have published, if the store answers: a read from a stopped rank 0 has no end."""
        found: list[str] = []
        threading.Thread(target=lambda: found.append(self._compare(store)), daemon=True).start()
        deadline = time.monotonic() + ANSWER_SECONDS
        while not found and time.monotonic() < deadline:
            time.sleep(0.1)
        return found[0] if found else "rank 0 is behind: its process, which holds the store, is stopped or gone"

    def _compare(self, store: Store) -> str:
        ranks = range(self._topology.world_size)
        signs = [Sign.parse(store.get(f"rank {rank}").decode()) for rank in ranks]
        silent = [rank for rank in ranks if time.time() - signs[rank].time > SILENT_BEATS * self._beat]
        if silent:
            return "; ".join(f"rank {rank} is behind: its process is stopped or gone since {signs[rank].at}" for rank in silent)
        least = min(sign.progress for sign in signs)
        return "; ".join(f"rank {rank} is behind: it is at {signs[rank].at}" for rank in ranks if signs[rank].progress == least)

    def _end(self, who: str) -> None:
        what = f"no progress for {time.monotonic() - self._since:.0f} s (watchdog_seconds is {self._seconds:g}) at {self._at}; {who}"
        # Ends the process even if a write to a dead file system, or the recorder of a broken GPU, holds Python's lock and never returns.
        faulthandler.dump_traceback_later(LEAVING_SECONDS, exit=True)
        try:
            self._leave(what)
        except OSError as error:
            with suppress(OSError):
                print(f"error on rank {self._topology.rank}: {what}. Its stack cannot be left: {error}", file=sys.stderr, flush=True)
        finally:
            time.sleep(self._beat)  # another's thread may look so much later; it would end with this process's connections
            os._exit(HUNG)

    def _leave(self, what: str) -> None:
        """Writes stacks and last collectives, and says where."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"rank_{self._topology.rank}.txt"
        with path.open("w") as file:
            print(what, file=file, flush=True)
            faulthandler.dump_traceback(file)
            print(f"error on rank {self._topology.rank}: {what}. Its stack is in {path}.", file=sys.stderr, flush=True)
            try:
                lines, waiting = last_collectives()
            except Exception as error:
                lines, waiting = [f"not known: {error!r}"], ""
            print("", "Its last collectives:", *lines, sep="\n", file=file, flush=True)
        if waiting:
            print(f"rank {self._topology.rank} waits in {waiting}", file=sys.stderr, flush=True)
