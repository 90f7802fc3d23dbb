"""Is this job fit to start? With the arguments of train.py, before it: `srun ... python launchers/preflight.py --config X --ds_config Y`.

Runs under every launcher that train.py knows, and alone. Each rank gathers facts, rank 0 compares them and prints all that it finds, with
nodes, ranks and remedies. Exit code 0: fit to start, perhaps with warnings; 2: not fit. Nothing waits without a limit: a check runs in
a thread that is left behind when it hangs, and who does not arrive or answer is named.
"""

import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # else pages of C++ frames surround what is said here

import torch.distributed as dist

from launchers import checks, checks_together
from launchers.checks import Check, Finding, Job, Level, NotApplicableError, Place, by_problem, same, where
from pretrain.config import parse_arguments
from pretrain.shards import DatasetError
from pretrain.topology import Topology, tasks_on_node

CHECKS = (
    Check("code", checks.gather_code, same("Bring all nodes to one checkout (git status), best on a file system that they share.")),
    Check("versions", checks.gather_versions, same("Use one virtual environment or container on all nodes.")),
    Check("config", checks.gather_config, same("Start all ranks with the same command and config files.")),
    Check("data", checks.gather_data, same("Copy the dataset again to the nodes that deviate, or put it where all nodes see it.")),
    Check("apex", checks.gather_apex, same("Training does not use it, but the environments differ.", Level.WARNING)),
    Check("gate operators", checks.gather_operators, checks.judge_operators),
    Check("GPUs", checks.gather_gpus, checks.judge_gpus),
    Check("limits", checks.gather_limits, checks.judge_limits),
    Check("build locks", checks.gather_locks, checks.judge_locks, once_a_node=True),
    Check("port", checks.gather_port),
    Check("disk space", checks.gather_disk, checks.judge_disk, once_a_node=True),
    Check("clock", checks_together.gather_clock, checks_together.judge_clock, together=True),
    Check("shared files", checks_together.gather_shared, checks_together.judge_shared, together=True),
    Check("links", checks_together.gather_links, checks_together.judge_links, together=True),
)
ARRIVAL_SECONDS = 60.0
CHECK_SECONDS = 30.0
REPORT_SECONDS = 15.0  # what ranks may lag behind one another, and what rank 0 may take to compare and print
UNFIT = 2
MARKS = {Level.NOTE: "ok", Level.WARNING: "WARN", Level.FAILURE: "FAIL"}


class Failure(NamedTuple):
    """In place of a fact: why a rank has none."""

    problem: str


