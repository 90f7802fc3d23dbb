"""What preflight.py checks. A check has two parts: `gather` finds facts on a rank, `judge` compares all ranks' facts on rank 0.

A judge needs no ranks: facts in, findings out. A gather that raises is a failure of its rank, whose message names the remedy; one that
hangs is, too. What reads a config, data or GPUs asks the code that training asks.
"""

import hashlib
import os
import platform
import resource
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from model.apex import nvidia_apex_available
from model.ops.build import find
from pretrain.agreement import settings
from pretrain.config import RunConfig
from pretrain.ds_config import load_ds_config
from pretrain.sources import open_sources
from pretrain.topology import Topology

PACKAGES = ("model", "pretrain", "tokenizer", "tools", "launchers")
SOURCES = (".py", ".cpp", ".cu", ".h")
RELEASES = ("torch", "deepspeed", "megatron-core", "numpy", "webdataset", "sentencepiece", "jsonargparse", "fsspec")
BYTES_A_PARAMETER = 12  # of a checkpoint: fp32 master and two moments
FILES_A_RANK = 32  # NCCL's bootstrap fails with 1,024 open files at 32 ranks
CARD_SECONDS = 20  # for nvidia-smi, which takes some without its persistence daemon
STALE_SECONDS = 600  # of an extension's lock
SHOWN = 5  # findings of one check
GIB = 2**30


class Place(NamedTuple):
    """A rank and where it runs."""

    rank: int
    local_rank: int
    node: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node}"


class Level(IntEnum):
    NOTE = 0
    WARNING = 1  # the run may start
    FAILURE = 2


class Finding(NamedTuple):
    level: Level
    where: str  # ranks and nodes
    problem: str
    remedy: str = ""


Facts = Mapping[Place, Any]


@dataclass
class Job:
    """This rank's view of the job that is checked."""

    topology: Topology
    place: Place
    config: RunConfig | None
    ds_config: Path | None
    config_error: str = ""
    places: Sequence[Place] = ()  # all ranks, in order; known to checks that all ranks make together
    store: dist.Store = field(default_factory=dist.HashStore)  # of the whole job
    stage: str = ""  # what it is at, for the message if it hangs

    def run_config(self) -> RunConfig:
        if self.config is None:
            raise NotApplicableError
        return self.config


class NotApplicableError(Exception):
    """There is nothing to gather on this rank."""


@dataclass(frozen=True)
class Check:
    name: str
    gather: Callable[[Job], Any]
    judge: Callable[[Facts], list[Finding]] = lambda facts: []  # where gather says all
    once_a_node: bool = False
    together: bool = False  # all ranks make it at once, after the others


def where(places: Sequence[Place]) -> str:
    """`ranks 0-3, 7 on gpu1, rank 8 on gpu2`."""
    by_node: dict[str, list[int]] = defaultdict(list)
    for place in sorted(places):
        by_node[place.node].append(place.rank)
    parts = []
    for node, ranks in by_node.items():
        starts = [rank for rank in ranks if rank - 1 not in ranks]
        ends = [rank for rank in ranks if rank + 1 not in ranks]
        spans = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
        parts.append(f"rank{'s' * (len(ranks) > 1)} {spans} on {node}")
    return ", ".join(parts[:SHOWN]) + (f" and {len(parts) - SHOWN} more nodes" if len(parts) > SHOWN else "")


def grouped(values: Mapping[Place, object]) -> list[tuple[str, list[Place]]]:
    """The places of each value; the most common value first, and of equally common ones the lowest rank's."""
    groups: dict[str, list[Place]] = defaultdict(list)
    for place, value in sorted(values.items(), key=lambda item: item[0]):
        groups[str(value)].append(place)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[1][0]))


def differences(facts: Facts, remedy: str, level: Level = Level.FAILURE) -> list[Finding]:
    found = []
    for name in dict.fromkeys(name for fact in facts.values() for name in fact):
        (usual, usual_places), *others = grouped({place: fact.get(name, "absent") for place, fact in facts.items()})
        for value, places in others:
            found.append(Finding(level, where(places), f"{name} is {value}, but {usual} for {where(usual_places)}", remedy))
    return few(found)


def same(remedy: str, level: Level = Level.FAILURE) -> Callable[[Facts], list[Finding]]:
    """A judge of facts that are dictionaries: who deviates from the others in what."""
    return lambda facts: differences(facts, remedy, level)


def by_problem(level: Level, remedy: str, problems: Mapping[Place, str]) -> list[Finding]:
    """One finding for all places with the same problem."""
    return few([Finding(level, where(places), problem, remedy) for problem, places in grouped(problems)])


def few(found: list[Finding]) -> list[Finding]:
    left_out = found[SHOWN:]
    more = [Finding(max(finding.level for finding in left_out), "", f"and {len(left_out)} more of this kind")] if left_out else []
    return found[:SHOWN] + more


# ---- the same everywhere ----


