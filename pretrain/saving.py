"""Checkpoints that are written beside training: the loop waits for a copy in memory, a thread writes it.

A write that fails, on a full disk for example, does not end the run: it is said, and tried again some time later with the state of
then. All ranks write together, over a process group of their own, so that all of them know of a failure.
"""

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine

from pretrain.checkpoint import Keep, Snapshot, take_snapshot, write_snapshot
from pretrain.checkpoint_reader import CheckpointError

RETRY_SECONDS = 60.0  # between a write that failed and the next, with the state of then
LAST_ATTEMPTS, LAST_PAUSE = 3, 5.0  # where the run ends: nothing comes after, and who sent a signal may not wait long
EXIT_SECONDS = 600.0  # for a write under way, where the run ends with an error
WRITE_TIMEOUT = timedelta(hours=1)  # for ranks that write more slowly than others


class CheckpointSaver:
    """Saves to `directory`, one checkpoint at a time. Made and used by every rank alike. At the end of its context a write under way ends.

    Attributes:
        saved_step: of the newest checkpoint that was written, or that the run was started from; 0 at a fresh start.
    """

    def __init__(self, directory: Path, keep: Keep, saved_step: int, warn: Callable[[str], None]) -> None:
        self.saved_step = saved_step
        self._warn = warn
        self._directory, self._keep = directory, keep
        self._group = torch.distributed.new_group(backend="gloo", timeout=WRITE_TIMEOUT)
        self._thread: threading.Thread | None = None
        self._failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self._retry_at: float | None = None  # time.monotonic()

    def __enter__(self) -> "CheckpointSaver":
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:  # other ranks may wait for this one's part
            self._thread.join(EXIT_SECONDS)

    def save(
        self,
        engine: DeepSpeedEngine,
        progress: dict[str, Any],
        config: dict[str, Any],
        identity: dict[str, Any],
        *,
        copying: Callable[[], None] = lambda: None,
    ) -> tuple[float, int]:
        """Copies the state and begins to write it, after the end of a write under way; `copying` is told between the two.

        Returns:
            the seconds that this took, and the bytes copied on this rank.
        """
        begin = time.perf_counter()
        self.wait()
        copying()
        snapshot = take_snapshot(engine, progress, config, identity)
        self._retry_at = None
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint", daemon=True)
        self._thread.start()
        return time.perf_counter() - begin, snapshot.bytes

    def save_last(self, engine: DeepSpeedEngine, progress: dict[str, Any], config: dict[str, Any], identity: dict[str, Any]) -> None:
        """Saves and waits until it is written, with several attempts.

        Raises:
            CheckpointError: on every rank, when none succeeded.
        """
        self.wait()
        self.warn_of_failures()
        if self.saved_step == progress["step"]:
            return
        for attempts_left in reversed(range(LAST_ATTEMPTS)):
            self.save(engine, progress, config, identity)
            self.wait()
            failure = self.warn_of_failures(f"It is tried again in {LAST_PAUSE:g} s." if attempts_left else "That was the last attempt.")
            if failure is None:
                return
            if attempts_left:
                time.sleep(LAST_PAUSE)
        raise CheckpointError(f"{failure}; after {LAST_ATTEMPTS} attempts the run ends without step {progress['step']}")

    def warn_of_failures(self, then: str = "It is tried again soon.") -> str | None:
        """Says what went wrong with the writes that have ended since the last time, and what comes `then`; returns what went wrong with
        the last one."""
        failure = None
        while not self._failures.empty():
            error = self._failures.get()
            if not isinstance(error, CheckpointError):
                raise error
            failure = str(error)
            self._warn(f"NOT SAVED: {failure}. {then}")
            self._retry_at = time.monotonic() + RETRY_SECONDS
        return failure

    def wants_retry(self) -> bool:
        """Whether it is time to save again after a failure; ranks may see it at different times."""
        return self._retry_at is not None and time.monotonic() >= self._retry_at

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, snapshot: Snapshot) -> None:
        try:
            write_snapshot(snapshot, self._directory, self._keep, self._group)
            self.saved_step = snapshot.manifest["step"]
        except BaseException as error:
            self._failures.put(error)