def main(arguments: list[str] | None = None, arrival_seconds: float = ARRIVAL_SECONDS) -> int:
    """The exit code. Threads may be left behind: end with os._exit."""
    start = time.monotonic()
    try:
        topology = Topology.from_environment(os.environ)
    except ValueError as error:
        print(f"FAIL  launch: {socket.gethostname()}: {error}", file=sys.stderr)
        return UNFIT
    place = Place(topology.rank, topology.local_rank, os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    job = Job(topology, place, None, None)
    try:
        job.config, job.ds_config = parse_arguments(arguments)
    except (ValueError, OSError) as error:
        job.config_error = str(error)
    end_after(arrival_seconds + together_seconds(topology.world_size) + 2 * CHECK_SECONDS + 4 * REPORT_SECONDS, place)
    facts = gather_alone(job)
    try:
        job.store = join(topology, arrival_seconds)
        return lead(job, facts, arrival_seconds, start) if topology.rank == 0 else follow(job, facts, arrival_seconds)
    except RuntimeError as error:
        problem = f"rank 0 at {topology.master_addr} no longer answers ({error})" if isinstance(error, dist.DistError) else str(error)
        found = {"meeting": [Finding(Level.FAILURE, str(place), problem)]} | (judge({place: facts}) if topology.rank == 0 else {})
        return report(found, [place], time.monotonic() - start)


# ---- the ranks ----


def join(topology: Topology, seconds: float) -> dist.Store:
    """The store of the job. torchrun's agent holds it already; otherwise rank 0 does.

    Raises:
        RuntimeError: the port is taken, or rank 0 does not answer.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        topology.check_port_free()
        return connect(topology, seconds / 2, serve=topology.rank == 0 and not agent)
    except dist.DistError as error:
        raise RuntimeError(
            f"rank 0 cannot be reached at {topology.master_addr}, port {topology.master_port}, in {seconds:.0f} s ({error}). Did it start? "
            f"Can this node resolve and reach that name (getent hosts {topology.master_addr})? Else set MASTER_ADDR."
        ) from error


def connect(topology: Topology, seconds: float, serve: bool = False) -> dist.Store:
    return dist.PrefixStore(
        "preflight",
        dist.TCPStore(
            topology.master_addr, topology.master_port, is_master=serve, wait_for_workers=False, timeout=timedelta(seconds=seconds)
        ),
    )


def put(store: dist.Store, key: str, value: Any) -> None:
    store.set(key, pickle.dumps(value).hex())


def take(store: dist.Store, key: str) -> Any:
    return pickle.loads(bytes.fromhex(store.get(key).decode()))


def lead(job: Job, facts: dict[str, Any], arrival_seconds: float, start: float) -> int:
    """Rank 0: waits for the others, lets them go on, judges and reports."""
    store, world_size = job.store, job.topology.world_size
    put(store, "arrived/0", job.place)
    places, absent = collect(store, "arrived", range(world_size), arrival_seconds)
    late = {expected_place(rank, places, job.topology): f"has not arrived {arrival_seconds:.0f} s after rank 0" for rank in absent}
    found = {"arrival": by_problem(Level.FAILURE, "Look for an earlier error in its log; else exclude the node (srun --exclude).", late)}
    put(store, "alone/0", facts)
    everyones, silent = collect(store, "alone", places, CHECK_SECONDS + REPORT_SECONDS)
    if not absent and not silent:
        job.places = list(places.values())
        put(store, "go", job.places)
        limit = time.monotonic() + together_seconds(world_size) + REPORT_SECONDS
        put(store, "together/0", gather_together(job))
        more, silent = collect(store, "together", places, limit - time.monotonic())
        everyones = {rank: first | more.get(rank, {}) for rank, first in everyones.items()}
    if silent:
        remedy = "Look at the process there (py-spy dump, /proc/PID/wchan), or exclude the node (srun --exclude)."
        found["answers"] = by_problem(Level.FAILURE, remedy, {places[rank]: "arrived, but then stopped answering" for rank in silent})
    found |= judge({places[rank]: of_rank for rank, of_rank in everyones.items()})
    code = report(found, list(places.values()), time.monotonic() - start)
    put(store, "go", [])
    put(store, "code", code)
    # The others read the code from this process.
    collect(store, "left", [rank for rank in places if rank not in (0, *silent)], 5)
    return code


def follow(job: Job, facts: dict[str, Any], arrival_seconds: float) -> int:
    """The other ranks. What rank 0 waits for, they wait for a little longer."""
    store, rank = job.store, job.topology.rank
    put(store, f"arrived/{rank}", job.place)
    put(store, f"alone/{rank}", facts)
    store.wait(["go"], timedelta(seconds=arrival_seconds + CHECK_SECONDS + 3 * REPORT_SECONDS))
    job.places = take(store, "go")
    if job.places:
        put(store, f"together/{rank}", gather_together(job))
        store.wait(["code"], timedelta(seconds=together_seconds(job.topology.world_size) + 3 * REPORT_SECONDS))
    store.wait(["code"], timedelta(seconds=REPORT_SECONDS))
    code = take(store, "code")
    put(store, f"left/{rank}", None)
    return code


def collect(store: dist.Store, kind: str, ranks: Sequence[int] | Mapping[int, Any], seconds: float) -> tuple[dict[int, Any], list[int]]:
    """What the ranks set within the time, and who did not."""
    deadline = time.monotonic() + seconds
    there: dict[int, Any] = {}
    for rank in ranks:
        try:
            store.wait([f"{kind}/{rank}"], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except dist.DistStoreError:
            continue
        there[rank] = take(store, f"{kind}/{rank}")
    return there, [rank for rank in ranks if rank not in there]


def expected_place(rank: int, places: Mapping[int, Place], topology: Topology) -> Place:
    """Of a rank that has not arrived. Its node is that of the ranks that were started with it, or what Slurm says."""
    size = topology.local_world_size
    nodes = [place.node for place in places.values() if place.rank // size == rank // size]
    return Place(rank, rank % size, nodes[0] if nodes else slurm_node(rank, os.environ) or f"node number {rank // size + 1}")


def slurm_node(rank: int, environ: Mapping[str, str]) -> str | None:
    """The node of a rank, where Slurm distributes them in blocks."""
    nodes, tasks = environ.get("SLURM_STEP_NODELIST"), environ.get("SLURM_STEP_TASKS_PER_NODE")
    if nodes is None or tasks is None or shutil.which("scontrol") is None:
        return None
    shown = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False).stdout.split()
    for number, node in enumerate(shown):
        rank -= tasks_on_node(tasks, number)
        if rank < 0:
            return node
    return None


def end_after(seconds: float, place: Place) -> None:
    """The last resort, where even the store's limits fail: rank 0 is stopped, or its node is gone without a word."""

    def end() -> None:
        print(f"FAIL  {place}: preflight has not ended in {seconds:.0f} s; rank 0 may hang", file=sys.stderr, flush=True)
        os._exit(UNFIT)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


# ---- facts ----


def gather_alone(job: Job) -> dict[str, Any]:
    """The facts that this rank finds by itself; all at once, so that one which hangs does not hold up the others."""
    chosen = [check for check in CHECKS if not check.together and (job.place.local_rank == 0 or not check.once_a_node)]
    return gather(job, chosen, CHECK_SECONDS)


def gather_together(job: Job) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for check in CHECKS:
        if check.together:
            # A connection of its own: one that waits in a hanging check would hold up the report.
            facts |= gather(replace(job, store=connect(job.topology, CHECK_SECONDS)), [check], check_seconds(job.topology.world_size))
    return facts


def check_seconds(world_size: int) -> float:
    return CHECK_SECONDS + world_size / 10


def together_seconds(world_size: int) -> float:
    return check_seconds(world_size) * sum(check.together for check in CHECKS)


def gather(job: Job, chosen: Sequence[Check], seconds: float) -> dict[str, Any]:
    """The facts of some checks, each in its thread."""
    facts: dict[str, Any] = {}
    job.stage = ""

    def run(check: Check) -> None:
        try:
            facts[check.name] = check.gather(job)
        except NotApplicableError:
            facts[check.name] = NotApplicableError
        except Exception as error:
            known = isinstance(error, (ValueError, OSError, RuntimeError, DatasetError))
            text = str(error).partition("\n")[0] if known else repr(error)
            facts[check.name] = Failure(f"{text}{stage(job)}")

    threads = {check.name: threading.Thread(target=run, args=(check,), daemon=True) for check in chosen}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + seconds
    for name, thread in threads.items():
        thread.join(max(deadline - time.monotonic(), 0))
        if thread.is_alive():
            facts[name] = Failure(f"no answer in {seconds:.0f} s; a file system or device of the node may hang{stage(job)}")
    return {name: fact for name, fact in facts.items() if fact is not NotApplicableError}


def stage(job: Job) -> str:
    return f" (at: {job.stage})" if job.stage else ""


# ---- the verdict ----


def judge(facts: Mapping[Place, Mapping[str, Any]]) -> dict[str, list[Finding]]:
    """By check."""
    found: dict[str, list[Finding]] = {}
    for check in CHECKS:
        of_check = {place: of_place[check.name] for place, of_place in facts.items() if check.name in of_place}
        failed = {place: fact.problem for place, fact in of_check.items() if isinstance(fact, Failure)}
        whole = {place: fact for place, fact in of_check.items() if place not in failed}
        if of_check:
            found[check.name] = by_problem(Level.FAILURE, "", failed)
            found[check.name] += check.judge(whole) if whole else []
    return found


def report(found: Mapping[str, Sequence[Finding]], places: Sequence[Place], seconds: float) -> int:
    """Prints; the exit code."""
    nodes = sorted({place.node for place in places})
    print(f"preflight: {where(places)}" if len(nodes) <= checks.SHOWN else f"preflight: {len(places)} ranks on {len(nodes)} nodes")
    for name, findings in found.items():
        told = [finding for finding in findings if finding.level > Level.NOTE]
        for level, place, problem, remedy in told or [Finding(Level.NOTE, "", "; ".join(one.problem for one in findings))]:
            line = ": ".join(part for part in (place, problem) if part)
            print(f"  {MARKS[level]:4}  {name:14}  {line}".rstrip() + (f"\n{'':24}-> {remedy}" if remedy else ""))
    failures, warnings = (
        sum(one.level == level for of_check in found.values() for one in of_check) for level in (Level.FAILURE, Level.WARNING)
    )
    print(
        f"{'not fit' if failures else 'fit'} to start; failures: {failures}, warnings: {warnings} (the checks took {seconds:.1f} s)",
        flush=True,
    )
    return UNFIT if failures else 0


if __name__ == "__main__":
    os._exit(main())
