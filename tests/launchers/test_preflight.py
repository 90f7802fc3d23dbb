"""Each check of launchers/preflight.py finds a fault that is made for it, names node, rank and remedy, and passes without it."""

import os
import random
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from launchers import checks, checks_together, preflight
from launchers.checks import Check, Facts, Finding, Job, Level, NotApplicableError, Place
from pretrain.config import parse_arguments
from pretrain.topology import Topology, free_port
from tests.distributed.launching import write_run
from tests.ranks import REPOSITORY

A, B = Place(0, 0, "gpu1"), Place(1, 0, "gpu2")
H200 = ["NVIDIA H200", "143771 MiB", "570.86.15", "0"]
GPUS = {"seen": 8, "needed": 8, "cards": [H200] * 8, "processes": []}
LIMITS = {"files": 65536, "most files": 65536, "needed files": 1280, "locked": float("inf"), "infiniband": True, "core": 0}
DISK = {"directory": "/runs", "free": 100 * 2**30, "checkpoint": 15 * 2**30, "saved": 0, "soon": 3, "in the end": 3}
SHARED = {"directory": "/runs", "seen": True, "renamed": True, "torn": ""}
LOCK, BIG_LOCK = "/tmp/torch_extensions/py311/fused_adam/lock", 3600.0

# name of the check, the fact of a healthy rank, that of the rank with a fault, and what is said of it and its remedy
FAILURES = [
    ("code", {"pretrain/train.py": "aa"}, {"pretrain/train.py": "bb"}, "pretrain/train.py is bb, but aa for rank 0 on gpu1", "checkout"),
    ("code", {"pretrain/a.py": "aa"}, {}, "pretrain/a.py is absent", "checkout"),
    ("versions", {"torch": "2.13.0"}, {"torch": "2.12.1"}, "torch is 2.12.1, but 2.13.0", "virtual environment"),
    ("config", {"optim.eps": 1e-8}, {"optim.eps": 1e-6}, "optim.eps is 1e-06, but 1e-08", "same command"),
    ("data", {"dataset web": "ab"}, {"dataset web": "cd"}, "dataset web is cd", "Copy the dataset"),
    (
        "gate operators",
        {"wanted": "auto", "the library": "torch-2"},
        {"wanted": "auto", "the library": "absent"},
        "absent",
        "model.ops.build",
    ),
    ("GPUs", GPUS, GPUS | {"seen": 1}, "torch sees 1 GPUs for the 8 ranks", "CUDA_VISIBLE_DEVICES"),
    ("GPUs", GPUS, GPUS | {"seen": 4, "cards": [H200] * 4}, "torch sees 4 GPUs for the 8 ranks", "--gres=gpu:N"),
    ("GPUs", GPUS, GPUS | {"cards": [["NVIDIA H100", *H200[1:]]] * 8}, "model is NVIDIA H100 143771 MiB, but NVIDIA H200", "--constraint"),
    (
        "GPUs",
        GPUS,
        GPUS | {"cards": [H200, [*H200[:3], "2"], *[H200] * 6]},
        "GPU 1 (NVIDIA H200) has uncorrected ECC errors: 2",
        "--exclude",
    ),
    (
        "GPUs",
        GPUS,
        GPUS | {"processes": [["4711", "python", "900 MiB"]]},
        "process 4711 (python) is at work on a GPU, in 900 MiB",
        "kill 4711",
    ),
    (
        "limits",
        LIMITS,
        LIMITS | {"files": 1024},
        "1024 open files are allowed (hard limit 65536), and 1280 needed",
        'ulimit -n "$(ulimit -Hn)"',
    ),
    ("limits", LIMITS, LIMITS | {"locked": 8192 * 1024}, "8192 KiB of memory may be locked", "ulimit -l unlimited"),
    ("build locks", [(LOCK, 5.0, True)], [(LOCK, BIG_LOCK, True)], f"{LOCK} is 60 minutes old", f"rm {LOCK}"),
    (
        "disk space",
        DISK,
        DISK | {"free": 40 * 2**30},
        "/runs has 40.000 GiB free; 3 more checkpoints of 15.000 GiB are to come",
        "--run_dir",
    ),
    ("clock", (0.2, 0.3), (-90.0, 0.001), "the clock is 90.0 s behind that of rank 0", "chronyc"),
    ("shared files", SHARED, SHARED | {"seen": False}, "a file that rank 0 wrote in /runs was not seen within 10 s", "all nodes mount"),
    ("shared files", SHARED, SHARED | {"renamed": False}, "renamed over another was not seen", "mount options"),
    ("shared files", SHARED, SHARED | {"torn": "a mixture"}, "this was read: a mixture", "mount options"),
]
WARNINGS = [
    ("apex", {"NVIDIA apex": "absent"}, {"NVIDIA apex": "there"}, "NVIDIA apex is there, but absent", "environments differ"),
    ("GPUs", GPUS, GPUS | {"seen": 9}, "torch sees 9 GPUs for the 8 ranks", "more ranks"),
    ("GPUs", GPUS, GPUS | {"cards": [[*H200[:2], "550.1", "0"]] * 8}, "driver is 550.1, but 570.86.15", "drivers"),
    ("limits", LIMITS, LIMITS | {"core": float("inf")}, "core file", "ulimit -c 0"),
    ("build locks", [], [("/tmp/triton/a.lock", BIG_LOCK, False)], "/tmp/triton/a.lock is 60 minutes old", "rm /tmp/triton/a.lock"),
    ("disk space", DISK, DISK | {"in the end": 9}, "9 more checkpoints of 15.000 GiB", "checkpoint.keep"),
    ("clock", (0.0, 0.001), (3.0, 0.001), "the clock is 3.0 s ahead of", "chronyc"),
]