def gather_code(job: Job) -> dict[str, str]:
    """A hash of each source file that `import` would find."""
    hashes = {}
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise ValueError(f"the package {package} cannot be imported. Install the repository on every node: pip install -e .")
        root = Path(spec.origin).parent
        for path in sorted(root.rglob("*")):
            if path.suffix in SOURCES:
                hashes[f"{package}/{path.relative_to(root)}"] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return hashes


def gather_versions(job: Job) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in RELEASES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            raise ValueError(f"{package} is not installed. Install the repository on every node: pip install -e .") from None
    return found | {"CUDA of torch": str(torch.version.cuda)}


def gather_config(job: Job) -> dict[str, Any]:
    if job.config is None or job.ds_config is None:
        raise ValueError(job.config_error)
    data_parallel = job.config.data_parallel_size(job.topology.world_size)
    return settings(job.config, load_ds_config(job.ds_config, job.config, data_parallel))


def gather_data(job: Job) -> dict[str, str]:
    return {f"dataset {name}": index.fingerprint for name, index in open_sources(job.run_config().data).items()}


def gather_apex(job: Job) -> dict[str, str]:
    return {"NVIDIA apex": "there" if nvidia_apex_available() else "absent"}


def gather_operators(job: Job) -> dict[str, str]:
    config = job.run_config()
    library = find()
    return {"wanted": config.compute.gate_ops, "the library of fused gate operators": library.parent.name if library else "absent"}


def judge_operators(facts: Facts) -> list[Finding]:
    remedy = "Build them where all nodes see them (python -m model.ops.build), or set compute.gate_ops to ref."
    fused = {place: {name: fact[name] for name in fact if name != "wanted"} for place, fact in facts.items() if fact["wanted"] != "ref"}
    found = differences(fused, remedy)
    absent = [place for place, fact in fused.items() if "absent" in fact.values()]
    if absent and not found:
        demanded = [place for place in absent if facts[place]["wanted"] == "fused"]
        level = Level.FAILURE if demanded else Level.NOTE
        found.append(Finding(level, where(demanded or absent), "no fused gate operators are built: plain PyTorch is slower", remedy))
    return found


# ---- the machine ----


def gather_gpus(job: Job) -> dict[str, Any]:
    fact: dict[str, Any] = {"seen": torch.cuda.device_count(), "needed": job.topology.local_world_size}
    if job.place.local_rank == 0 and shutil.which("nvidia-smi"):
        fact["cards"] = _nvidia_smi("--query-gpu=name,memory.total,driver_version,ecc.errors.uncorrected.volatile.total")
        fact["processes"] = _nvidia_smi("--query-compute-apps=pid,process_name,used_memory")
    return fact


def _nvidia_smi(query: str) -> list[list[str]]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = ["-i", visible] if visible and "MIG" not in visible else []
    command = ["nvidia-smi", query, "--format=csv,noheader", *chosen]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=CARD_SECONDS)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        said = " ".join((error.stdout or "").split()) if isinstance(error.stdout, str) else ""
        raise RuntimeError(f"`{' '.join(command)}` fails or hangs ({said or error}). Drain the node, and restart its driver.") from error
    return [line.split(", ") for line in shown.stdout.splitlines() if line.strip()]


def judge_gpus(facts: Facts) -> list[Finding]:
    if not any(fact["seen"] or fact.get("cards") for fact in facts.values()):
        return [Finding(Level.NOTE, "", "no GPUs: the ranks compute on CPUs, over gloo")]
    found = []
    for place, fact in facts.items():
        seen, needed, cards = fact["seen"], fact["needed"], fact.get("cards", [])
        problem = f"torch sees {seen} GPUs for the {needed} ranks of the node"
        if seen < needed:
            remedy = "As many ranks as GPUs a node, each seeing all of them (srun: --gres=gpu:N, not --gpus-per-task)."
            if len(cards) >= needed:
                remedy = "nvidia-smi shows more: install a torch for this driver's CUDA, and look at CUDA_VISIBLE_DEVICES."
            found.append(Finding(Level.FAILURE, str(place), problem, remedy))
        elif seen > needed and place.local_rank == 0:
            found.append(Finding(Level.WARNING, str(place), problem, "Start more ranks a node; the others stay idle."))
        for number, (name, *_, errors) in enumerate(cards):
            if errors.isdigit() and errors != "0":
                problem = f"GPU {number} ({name}) has uncorrected ECC errors: {errors}"
                found.append(Finding(Level.FAILURE, str(place), problem, "Exclude the node (srun --exclude), and have the GPU reset."))
        for pid, name, memory in fact.get("processes", []):
            if "nvidia-cuda-mps" not in name:
                problem = f"process {pid} ({name}) is at work on a GPU, in {memory}"
                found.append(Finding(Level.FAILURE, str(place), problem, f"End it (kill {pid}) or exclude the node (srun --exclude)."))
    cards_of = {place: fact["cards"] for place, fact in facts.items() if "cards" in fact}
    models = {place: {"the GPUs' model": _kinds(card[:2] for card in cards)} for place, cards in cards_of.items()}
    drivers = {place: {"the GPUs' driver": _kinds(card[2:3] for card in cards)} for place, cards in cards_of.items()}
    found += differences(models, "Ask Slurm for one kind of GPU: --constraint or --gres=gpu:TYPE:N.")
    return found + differences(drivers, "Have the drivers made the same.", Level.WARNING)


