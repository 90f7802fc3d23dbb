"""Starts real ranks for tests: one process each, over gloo on this machine.

`run_ranks(function, world_size, *args)` calls a module-level function in every rank and returns their results in rank
order. It never leaves a process behind: the first rank that fails, or the time limit, ends them all. The ranks do not
initialise torch.distributed; the function does that, from the usual environment variables. They are forked from a process
that has imported the trainer and done nothing else, which saves each of them the 5 seconds of that. So they share the seed
of string hashes, and whatever depends on the order of a set does not show; in tests/distributed/launching.py it does.
"""

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

REPOSITORY = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.02
SETTING = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}  # what torch and DeepSpeed look at when they are imported
OUTPUT_SHOWN = 6000  # characters at the end of a failed rank's output


class RankError(RuntimeError):
    """A rank raised, died or did not end in time; the message holds the end of its output, traceback included."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 240, env: dict[str, str] | None = None
) -> list[Any]:
    """Calls `function(*args)` in `world_size` new processes and returns what each returned, by rank.

    `function` must be importable (defined at the top of a module under the repository); arguments and results are
    pickled. Each process has RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
    DS_ACCELERATOR=cpu and OMP_NUM_THREADS=1; `env` adds to them (too late for what is read at an import). After `timeout`
    seconds every rank prints the stacks of its threads.

    Raises:
        RankError: a rank failed or the time ran out. All ranks are dead when it is raised.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ranks_") as scratch:
        folder = Path(scratch)
        (folder / "job").write_bytes(pickle.dumps((_module(function), function.__name__, args, timeout)))
        ranks = [_start(folder, rank, world_size, port, env or {}) for rank in range(world_size)]
        try:
            _wait(ranks, folder, timeout)
        finally:
            for process in ranks:
                _kill(process)
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world_size)]


def trainer_processes() -> ForkServerContext:
    """Whose processes need not import the trainer again."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pretrain.train"])
    with mock.patch.dict(os.environ, SETTING):
        forkserver.ensure_running()
    return context


def be_as_started(environment: dict[str, str], output: Path) -> None:
    """Makes one of those processes like one that was started with this environment, its output added to a file."""
    multiprocessing.set_start_method(None, force=True)  # or its data workers would be those of a fork server of their own
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def run_trainer(options: list[str], environment: dict[str, str], output: Path) -> None:
    """`python pretrain/train.py options` in one of those processes, which ends with it; it leads a session, as a launcher's ranks do."""
    os.setsid()
    os.chdir(REPOSITORY)
    be_as_started(environment, output)
    sys.argv = ["pretrain/train.py", *options]
    from pretrain.train import main

    try:
        main()
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        raise


def _module(function: Callable[..., Any]) -> str:
    """Where to import it from, also in a script started by `python -m`."""
    spec = sys.modules["__main__"].__spec__
    return spec.name if function.__module__ == "__main__" and spec is not None else function.__module__


def free_port() -> int:
    """A port that nothing listens on, and that nobody is given for a connection before it is used: other tests run meanwhile."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", random.randrange(15_000, 32_000)))  # Linux gives connections 32768 to 60999
            return probe.getsockname()[1]


def _start(folder: Path, rank: int, world_size: int, port: int, env: dict[str, str]) -> ForkServerProcess:
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    process = trainer_processes().Process(target=_rank_main, args=(folder, os.environ | SETTING | variables | env))
    process.start()
    return process


def _wait(ranks: list[ForkServerProcess], folder: Path, timeout: float) -> None:
    """Returns when every rank has ended well. Of ranks that failed together, the first to report is the cause."""
    deadline = time.monotonic() + timeout + 5  # the ranks' own stack dumps come at `timeout`
    while any(process.exitcode is None for process in ranks):
        if any(process.exitcode for process in ranks):
            break
        if time.monotonic() > deadline:
            raise RankError(f"no end after {timeout} s\n" + "\n".join(_output(folder, rank) for rank in range(len(ranks))))
        time.sleep(POLL_SECONDS)
    failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
    if failed:
        first = min(failed, key=lambda rank: _failure_time(folder, rank))
        code = ranks[first].exitcode or 0
        reason = f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        raise RankError(f"rank {first} {reason}\n{_output(folder, first)}")


def _failure_time(folder: Path, rank: int) -> float:
    """When the rank raised. A rank that died without a word is the likeliest cause of the others' errors: 0."""
    report = folder / f"failed{rank}"
    return report.stat().st_mtime if report.exists() else 0.0


def _output(folder: Path, rank: int) -> str:
    text = (folder / f"output{rank}").read_text(errors="replace")
    return f"---- output of rank {rank} ----\n{text[-OUTPUT_SHOWN:]}"


def _kill(process: ForkServerProcess) -> None:
    assert process.pid
    with contextlib.suppress(ProcessLookupError):  # it and its children may have ended, or it leads no session yet
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _rank_main(folder: Path, environment: dict[str, str]) -> None:
    """The rank's side: run the job and leave its result. os._exit skips gloo's threads, which may wait for dead ranks."""
    os.setsid()  # so that a rank's own children (data workers) end with it
    os.chdir(REPOSITORY)
    rank = environment["RANK"]
    be_as_started(environment, folder / f"output{rank}")
    module, name, args, timeout = pickle.loads((folder / "job").read_bytes())
    faulthandler.dump_traceback_later(timeout)
    try:
        result = getattr(importlib.import_module(module), name)(*args)
        (folder / f"result{rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        (folder / f"failed{rank}").touch()
        traceback.print_exc()
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
