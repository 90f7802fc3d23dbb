"""Processes that work for a command: results in order, and none of them outlives it."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def start_worker() -> None:
    """To be called first in a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool's idle worker does not see that its parent was killed; it would wait forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def in_order(function: Callable[[T], R], jobs: Iterable[T], processes: int) -> Iterator[Iterator[R]]:
    """`map(function, jobs)`, a few jobs ahead in `processes` processes (1: this process). Left early, it ends them at once.

    Raises:
        BrokenProcessPool: from the iterator, when a process died.
    """
    if processes == 1:
        yield map(function, jobs)
        return
    before = multiprocessing.active_children()
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), start_worker)
    try:
        yield _results(pool, function, jobs, ahead=2 * processes)
    except BaseException:
        for process in multiprocessing.active_children():
            if process not in before:
                process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _results(pool: ProcessPoolExecutor, function: Callable[[T], R], jobs: Iterable[T], ahead: int) -> Iterator[R]:
    waiting: deque[Future[R]] = deque()
    for job in jobs:
        with _interrupts_delayed():  # also in a process that this starts, until it ignores them
            waiting.append(pool.submit(function, job))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@contextmanager
def _interrupts_delayed() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
