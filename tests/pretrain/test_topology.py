"""From a launcher's environment to ranks and addresses. The environments are those that the real launchers set."""

import socket

import pytest

from pretrain.topology import Topology, first_node, slurm_node_address, tasks_on_node

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
}
DEEPSPEED = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "CROSS_RANK": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1915224065",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[08-11]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}


def read(environ: dict[str, str]) -> Topology:
    return Topology.from_environment(environ, node_address=lambda node: f"address-of-{node}")


def test_torchrun() -> None:
    assert read(TORCHRUN) == Topology(3, 1, 4, 2, "node1", 29400, "torchrun")


def test_the_deepspeed_launcher() -> None:
    assert read(DEEPSPEED) == Topology(1, 1, 2, 2, "127.0.0.1", 29500, "deepspeed")


def test_srun_takes_ranks_and_address_from_slurm() -> None:
    topology = read(SRUN)
    assert (topology.rank, topology.local_rank, topology.world_size, topology.local_world_size) == (5, 1, 7, 2)
    assert topology.master_addr == "address-of-gpu08"
    assert topology.launcher == "srun"


def test_the_port_of_a_slurm_job_survives_a_requeue_and_differs_between_steps_and_jobs() -> None:
    port = read(SRUN).master_port
    assert 10000 <= port < 30000
    assert read(SRUN | {"SLURM_RESTART_COUNT": "1"}).master_port == port
    assert read(SRUN | {"SLURM_STEP_ID": "1"}).master_port != port
    assert read(SRUN | {"SLURM_JOB_ID": "4712"}).master_port != port


def test_an_sbatch_script_without_srun_is_a_single_process() -> None:
    batch_script = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "4711"}
    topology = read(batch_script)
    assert (topology.rank, topology.world_size, topology.launcher) == (0, 1, "single")


def test_torchrun_inside_srun_wins() -> None:
    one_task_a_node = SRUN | {"SLURM_STEP_NUM_TASKS": "2"}
    assert read(one_task_a_node | TORCHRUN).launcher == "torchrun"


def test_mpirun_on_one_machine_needs_no_address() -> None:
    topology = read(OPEN_MPI)
    assert (topology.rank, topology.local_rank, topology.world_size, topology.master_addr) == (1, 1, 2, "127.0.0.1")
    assert read(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}).master_port == topology.master_port


def test_mpirun_on_several_machines_asks_for_an_address() -> None:
    two_nodes = OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(ValueError, match="Set MASTER_ADDR"):
        read(two_nodes)
    assert read(two_nodes | {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}).master_addr == "node1"


def test_mpich() -> None:
    mpich = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "MASTER_PORT": "29500"}
    assert read(mpich) == Topology(0, 0, 2, 2, "127.0.0.1", 29500, "mpirun")


def test_a_plain_process_finds_a_port_by_itself() -> None:
    topology = read({})
    assert (topology.rank, topology.world_size, topology.master_addr, topology.launcher) == (0, 1, "127.0.0.1", "single")
    topology.check_port_free()


@pytest.mark.parametrize("environ", [{}, SRUN, OPEN_MPI, TORCHRUN, DEEPSPEED], ids=["single", "srun", "mpirun", "torchrun", "deepspeed"])
def test_an_explicit_address_and_port_always_win(environ: dict[str, str]) -> None:
    topology = read(environ | {"MASTER_ADDR": "[fd00::1]", "MASTER_PORT": "12345"})
    assert (topology.master_addr, topology.master_port) == ("fd00::1", 12345)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "RANK set, LOCAL_RANK, WORLD_SIZE not"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT not"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 of 4"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "local rank 2 of 2"),
        (TORCHRUN | {"RANK": "zero"}, "RANK is 'zero'"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000"),
        (SRUN | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, "srun started 7 tasks, but WORLD_SIZE is 1"),
        ({name: value for name, value in SRUN.items() if name != "SLURM_PROCID"}, "SLURM_PROCID not"),
    ],
)
def test_a_half_set_or_contradicting_environment_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(environ)


def test_export_is_read_back_as_the_same_place() -> None:
    environ: dict[str, str] = {}
    read(SRUN).export(environ)
    again = read(environ)
    assert (again.rank, again.local_rank, again.world_size, again.local_world_size) == (5, 1, 7, 2)
    assert (again.master_addr, again.master_port) == ("address-of-gpu08", read(SRUN).master_port)
    assert environ["LOCAL_SIZE"] == "2"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_busy_port_is_named_with_the_remedy(family: socket.AddressFamily) -> None:
    with socket.create_server(("", 0), family=family) as other:
        port = other.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"Port {port} .*MASTER_PORT=N"):
            read({"MASTER_PORT": str(port)}).check_port_free()
        read(DEEPSPEED | {"MASTER_PORT": str(port)}).check_port_free()  # rank 1 does not listen


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[08-11,15],cpu1", "gpu08"), ("r[1-2]n[3,5]-ib", "r1n3-ib"), ("a[7]", "a7")],
)
def test_the_first_node_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_tasks_by_node() -> None:
    assert [tasks_on_node("2(x3),1", node) for node in range(4)] == [2, 2, 2, 1]


def test_without_slurms_tools_the_nodes_name_is_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert slurm_node_address("gpu08") == "gpu08"
