"""On a real Slurm of two nodes: whatever ends a job, it requeues and ends with bit for bit the weights of an uninterrupted run; what
starting again would not mend is not started again."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.distributed.launching import write_run
from tests.faults.runs import same_state
from tests.faults.slurm import PACKAGES, Job, LocalSlurm, installed

STEPS = 120
TOKENS = STEPS * 4 * 32

pytestmark = pytest.mark.skipif(not installed(), reason=f"no Slurm is installed here: {PACKAGES}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSlurm]:
    slurm = LocalSlurm(tmp_path_factory.mktemp("slurm") / "state")
    slurm.script("start")
    yield slurm
    slurm.script("stop")
    assert not slurm.directory.exists()


def submit(slurm: LocalSlurm, folder: Path, dataset: Path, *arguments: object, **settings: object) -> Job:
    write_run(folder, dataset)
    path = folder / "run.yaml"
    config = yaml.safe_load(path.read_text())
    config["checkpoint"]["every_steps"] = 50
    config["eval"]["every_steps"] = STEPS
    path.write_text(yaml.safe_dump(config))
    defaults = {"CONFIG": path, "DS_CONFIG": folder / "ds.json", "DATA": dataset, "TOKENS": TOKENS}
    return slurm.submit(folder, ["slurm/grt_small.sh", *arguments], defaults | settings)


@pytest.fixture(scope="module")
def whole(slurm: LocalSlurm, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """An uninterrupted run; it may be at work still."""
    return submit(slurm, tmp_path_factory.mktemp("whole"), dataset)


def check_same(job: Job, whole: Job) -> None:
    assert job.end() == whole.end() == "COMPLETED", job.text + job.rank()
    assert whole["Restarts"] == "0"
    checkpoints = [run.run_dir / "checkpoints" / f"step_{STEPS:08d}" for run in (job, whole)]
    assert same_state(*checkpoints)


def test_a_preempted_job_saves_requeues_itself_and_loses_nothing(slurm: LocalSlurm, dataset: Path, tmp_path: Path, whole: Job) -> None:
    job = submit(slurm, tmp_path, dataset)
    job.wait_for_step(20)
    slurm("scancel", "--signal=USR1", job.number)
    check_same(job, whole)
    assert job["Restarts"] == "1" and "stopped in order, and saved; requeues itself" in job.text
    saved = job.rank().split("stopped after step ")[1].split()[0]
    assert f"step_{int(saved):08d}: step {saved} of {STEPS}" in job.rank(start=1)


@pytest.mark.nightly
def test_each_way_in_which_slurm_stops_a_job_leaves_it_time_to_save(slurm: LocalSlurm, dataset: Path, tmp_path: Path, whole: Job) -> None:
    job = submit(slurm, tmp_path, dataset)
    job.wait_for_step(10)
    slurm("scancel", "--signal=TERM", job.number)
    job.wait_for_step(40, start=1)
    slurm("scontrol", "requeue", job.number)
    job.wait_for_step(70, start=2)
    whole.end()
    slurm("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    check_same(job, whole)
    assert job["Restarts"] == "3"
    for start in range(3):
        assert "and saved: SIGNAL" in job.rank(start=start)


@pytest.mark.nightly
def test_a_job_whose_node_is_lost_goes_on_when_there_are_nodes_again(slurm: LocalSlurm, dataset: Path, tmp_path: Path, whole: Job) -> None:
    job = submit(slurm, tmp_path, dataset)
    job.wait_for_step(60)
    lost = rank_process(job, rank=1)
    os.kill(lost, signal.SIGSTOP)  # silent, as its node is
    os.kill(int((slurm.directory / "node2.pid").read_text()), signal.SIGKILL)
    job.wait_until(lambda: "node2" in slurm("sinfo", "--noheader", "--states=down", "--format=%N"))
    assert job["JobState"] in ("PENDING", "COMPLETING") and job["Restarts"] == "1"
    os.kill(lost, signal.SIGKILL)
    slurm("slurmd", "-N", "node2")
    check_same(job, whole)
    assert "resumed from" in job.rank(start=1)


@pytest.mark.nightly
def test_a_job_that_crashes_again_and_again_is_given_up(slurm: LocalSlurm, dataset: Path, tmp_path: Path) -> None:
    crash = tmp_path / "python"
    crash.write_text("#!/bin/sh\nexit 3\n")
    crash.chmod(0o755)
    job = submit(slurm, tmp_path, dataset, PYTHON=crash, MAX_CRASHES=2)
    assert job.end() == "FAILED"
    assert job["Restarts"] == "2" and job["ExitCode"] == "3:0"
    assert "crashed with exit code 3, 3 times without a new checkpoint: given up" in job.text


@pytest.mark.nightly
def test_a_rank_that_is_killed_costs_a_requeue(slurm: LocalSlurm, dataset: Path, tmp_path: Path, whole: Job) -> None:
    job = submit(slurm, tmp_path, dataset)
    job.wait_for_step(60)
    os.kill(rank_process(job, rank=1), signal.SIGKILL)
    check_same(job, whole)
    assert job["Restarts"] == "1" and "crashed with exit code 137 (1 of 3 times" in job.text


def rank_process(job: Job, rank: int) -> int:
    """Its process id: of those with its environment, the oldest. The others are its data workers."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if f"SLURM_JOB_ID={job.number}".encode() in variables and f"SLURM_PROCID={rank}".encode() in variables:
                found.append(int(folder.name))
    return min(found)


@pytest.mark.nightly
def test_bad_input_is_told_and_not_requeued(slurm: LocalSlurm, dataset: Path, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, dataset, "--model.vocab_size", 32000)
    assert job.end() == "FAILED"
    assert job["Restarts"] == "0" and job["ExitCode"] == "2:0"
    assert job.text.count("error: model.vocab_size is 32000, but") == 1


@pytest.mark.nightly
def test_a_cancelled_job_stays_cancelled(slurm: LocalSlurm, dataset: Path, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, dataset, TOKENS=10 * TOKENS)
    job.wait_for_step(10)
    slurm("scancel", job.number)
    assert job.end() == "CANCELLED"


@pytest.mark.nightly
def test_an_export_waits_for_its_run_through_a_requeue(slurm: LocalSlurm, dataset: Path, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, dataset)
    arguments = [f"--dependency=afterok:{job.number}", "slurm/convert.sh", "--dtype", "bf16"]
    export = slurm.submit(tmp_path, arguments, {"OUTPUT": tmp_path / "hf"})
    job.wait_for_step(20)
    slurm("scancel", "--signal=USR1", job.number)
    job.wait_for_step(30, start=1)
    assert export["JobState"] == "PENDING"
    assert job.end() == export.end() == "COMPLETED", export.text
    assert (tmp_path / "hf" / "model.safetensors").exists()


@pytest.mark.nightly
def test_a_sweep_runs_each_of_its_settings(slurm: LocalSlurm, dataset: Path, tmp_path: Path) -> None:
    write_run(tmp_path, dataset)
    settings = {"CONFIG": tmp_path / "run.yaml", "DS_CONFIG": tmp_path / "ds.json", "DATA": dataset, "TOKENS": 4 * 4 * 32}
    settings["SWEEP_DIR"] = tmp_path / "sweep"
    slurm("sbatch", "--wait", "--array=0,5", f"--output={tmp_path}/out", "slurm/sweep.sh", environment=settings)
    configs = [yaml.safe_load(path.read_text()) for path in sorted((tmp_path / "sweep").glob("*/config.yaml"))]
    assert [(config["schedule"]["learning_rate"], config["seed"]) for config in configs] == [(1e-3, 1), (4e-3, 2)]
