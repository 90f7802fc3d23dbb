"""The checks of preflight.py that all ranks make together: clocks, shared files, and the links between all pairs of ranks.

As in checks.py, but that the gatherers of all ranks meet in the job's store. Each waits for the others within limits, and says in
`job.stage` what it waits for.
"""

import errno
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from launchers.checks import Facts, Finding, Job, Level, NotApplicableError, Place, by_problem, few

SEEN_SECONDS = 10  # within which a file must be seen by all ranks
CLOCK_WARNING, CLOCK_FAILURE = 1.0, 60.0  # seconds; logs become hard to compare; credentials (munge, Kerberos) begin to be refused
CLOCK_TURNS = 3  # the quickest counts
EXCHANGED_BYTES = 4 * 2**20
EXCHANGES = 4  # the fastest counts; the first connects
SLOW = 3  # a link is slow at less than 1/SLOW of the median of its kind, within a node or between nodes


def gather_shared(job: Job) -> dict[str, Any]:
    """Rank 0 writes a file in run_dir, then renames another over it; the others read all the while. All ranks also write one each."""
    store, others = dist.PrefixStore("shared", job.store), [str(place.rank) for place in job.places if place.rank]
    first, second = b"1" * 2**18, b"2" * 2**18
    if job.place.rank:
        store.wait(["file"], timedelta(seconds=SEEN_SECONDS))
        path = Path(store.get("file").decode())
        if path == Path():
            raise NotApplicableError  # rank 0 has said why
        return _read_shared(path, first, second, store, str(job.place.rank))
    path = Path()
    try:
        job.run_config().run_dir.mkdir(parents=True, exist_ok=True)
        path = job.run_config().run_dir.absolute() / f".preflight_{secrets.token_hex(4)}"
        beside = path.with_suffix(".next")
        path.write_bytes(first)
        beside.write_bytes(second)
        store.set("file", str(path))
        with suppress(dist.DistStoreError):  # who does not see it says so
            store.wait([f"seen/{rank}" for rank in others], timedelta(seconds=SEEN_SECONDS))
        beside.replace(path)
        with suppress(dist.DistStoreError):
            store.wait([f"done/{rank}" for rank in others], timedelta(seconds=2 * SEEN_SECONDS))
    except OSError as error:
        raise ValueError(f"run_dir cannot be written ({error}). Choose another: --run_dir DIR.") from error
    finally:
        store.set("file", "")  # to those that did not get so far
        for left in path.parent.glob(f"{path.name}*") if path.name else ():
            left.unlink(missing_ok=True)
    return {"directory": str(path.parent), "seen": True, "renamed": True, "torn": ""}


def _read_shared(path: Path, first: bytes, second: bytes, store: dist.Store, rank: str) -> dict[str, Any]:
    fact = {"directory": str(path.parent), "seen": False, "renamed": False, "torn": ""}
    deadline = time.monotonic() + 2 * SEEN_SECONDS
    while not fact["renamed"] and time.monotonic() < deadline:
        try:
            content = path.read_bytes()
        except OSError as error:
            # A stale handle is NFS's way to say that the file was replaced while it was read.
            if fact["seen"] and error.errno != errno.ESTALE:
                fact["torn"] = str(error)
            content = b""
        if content == first and not fact["seen"]:
            fact["seen"] = True
            store.set(f"seen/{rank}", "")
        elif content == second:
            fact["renamed"] = True
        elif fact["seen"] and content not in (b"", first):
            fact["torn"] = f"neither of them, {len(content)} bytes"
        time.sleep(0.02)
    try:
        if fact["seen"]:
            own = path.with_suffix(f".rank{rank}")
            own.write_bytes(first)
            own.unlink()
    except OSError as error:
        raise ValueError(f"run_dir is seen, but cannot be written ({error}). Look at how this node mounts it.") from error
    finally:
        store.set(f"done/{rank}", "")
    return fact


def judge_shared(facts: Facts) -> list[Finding]:
    problems = {}
    for place, fact in facts.items():
        if fact["torn"]:
            problems[place] = f"{fact['directory']}: while rank 0 renamed a file over another, this was read: {fact['torn']}"
        elif not fact["seen"]:
            problems[place] = f"a file that rank 0 wrote in {fact['directory']} was not seen within {SEEN_SECONDS} s"
        elif not fact["renamed"]:
            problems[place] = f"{fact['directory']}: a file that was renamed over another was not seen within {SEEN_SECONDS} s"
    remedy = "Put run_dir on a file system that all nodes mount: --run_dir DIR. If it is, look at its mount options (NFS: actimeo, noac)."
    return by_problem(Level.FAILURE, remedy, problems)


# ---- between the nodes ----