def judged(name: str, facts: Facts) -> list[Finding]:
    """Without notes."""
    found = preflight.judge({place: {name: fact} for place, fact in facts.items()})
    return [finding for finding in found[name] if finding.level > Level.NOTE]


@pytest.mark.parametrize(("name", "healthy", "faulty", "problem", "remedy"), FAILURES, ids=[f"{case[0]}: {case[3]}" for case in FAILURES])
def test_a_fault_on_one_node_fails_and_is_named_with_its_remedy(name: str, healthy: Any, faulty: Any, problem: str, remedy: str) -> None:
    assert judged(name, {A: healthy, B: healthy}) == []
    (found,) = judged(name, {A: healthy, B: faulty})
    assert (found.level, found.where) == (Level.FAILURE, "rank 1 on gpu2")
    assert problem in found.problem and remedy in found.remedy


@pytest.mark.parametrize(("name", "healthy", "faulty", "problem", "remedy"), WARNINGS, ids=[f"{case[0]}: {case[3]}" for case in WARNINGS])
def test_what_need_not_stop_a_run_is_a_warning(name: str, healthy: Any, faulty: Any, problem: str, remedy: str) -> None:
    assert judged(name, {A: healthy, B: healthy}) == []
    (found,) = judged(name, {A: healthy, B: faulty})
    assert (found.level, found.where) == (Level.WARNING, "rank 1 on gpu2")
    assert problem in found.problem and remedy in found.remedy


def test_a_node_without_fused_operators_matters_only_where_they_are_used() -> None:
    absent, there = ({"wanted": "ref", "the library": library} for library in ("absent", "torch-2"))
    assert judged("gate operators", {A: there, B: absent}) == []
    demanded = {"wanted": "fused", "the library": "absent"}
    assert [found.level for found in judged("gate operators", {A: demanded, B: demanded})] == [Level.FAILURE]


def test_a_cpu_cluster_is_fine_and_said_to_be_one() -> None:
    without = {"seen": 0, "needed": 4}
    (found,) = preflight.judge({A: {"GPUs": without}, B: {"GPUs": without}})["GPUs"]
    assert found.level is Level.NOTE and "no GPUs" in found.problem
    assert judged("GPUs", {A: GPUS, B: {"seen": 0, "needed": 8}})[0].where == "rank 1 on gpu2"


def test_all_failures_are_reported_and_equal_ones_once(capsys: pytest.CaptureFixture[str]) -> None:
    places = [Place(rank, rank % 4, f"gpu{rank // 4}") for rank in range(8)]
    facts: dict[Place, dict[str, Any]] = {place: {"versions": {"torch": "2.13.0"}, "limits": LIMITS} for place in places}
    for place in places[4:7]:
        facts[place] = {"versions": {"torch": "2.12.1"}, "limits": preflight.Failure("cannot be read")}
    assert preflight.report(preflight.judge(facts), places, 1.0) == 2
    output = capsys.readouterr().out
    assert "FAIL  versions        ranks 4-6 on gpu1: torch is 2.12.1, but 2.13.0 for ranks 0-3 on gpu0, rank 7 on gpu1" in output
    assert "FAIL  limits          ranks 4-6 on gpu1: cannot be read" in output and "failures: 2, warnings: 0" in output


