"""The same run under every launcher: the same losses for the same layout."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.distributed.launching import launcher, run, train_losses, write_run


def losses(folder: Path, dataset: Path, name: str, ranks: int) -> list[float]:
    """Of 4 steps of tensor-parallel ranks, after checks that the run left no process and compiled no DeepSpeed op."""
    folder.mkdir()
    extensions = folder / "extensions"  # where DeepSpeed builds its ops
    extensions.mkdir()
    options = [*write_run(folder, dataset), "--parallel.tensor_parallel", str(ranks)]
    ended = run(launcher(name, ranks), options, {"TORCH_EXTENSIONS_DIR": str(extensions)})
    ended.check_succeeded()
    assert list(extensions.iterdir()) == []
    return train_losses(folder / "run")


@pytest.fixture(scope="module")
def two_ranks(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("two") / "job", dataset, "deepspeed", 2)


def test_one_process_gives_the_same_losses_with_and_without_a_launcher(dataset: Path, tmp_path: Path) -> None:
    plain = losses(tmp_path / "plain", dataset, "plain", 1)
    assert len(plain) == 4
    assert losses(tmp_path / "deepspeed", dataset, "deepspeed", 1) == plain
    assert losses(tmp_path / "torchrun", dataset, "torchrun", 1) == plain


def test_torchrun_gives_the_losses_of_the_deepspeed_launcher(dataset: Path, tmp_path: Path, two_ranks: list[float]) -> None:
    assert len(two_ranks) == 4
    assert losses(tmp_path / "job", dataset, "torchrun", 2) == two_ranks


def slurm_answers() -> bool:
    return shutil.which("sinfo") is not None and subprocess.run(["sinfo"], capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.skipif(
    not slurm_answers(), reason="no Slurm answers here (`sinfo` fails): launchers/local_slurm.sh start, and the export that it prints"
)
def test_srun_gives_the_losses_of_the_deepspeed_launcher(dataset: Path, tmp_path: Path, two_ranks: list[float]) -> None:
    assert losses(tmp_path / "job", dataset, "srun", 2) == two_ranks
