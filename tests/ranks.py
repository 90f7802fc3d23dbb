"""Starts real ranks for tests: one fresh Python process each, over gloo on this machine.

`run_ranks(function, world_size, *args)` calls a module-level function in every rank and returns their results in rank
order. It never leaves a process behind: the first rank that fails, or the time limit, ends them all. The ranks do not
initialise torch.distributed; the function does that, from the usual environment variables.
"""

import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.05
OUTPUT_SHOWN = 6000  # characters at the end of a failed rank's output


class RankError(RuntimeError):
    """A rank raised, died or did not end in time; the message holds the end of its output, traceback included."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120, env: dict[str, str] | None = None
) -> list[Any]:
    """Calls `function(*args)` in `world_size` fresh processes and returns what each returned, by rank.

    `function` must be importable (defined at the top of a module under the repository); arguments and results are
    pickled. Each process has RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
    DS_ACCELERATOR=cpu and OMP_NUM_THREADS=1; `env` adds to them or replaces them. After `timeout` seconds every rank
    prints the stacks of its threads.

    Raises:
        RankError: a rank failed or the time ran out. All ranks are dead when it is raised.
    """
    port = _free_port()
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


def _module(function: Callable[..., Any]) -> str:
    """Where to import it from, also in a script started by `python -m`."""
    spec = sys.modules["__main__"].__spec__
    return spec.name if function.__module__ == "__main__" and spec is not None else function.__module__


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(folder: Path, rank: int, world_size: int, port: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    with (folder / f"output{rank}").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.ranks", str(folder)],
            cwd=REPOSITORY,
            env=os.environ | variables | env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that a rank's own children (data workers) end with it
        )


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path, timeout: float) -> None:
    """Returns when every rank has ended well. Of ranks that failed together, the first to report is the cause."""
    deadline = time.monotonic() + timeout + 5  # the ranks' own stack dumps come at `timeout`
    while any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks):
            break
        if time.monotonic() > deadline:
            raise RankError(f"no end after {timeout} s\n" + "\n".join(_output(folder, rank) for rank in range(len(ranks))))
        time.sleep(POLL_SECONDS)
    failed = [rank for rank, process in enumerate(ranks) if process.poll()]
    if failed:
        first = min(failed, key=lambda rank: _failure_time(folder, rank))
        code = ranks[first].returncode
        reason = f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        raise RankError(f"rank {first} {reason}\n{_output(folder, first)}")


def _failure_time(folder: Path, rank: int) -> float:
    """When the rank raised. A rank that died without a word is the likeliest cause of the others' errors: 0."""
    report = folder / f"failed{rank}"
    return report.stat().st_mtime if report.exists() else 0.0


def _output(folder: Path, rank: int) -> str:
    text = (folder / f"output{rank}").read_text(errors="replace")
    return f"---- output of rank {rank} ----\n{text[-OUTPUT_SHOWN:]}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it and its children may have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _rank_main(folder: Path) -> None:
    """The rank's side: run the job and leave its result. os._exit skips gloo's threads, which may wait for dead ranks."""
    module, name, args, timeout = pickle.loads((folder / "job").read_bytes())
    rank = os.environ["RANK"]
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


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]))