def _kinds(rows: Iterable[list[str]]) -> str:
    return " and ".join(sorted({" ".join(row) for row in rows}))


def gather_limits(job: Job) -> dict[str, Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    adapters = Path("/sys/class/infiniband")
    return {
        "files": _unlimited(soft),
        "most files": _unlimited(hard),
        "needed files": 256 + FILES_A_RANK * job.topology.world_size,
        "locked": _unlimited(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        "infiniband": adapters.is_dir() and any(adapters.iterdir()),
        "core": _unlimited(resource.getrlimit(resource.RLIMIT_CORE)[0]),
    }


def _unlimited(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def judge_limits(facts: Facts) -> list[Finding]:
    files, locked, core = {}, {}, {}
    for place, fact in facts.items():
        if fact["files"] < fact["needed files"]:
            files[place] = f"{fact['files']} open files are allowed (hard limit {fact['most files']}), and {fact['needed files']} needed"
        if fact["infiniband"] and fact["locked"] < GIB:
            locked[place] = f"{fact['locked'] // 1024} KiB of memory may be locked: InfiniBand cannot register its buffers"
        if fact["core"]:
            core[place] = "a crash would write each rank's memory to a core file"
    return [
        *by_problem(Level.FAILURE, '`ulimit -n "$(ulimit -Hn)"` before srun; if too low still, LimitNOFILE= of slurmd.', files),
        *by_problem(Level.FAILURE, "`ulimit -l unlimited` before srun; if refused, LimitMEMLOCK=infinity of slurmd.", locked),
        *by_problem(Level.WARNING, "`ulimit -c 0` before srun.", core),
    ]


def gather_locks(job: Job) -> list[tuple[str, float, bool]]:
    """Locks of builds: path, age in seconds, and whether torch would wait for its removal for ever."""
    home = Path.home()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    extensions = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    found = []
    for root, pattern, for_ever in ((extensions, "*/lock", True), (extensions, "*/*/lock", True), (triton, "**/*.lock", False)):
        for path in root.glob(pattern):
            with suppress(FileNotFoundError):  # its build has just ended
                found.append((str(path), time.time() - path.stat().st_mtime, for_ever))
    return found


def judge_locks(facts: Facts) -> list[Finding]:
    found = []
    for place, locks in facts.items():
        for path, age, for_ever in locks:
            if age > STALE_SECONDS:
                waits = "a build that meets it waits for ever" if for_ever else "a build may wait for it"
                problem = f"{path} is {age / 60:.0f} minutes old, left by a build that was killed: {waits}"
                found.append(Finding(Level.FAILURE if for_ever else Level.WARNING, str(place), problem, f"rm {path}"))
    return few(found)


def gather_port(job: Job) -> None:
    """Whether the training step can open its port. Ours is that of this step, which is open; srun's next step has the next one."""
    if job.topology.rank or job.topology.launcher != "srun" or os.environ.get("MASTER_PORT"):
        raise NotApplicableError
    following = 10000 + (job.topology.master_port + 1 - 10000) % 20000
    replace(job.topology, master_port=following).check_port_free()


# ---- disks ----


def gather_disk(job: Job) -> dict[str, Any]:
    config = job.run_config()
    run_dir = config.run_dir.absolute()
    there = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    keep, apart, every = config.checkpoint.keep, config.checkpoint.keep_every_steps, config.checkpoint.every_steps
    steps = -(-config.schedule.total_tokens // config.tokens_per_step)
    return {
        "directory": str(there),
        "free": shutil.disk_usage(there).free,
        "checkpoint": BYTES_A_PARAMETER * config.model.parameter_count,
        "saved": len(list(run_dir.glob("checkpoints/step_*"))),
        "soon": (keep or 1) + 1,  # with the one that is being written
        "in the end": steps // every + 1 if keep is None else keep + 1 + (steps // apart if apart else 0),
    }


def judge_disk(facts: Facts) -> list[Finding]:
    problems: dict[Level, dict[Place, str]] = {Level.FAILURE: {}, Level.WARNING: {}}
    for place, fact in facts.items():
        for level, count in ((Level.FAILURE, fact["soon"]), (Level.WARNING, fact["in the end"])):
            to_come, size = max(count - fact["saved"], 1), fact["checkpoint"]
            if fact["free"] < to_come * size:
                free = f"{fact['directory']} has {fact['free'] / GIB:.3f} GiB free"
                problems[level][place] = f"{free}; {to_come} more checkpoints of {size / GIB:.3f} GiB are to come"
                break
    remedy = "Free some, set checkpoint.keep, or choose another disk: --run_dir DIR."
    return [finding for level, of_level in problems.items() for finding in by_problem(level, remedy, of_level)]