def test_a_failure_among_those_left_out_still_fails() -> None:
    locks = [(f"/cache/{number}.lock", BIG_LOCK, False) for number in range(checks.SHOWN)]
    assert judged("build locks", {A: [*locks, (LOCK, BIG_LOCK, True)]})[-1].level is Level.FAILURE


def test_warnings_alone_let_a_run_start() -> None:
    assert preflight.report({"clock": [Finding(Level.WARNING, "rank 1 on b", "late", "chronyc")]}, [A, B], 1.0) == 0


# ---- links ----


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8])
def test_each_two_ranks_meet_once_and_none_is_in_two_pairs_at_a_time(world_size: int) -> None:
    met = []
    for peers in checks_together.rounds(world_size):
        assert all(peers[peers[rank]] == rank for rank in range(world_size))
        met += [(rank, peer) for rank, peer in enumerate(peers) if rank < peer]
    assert sorted(met) == list(combinations(range(world_size), 2))


def links(rate: Callable[[Place, Place], float]) -> Facts:
    """Of 4 nodes with 2 ranks each."""
    places = [Place(rank, rank % 2, f"gpu{rank // 2}") for rank in range(8)]
    return {place: {peer: rate(place, peer) for peer in places[place.rank + 1 :]} for place in places}


def test_a_link_is_slow_beside_the_median_of_its_kind() -> None:
    def rate(a: Place, b: Place) -> float:
        return 300e9 if a.node == b.node else 5e9 if (a.rank, b.rank) == (1, 6) else 25e9

    (found,) = judged("links", links(rate))
    assert found.where == "rank 1 on gpu0 <-> rank 6 on gpu3" and found.level is Level.WARNING
    assert found.problem == "5.000 GB/s; the median between nodes is 25.000" and "ibstat" in found.remedy


def test_a_node_whose_links_are_all_slow_is_named() -> None:
    found = judged("links", links(lambda a, b: 300e9 if a.node == b.node else 1e9 if "gpu2" in (a.node, b.node) else 25e9))
    assert all("All slow links are of gpu2" in finding.remedy for finding in found[:-1])
    assert len(found) == checks.SHOWN + 1 and "and 7 more" in found[-1].problem


# ---- facts: real faults ----


@pytest.fixture(scope="module")
def settings(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_run(tmp_path_factory.mktemp("settings"), dataset)


def job(place: Place, store: dist.Store | None = None, arguments: list[str] | None = None) -> Job:
    topology = Topology(place.rank, place.local_rank, 2, 1, "127.0.0.1", 29999, "srun")
    config, ds_config = parse_arguments(arguments) if arguments else (None, None)
    return Job(topology, place, config, ds_config, "bad", [A, B], store or dist.HashStore())


def gathered(name: str, of: Job) -> Any:
    """The fact, or the Failure."""
    (check,) = [check for check in preflight.CHECKS if check.name == name]
    return preflight.gather(of, [check], 20)[name]


def test_an_edited_source_file_is_another_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "edited_package").mkdir()
    (tmp_path / "edited_package" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(checks, "PACKAGES", ("edited_package", "pretrain"))
    before = gathered("code", job(A))
    (tmp_path / "edited_package" / "__init__.py").write_text("x = 1")
    (found,) = judged("code", {A: before, B: gathered("code", job(B))})
    assert found.problem.startswith("edited_package/__init__.py is") and "pretrain/train.py" in before


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "RELEASES", ("torch", "megatron-nowhere"))
    (found,) = judged("versions", {A: gathered("versions", job(A))})
    assert "megatron-nowhere is not installed" in found.problem and "pip install" in found.problem


def test_another_setting_or_dataset_of_a_rank_is_found(settings: list[str], mixed_datasets: dict[str, Path]) -> None:
    other = [*settings, "--optim.beta2", "0.9", "--data.path", str(mixed_datasets["calendar"])]
    facts = {
        place: {name: gathered(name, job(place, None, its)) for name in ("config", "data")} for place, its in ((A, settings), (B, other))
    }
    found = preflight.judge(facts)
    assert [finding.problem.split(" is ")[0] for finding in found["config"]] == ["data.path", "optim.beta2"]
    assert found["data"][0].problem.startswith("dataset data is") and found["data"][0].where == "rank 1 on gpu2"
    assert gathered("config", job(A)) == preflight.Failure("bad")


def test_the_other_apex_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged("apex", {A: gathered("apex", job(A))}) == []
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = judged("apex", {A: gathered("apex", job(A))})
    assert found.where == "rank 0 on gpu1" and "pip uninstall apex" in found.problem


def test_few_open_files_fail() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    try:
        fact = gathered("limits", job(A))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    found = judged("limits", {A: fact | {"core": 0, "infiniband": False}})
    assert found[0].problem.startswith("300 open files") and "ulimit -n" in found[0].remedy