def gather_clock(job: Job) -> tuple[float, float]:
    """How many seconds this node's clock is ahead of rank 0's, and how wrong that may be: half a round trip. On a node's first rank."""
    store, firsts = dist.PrefixStore("clock", job.store), [place for place in job.places[1:] if place.local_rank == 0]
    if job.place.rank == 0:
        for place in firsts:
            with suppress(dist.DistStoreError):  # it is told that it does not answer
                for turn in map(str, range(CLOCK_TURNS)):
                    store.set(f"{place.rank}/{turn}/turn", "")
                    store.wait([f"{place.rank}/{turn}/asked"], timedelta(seconds=5))
                    store.set(f"{place.rank}/{turn}/time", repr(time.time()))
    if job.place not in firsts:
        raise NotApplicableError
    answers: list[tuple[float, float]] = []
    for turn in map(str, range(CLOCK_TURNS)):
        key = f"{job.place.rank}/{turn}"
        store.wait([f"{key}/turn"], timedelta(seconds=20 + len(firsts) / 20))
        before = time.time()
        store.set(f"{key}/asked", "")
        store.wait([f"{key}/time"], timedelta(seconds=5))
        of_first, after = float(store.get(f"{key}/time")), time.time()
        answers.append(((after - before) / 2, (before + after) / 2 - of_first))
    error, ahead = min(answers)
    return ahead, error


def judge_clock(facts: Facts) -> list[Finding]:
    found = []
    for place, (ahead, error) in facts.items():
        if abs(ahead) - error > CLOCK_WARNING:
            level = Level.FAILURE if abs(ahead) - error > CLOCK_FAILURE else Level.WARNING
            problem = f"the clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} that of rank 0 (measured to {error:.3f} s)"
            found.append(Finding(level, str(place), problem, "Have its time set: `chronyc tracking` or `timedatectl` on that node."))
    return found


def rounds(world_size: int) -> Iterator[list[int]]:
    """A schedule in which each two ranks meet once, and each rank at most one other at a time: by rank, whom it meets (itself: nobody)."""
    even = world_size + world_size % 2
    for turn in range(even - 1):
        peers = list(range(world_size))
        pairs = [(turn, even - 1)] + [((turn + k) % (even - 1), (turn - k) % (even - 1)) for k in range(1, even // 2)]
        for a, b in pairs:
            if max(a, b) < world_size:
                peers[a], peers[b] = b, a
        yield peers


def gather_links(job: Job) -> dict[Place, float]:
    """Bytes a second, both ways at once, with each higher rank. All ranks join one group; then a rank talks to one other at a time."""
    rank, world_size, cuda = job.topology.rank, job.topology.world_size, torch.cuda.is_available()
    device = torch.device("cuda", job.topology.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    job.stage = "all ranks connect; see the firewall, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; NCCL_DEBUG=INFO tells more"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.PrefixStore("links", job.store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(hours=1) if cuda else timedelta(seconds=15),  # NCCL's own watchdog would end the process before it has reported
        device_id=device if cuda else None,
    )
    ours, theirs = (torch.full((EXCHANGED_BYTES // 4,), rank, dtype=torch.int32, device=device) for _ in range(2))
    rates: dict[Place, float] = {}
    for peers in [*rounds(world_size)] * 2:  # a passing disturbance is over the second time
        job.stage = "waits for other pairs"
        try:
            dist.all_reduce(torch.zeros(1, device=device))
        except RuntimeError as error:  # the same words on all of these ranks, so that they are told in one line
            raise RuntimeError("the exchange of another pair failed or hung") from error
        peer = job.places[peers[rank]]
        if peer.rank == rank:
            continue
        job.stage = f"exchange with {peer}; see cables and switch ports of both nodes, and the firewall between them"
        rate = EXCHANGED_BYTES / min(_exchange(ours, theirs, peer.rank) for _ in range(EXCHANGES))
        if not bool((theirs == peer.rank).all()):
            raise RuntimeError("other bytes arrived than were sent")
        if rank < peer.rank:
            rates[peer] = max(rate, rates.get(peer, 0.0))
    return rates


def _exchange(ours: torch.Tensor, theirs: torch.Tensor, peer: int) -> float:
    """Seconds. As a batch, NCCL uses the group's connections, and does not make a communicator for each pair."""
    start = time.perf_counter()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, ours, peer), dist.P2POp(dist.irecv, theirs, peer)]):
        work.wait()
    if ours.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def judge_links(facts: Facts) -> list[Finding]:
    kinds: dict[str, dict[tuple[Place, Place], float]] = {"within a node": {}, "between nodes": {}}
    for place, rates in facts.items():
        for peer, rate in rates.items():
            kinds["within a node" if peer.node == place.node else "between nodes"][place, peer] = rate
    found = []
    for kind, links in kinds.items():
        if not links:
            continue
        usual = median(links.values())
        found.append(
            Finding(Level.NOTE, "", f"{kind} {min(links.values()) / 1e9:.2f} GB/s or more, median {usual / 1e9:.2f}, pairs: {len(links)}")
        )
        slow = sorted((rate, pair) for pair, rate in links.items() if rate < usual / SLOW)
        common = set.intersection(*({a.node, b.node} for _, (a, b) in slow)) if slow else set()
        remedy = (
            "See the link's speed and errors (ibstat, ethtool; within a node: nvidia-smi topo -m), or exclude the node (srun --exclude)."
        )
        if kind == "between nodes" and len(slow) > 1 and len(common) == 1:
            remedy = f"All slow links are of {common.pop()}. {remedy}"
        told = [(f"{a} <-> {b}", f"{rate / 1e9:.3f} GB/s; the median {kind} is {usual / 1e9:.3f}") for rate, (a, b) in slow]
        found += few([Finding(Level.WARNING, pair, problem, remedy) for pair, problem in told])
    return found
