"""What a batch script asks of srun, and does with each of its exit codes, without a Slurm: `srun` and `scontrol` only say what they were
asked."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AFTER_SRUN = 'set -euo pipefail; source slurm/job.sh; LOG=$RUN_DIR/logs/7.0.rank; after_srun "$1"'


def after_srun(code: int, run_dir: Path, scontrol_exit: int = 0, job: str = "7") -> tuple[int, str]:
    """Its exit code and what it printed."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    scontrol = run_dir / "bin" / "scontrol"
    scontrol.parent.mkdir(exist_ok=True)
    scontrol.write_text(f'#!/bin/sh\necho "scontrol $*"\nexit {scontrol_exit}\n')
    scontrol.chmod(0o755)
    variables = {"PATH": f"{scontrol.parent}:{os.environ['PATH']}", "RUN_DIR": str(run_dir)}
    variables |= {"SLURM_JOB_ID": job, "SLURM_JOB_NAME": "grt", "MAX_CRASHES": "2"}
    command = ["bash", "-c", AFTER_SRUN, "bash", str(code)]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def test_a_run_that_is_done_is_not_requeued(tmp_path: Path) -> None:
    code, output = after_srun(0, tmp_path)
    assert code == 0 and "done" in output and "scontrol" not in output


def test_a_run_that_stopped_in_order_is_requeued_however_often(tmp_path: Path) -> None:
    for _ in range(5):
        code, output = after_srun(75, tmp_path)
        assert code == 0 and "scontrol requeue 7" in output


def test_bad_input_is_shown_once_and_not_requeued(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for rank in range(2):
        (tmp_path / "logs" / f"7.0.rank{rank}").write_text("a line\nerror: no such dataset\n")
    code, output = after_srun(2, tmp_path)
    assert code == 2 and output.count("error: no such dataset") == 1 and "scontrol" not in output


def test_bad_input_that_one_rank_found_is_not_requeued_though_srun_tells_of_those_it_killed(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "7.0.rank0").write_text("waits for the others\n")
    (tmp_path / "logs" / "7.0.rank1").write_text("error: no such dataset\n")
    code, output = after_srun(137, tmp_path)
    assert code == 2 and "error: no such dataset" in output and "scontrol" not in output
    (tmp_path / "logs" / "7.0.rank1").write_text("error on rank 1: no progress\n")
    assert "scontrol requeue 7" in after_srun(137, tmp_path)[1]


@pytest.mark.parametrize("exit_code", [1, 76, 137])
def test_crashes_without_a_new_checkpoint_are_given_up_and_others_are_not(tmp_path: Path, exit_code: int) -> None:
    latest = tmp_path / "checkpoints" / "latest"
    latest.parent.mkdir()
    for step in range(4):  # each makes a checkpoint
        latest.write_text(f"step_{step:08d}\n")
        code, output = after_srun(exit_code, tmp_path)
        assert code == 0 and "scontrol requeue 7" in output
    code, output = after_srun(exit_code, tmp_path)
    assert code == 0 and "2 of 2 times without a new checkpoint" in output
    code, output = after_srun(exit_code, tmp_path)
    assert code == exit_code and "given up" in output and "scontrol" not in output
    code, output = after_srun(exit_code, tmp_path, job="8")  # submitted anew, by a person
    assert code == 0 and "scontrol requeue 8" in output


def test_where_jobs_may_not_be_requeued_it_says_what_to_do(tmp_path: Path) -> None:
    code, output = after_srun(75, tmp_path, scontrol_exit=1)
    assert code == 75 and "submit it again" in output


def test_settings_reach_srun_and_the_trainer(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    srun.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "RUN_DIR": str(tmp_path / "a run"),
        "CONTAINER": "an image",
        "MODULES": "cuda nccl",
    }
    variables |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "grt", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_CPUS_PER_TASK": "12"}
    variables["BASH_FUNC_module%%"] = '() { echo "module: $*"; }'
    command = ["slurm/grt_1b.sh", "--seed", "7"]
    shown = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=True).stdout
    assert "module: load cuda nccl\n" in shown
    assert f"<--output={tmp_path}/a run/logs/7.0.rank%t>" in shown
    assert f"<--container-image=an image><--container-mounts={ROOT}:{ROOT}>" in shown
    assert f"<--run_dir><{tmp_path}/a run>" in shown and "<--seed><7>" in shown