def test_a_lock_that_a_killed_build_left_fails_and_a_fresh_one_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    assert judged("build locks", {A: gathered("build locks", job(A))}) == []
    lock = tmp_path / "extensions" / "fused_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert judged("build locks", {A: gathered("build locks", job(A))}) == []
    os.utime(lock, (time.time() - 3600,) * 2)
    (found,) = judged("build locks", {A: gathered("build locks", job(A))})
    assert found.level is Level.FAILURE and found.remedy == f"rm {lock}"


def test_the_port_of_the_next_step_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert "port" not in preflight.gather(job(B), [check for check in preflight.CHECKS if check.name == "port"], 20)
    with listener_below_the_kernels_own() as listener:
        port = listener.getsockname()[1]
        of = replace(job(A), topology=replace(job(A).topology, master_port=port - 1))
        (found,) = judged("port", {A: gathered("port", of)})
    assert f"Port {port} cannot be opened" in found.problem and "MASTER_PORT" in found.problem
    assert judged("port", {A: gathered("port", of)}) == []


def listener_below_the_kernels_own() -> socket.socket:
    """In the range that the topology takes ports from."""
    for port in random.sample(range(10001, 30000), 100):
        with suppress(OSError):
            return socket.create_server(("", port))
    raise AssertionError("100 ports are taken")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", tmp_path], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_disk_without_room_for_the_next_checkpoints_fails(settings: list[str], small_disk: Path) -> None:
    assert judged("disk space", {A: gathered("disk space", job(A, None, settings))}) == []
    full = [*settings, "--run_dir", str(small_disk / "run"), "--model.hidden_size", "128", "--checkpoint.keep", "2"]
    (found,) = judged("disk space", {A: gathered("disk space", job(A, None, full))})
    assert f"{small_disk} has 0.001 GiB free; 3 more checkpoints" in found.problem and "--run_dir" in found.remedy


def test_nvidia_smi_is_read_and_its_failure_is_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\ncase "$1" in --query-gpu*) echo "NVIDIA H200, 143771 MiB, 570.86.15, 0";; *) echo "77, python, 9 MiB";; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fact = gathered("GPUs", job(A))
    assert (fact["cards"], fact["processes"]) == ([H200], [["77", "python", "9 MiB"]])
    program.write_text("#!/bin/sh\necho 'Unable to determine the device handle for GPU 3'; exit 15\n")
    (found,) = judged("GPUs", {A: gathered("GPUs", job(A))})
    assert "device handle for GPU 3" in found.problem and "restart its driver" in found.problem


def both(name: str, first: Job, second: Job) -> dict[Place, Any]:
    """What two ranks find that gather at the same time, each in a thread with its node's name."""
    (check,) = [check for check in preflight.CHECKS if check.name == name]
    facts: dict[Place, Any] = {}
    thread = threading.Thread(target=lambda: facts.update({second.place: check.gather(second)}), name=second.place.node)
    thread.start()
    with suppress(NotApplicableError):
        facts[first.place] = check.gather(first)
    thread.join()
    return facts


def test_ranks_see_what_rank_0_writes_and_nothing_is_left(settings: list[str], tmp_path: Path) -> None:
    store, here = dist.HashStore(), [*settings, "--run_dir", str(tmp_path / "run")]
    assert both("shared files", job(A, store, here), job(B, store, here)) == dict.fromkeys(
        (A, B), SHARED | {"directory": f"{tmp_path}/run"}
    )
    assert list((tmp_path / "run").iterdir()) == []


def test_a_node_with_another_disk_does_not_see_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_together, "SEEN_SECONDS", 0.1)
    store = dist.HashStore()
    dist.PrefixStore("shared", store).set("file", str(tmp_path / "elsewhere"))
    (found,) = judged("shared files", {A: SHARED, B: gathered("shared files", job(B, store))})
    assert found.where == "rank 1 on gpu2" and "was not seen" in found.problem


def test_a_file_that_is_read_half_renamed_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_together, "SEEN_SECONDS", 0.3)
    store, file = dist.HashStore(), tmp_path / "file"
    file.write_bytes(b"1" * 2**18)

    def tear() -> None:
        store.wait(["shared/seen/1"])
        file.write_bytes(b"12")

    dist.PrefixStore("shared", store).set("file", str(file))
    threading.Thread(target=tear).start()
    (found,) = judged("shared files", {A: SHARED, B: gathered("shared files", job(B, store))})
    assert "this was read: neither of them, 2 bytes" in found.problem


