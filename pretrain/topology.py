"""Where this process stands in the job: rank, world and rendezvous address, from what the launcher left in the environment.

Understands srun, torchrun, the deepspeed launcher, mpirun (Open MPI, MPICH, Intel MPI) and no launcher at all. Starts nothing
distributed: `Topology.export` writes the variables that torch and DeepSpeed read. An explicit MASTER_ADDR or MASTER_PORT always
wins. Slurm's job and step id give the port, so a requeued job keeps it and two steps of one job do not share one.
"""

import os
import re
import shutil
import socket
import subprocess
import zlib
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

# What torchrun and the deepspeed launcher set, and what every other launcher's variables are translated into.
EXPLICIT = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
# rank, local rank, world size, local world size
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
HYDRA = ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS")  # MPICH and Intel MPI


@dataclass(frozen=True)
class Topology:
    """One process's place in the job.

    Raises:
        ValueError: the environment is half set or contradicts itself; the message names the variables.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str  # a host name, an IPv4 or an IPv6 address, the latter without brackets
    master_port: int
    launcher: str  # "srun", "torchrun", "deepspeed", "mpirun", "environment" (set by hand) or "single"

    def __post_init__(self) -> None:
        inside = 0 <= self.rank < self.world_size and 0 <= self.local_rank < self.local_world_size <= self.world_size
        if not inside:
            raise ValueError(
                f"{self.launcher}: rank {self.rank} of {self.world_size} and local rank {self.local_rank} of {self.local_world_size} "
                f"cannot be; ranks count from 0, and a node holds no more ranks than the job. Look for RANK, LOCAL_RANK, WORLD_SIZE or "
                f"LOCAL_WORLD_SIZE left over in the environment, and unset them."
            )
        if not 0 < self.master_port < 65536:
            raise ValueError(f"MASTER_PORT is {self.master_port}; it must be 1 to 65535.")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], node_address: Callable[[str], str] | None = None) -> "Topology":
        """Reads `environ`; `node_address` turns the name of a Slurm node into an address (by default, Slurm is asked)."""
        if any(name in environ for name in EXPLICIT):
            return _explicit(environ)
        if OPEN_MPI[0] in environ or HYDRA[1] in environ:
            return _mpirun(environ)
        # sbatch and salloc set SLURM_PROCID and SLURM_NTASKS too; only a step started by srun has more than one process.
        if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            return _srun(environ, node_address or slurm_node_address)
        return cls(0, 0, 1, 1, _address(environ) or "127.0.0.1", _port(environ) or free_port(), "single")

    def export(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Sets what torch.distributed's env:// and DeepSpeed read. LOCAL_SIZE is DeepSpeed's device count on CPU."""
        environ.update(
            RANK=str(self.rank),
            LOCAL_RANK=str(self.local_rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_WORLD_SIZE=str(self.local_world_size),
            LOCAL_SIZE=str(self.local_world_size),
            MASTER_ADDR=self.master_addr,
            MASTER_PORT=str(self.master_port),
        )

    def check_port_free(self) -> None:
        """On rank 0, before anything expensive: can the rendezvous port be opened here?

        Raises:
            RuntimeError: another process listens on it.
        """
        if self.rank != 0 or self.launcher == "torchrun":  # torchrun's agent holds the port already: the ranks meet there
            return
        try:
            _listen(self.master_port).close()
        except OSError as error:
            raise RuntimeError(
                f"Port {self.master_port} cannot be opened on {socket.gethostname()} ({error.strerror}); another run may be using it. "
                f"Stop that one, or choose another port: `deepspeed --master_port N`, or MASTER_PORT=N in the environment."
            ) from error


def free_port() -> int:
    """A port that nothing listens on at the moment."""
    with _listen(0) as listener:
        return int(listener.getsockname()[1])


def slurm_node_address(node: str) -> str:
    """NodeAddr of a Slurm node; the name itself where Slurm's tools are absent (containers) or do not answer.

    Names alone are not enough: several slurmd on one machine have names that do not resolve.
    """
    if shutil.which("scontrol") is None:
        return node
    shown = subprocess.run(["scontrol", "show", "node", node], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\bNodeAddr=(\S+)", shown)
    return found[1] if found else node


def first_node(nodes: str) -> str:
    """The first host of a Slurm list: `gpu[08-11,15],cpu1` -> `gpu08`."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Tasks on the given node of the step: `2(x3),1` means 2, 2, 2, 1."""
    counts: list[int] = []
    for tasks, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        counts += [int(tasks)] * int(repeats or 1)
    return counts[node]


def _explicit(environ: Mapping[str, str]) -> Topology:
    """RANK and its companions, set by torchrun, by the deepspeed launcher or by hand."""
    _require(environ, *EXPLICIT)
    world_size = _integer(environ, "WORLD_SIZE")
    local_world_size = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environ else "LOCAL_SIZE"  # the latter: deepspeed's
    if world_size > 1:
        _require(environ, local_world_size, "MASTER_ADDR", "MASTER_PORT")
    step_tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if world_size < step_tasks:
        raise ValueError(
            f"srun started {step_tasks} tasks, but WORLD_SIZE is {world_size}: each would train alone. "
            f"Unset RANK, LOCAL_RANK and WORLD_SIZE before srun; they are taken from Slurm."
        )
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "deepspeed" if "CROSS_RANK" in environ else "environment"
    return Topology(
        rank=_integer(environ, "RANK"),
        local_rank=_integer(environ, "LOCAL_RANK"),
        world_size=world_size,
        local_world_size=_integer(environ, local_world_size) if local_world_size in environ else 1,
        master_addr=_address(environ) or "127.0.0.1",
        master_port=_port(environ) or free_port(),
        launcher=launcher,
    )


def _mpirun(environ: Mapping[str, str]) -> Topology:
    names = OPEN_MPI if OPEN_MPI[0] in environ else HYDRA
    _require(environ, *names)
    rank, local_rank, world_size, local_world_size = (_integer(environ, name) for name in names)
    address, port = _address(environ), _port(environ)
    if local_world_size == world_size:  # one machine: nothing that only the launching host knows is needed
        address = address or "127.0.0.1"
        if port is None and "PMIX_NAMESPACE" in environ:
            port = 10000 + zlib.crc32(environ["PMIX_NAMESPACE"].encode()) % 20000
    if address is None or port is None:
        raise ValueError(
            "mpirun does not tell the ranks where to meet. Set MASTER_ADDR to the address of rank 0's node and MASTER_PORT to a free port "
            "for all of them: `mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500 ...` (MPICH, Intel MPI: `-genv MASTER_ADDR node1 ...`)."
        )
    return Topology(rank, local_rank, world_size, local_world_size, address, port, "mpirun")


def _srun(environ: Mapping[str, str], node_address: Callable[[str], str]) -> Topology:
    step = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID")
    _require(environ, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", *step)
    # Outside the range that the kernel hands out by itself (32768 and up).
    port = 10000 + (_integer(environ, "SLURM_JOB_ID") * 64 + _integer(environ, "SLURM_STEP_ID")) % 20000
    return Topology(
        rank=_integer(environ, "SLURM_PROCID"),
        local_rank=_integer(environ, "SLURM_LOCALID"),
        world_size=_integer(environ, "SLURM_STEP_NUM_TASKS"),
        local_world_size=tasks_on_node(environ["SLURM_STEP_TASKS_PER_NODE"], _integer(environ, "SLURM_NODEID")),
        master_addr=_address(environ) or node_address(first_node(environ["SLURM_STEP_NODELIST"])),
        master_port=_port(environ) or port,
        launcher="srun",
    )


def _require(environ: Mapping[str, str], *names: str) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        present = [name for name in names if environ.get(name)]
        raise ValueError(
            f"The environment describes a distributed job only in part: {', '.join(present) or 'nothing of it'} set, {', '.join(missing)} "
            f"not. Start through srun, torchrun, deepspeed or mpirun, which set all of them, or unset what is left over."
        )


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ValueError(f"{name} is {environ[name]!r} in the environment; it must be a whole number.") from None


def _address(environ: Mapping[str, str]) -> str | None:
    return environ.get("MASTER_ADDR", "").strip("[]") or None


def _port(environ: Mapping[str, str]) -> int | None:
    return _integer(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else None


def _listen(port: int) -> socket.socket:
    """Listens on all addresses, IPv6 and IPv4 alike where the machine has both, as torch's store does."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