def test_a_run_dir_that_cannot_be_written_fails(settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (found,) = judged("shared files", {A: gathered("shared files", job(A, None, [*settings, "--run_dir", str(tmp_path / "file" / "run")]))})
    assert "run_dir cannot be written" in found.problem and "--run_dir DIR" in found.problem


def test_a_clock_that_is_ahead_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now, store = time.time, dist.HashStore()
    monkeypatch.setattr(time, "time", lambda: now() + (100 if threading.current_thread().name == B.node else 0))
    facts = both("clock", job(A, store), job(B, store))
    ahead, error = facts[B]
    assert ahead == pytest.approx(100, abs=error + 0.01)
    assert "100.0 s ahead" in judged("clock", facts)[0].problem


# ---- ranks that hang, and whole jobs ----


def test_a_gather_that_hangs_is_a_failure_and_holds_up_nothing() -> None:
    hanging = Check("disk space", lambda of: time.sleep(5), lambda facts: [])
    start = time.monotonic()
    facts = preflight.gather(job(A), [hanging, *preflight.CHECKS[:1]], 0.5)
    assert time.monotonic() - start < 4 and isinstance(facts["code"], dict)
    (found,) = judged("disk space", {A: facts["disk space"]})
    assert found.where == "rank 0 on gpu1" and "no answer in 0 s" in found.problem


def led(monkeypatch: pytest.MonkeyPatch, store: dist.Store) -> int:
    monkeypatch.setattr(preflight, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(preflight, "REPORT_SECONDS", 0.1)
    return preflight.lead(job(A, store), {}, 0.1, time.monotonic())


def test_a_rank_that_does_not_arrive_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert led(monkeypatch, dist.HashStore()) == 2
    assert "FAIL  arrival         rank 1 on node number 2: has not arrived" in capsys.readouterr().out


def test_a_rank_that_arrives_and_stops_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    preflight.put(store, "arrived/1", B)
    assert led(monkeypatch, store) == 2
    assert "FAIL  answers         rank 1 on gpu2: arrived, but then stopped answering" in capsys.readouterr().out


def test_the_node_of_an_absent_rank_is_its_companions_or_what_slurm_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology(0, 0, 8, 4, "127.0.0.1", 29999, "srun")
    assert preflight.expected_place(6, {5: Place(5, 1, "gpu2")}, topology) == Place(6, 2, "gpu2")
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho gpu1; echo gpu2; echo gpu3\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    step = {"SLURM_STEP_NODELIST": "gpu[1-3]", "SLURM_STEP_TASKS_PER_NODE": "4(x2),2"}
    assert [preflight.slurm_node(rank, step) for rank in (3, 4, 9, 10)] == ["gpu1", "gpu2", "gpu3", None]


def run_job(ranks: int, arguments: list[str], of_the_last: list[str]) -> tuple[list[int], str]:
    """Exit codes and rank 0's output of real ranks on two nodes, as far as names make nodes."""
    port, on_node = str(free_port()), ranks // 2
    processes = []
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank % on_node, "SLURMD_NODENAME": f"gpu{rank // on_node}"}
        job_wide = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": on_node, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        processes.append(
            subprocess.Popen(
                [sys.executable, "launchers/preflight.py", *arguments, *(of_the_last if rank == ranks - 1 else [])],
                cwd=REPOSITORY,
                env=os.environ | {name: str(value) for name, value in (place | job_wide).items()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        output = processes[0].communicate(timeout=240)[0]
        return [process.wait(timeout=60) for process in processes], output
    finally:
        for process in processes:
            process.kill()


def test_four_sound_ranks_on_two_nodes_pass_in_time(settings: list[str], tmp_path: Path) -> None:
    codes, output = run_job(4, [*settings, "--run_dir", str(tmp_path / "run")], [])
    assert codes == [0] * 4 and "FAIL" not in output, output
    assert "within a node" in output and "between nodes" in output
    seconds = float(re.findall(r"took ([0-9.]+) s", output)[-1])
    print(output)
    assert seconds < 30


def test_a_rank_with_another_setting_is_named_and_all_exit_alike(settings: list[str], tmp_path: Path) -> None:
    codes, output = run_job(2, [*settings, "--run_dir", str(tmp_path / "run")], ["--optim.weight_decay", "0.2"])
    assert codes == [2, 2], output
    assert "rank 1 on gpu1: optim.weight_decay is 0.2, but 0.1 for rank 0 on gpu0" in output
    assert "-> Start all ranks with the same command" in output
    assert output.count("FAIL") == 1, output
