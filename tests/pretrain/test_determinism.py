"""`compute.deterministic`: what it sets, what it refuses, and that a run with it resumes as one without does."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pretrain.determinism import make_deterministic
from pretrain.train import main
from tests.distributed.launching import write_run
from tests.faults.runs import same_state
from tests.ranks import run_ranks


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("restored")
def test_torch_is_strict_and_the_libraries_read_it_in_the_environment() -> None:
    environment: dict[str, str] = {}
    make_deterministic(environment)
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark


@pytest.mark.usefixtures("restored")
def test_what_the_environment_has_is_left_if_it_is_deterministic_too() -> None:
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "^nvls"}
    make_deterministic(environment)
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "^nvls"}


@pytest.mark.parametrize(("name", "value"), [("CUBLAS_WORKSPACE_CONFIG", ":0:0"), ("NCCL_ALGO", "NVLS"), ("NCCL_ALGO", "Ring,NVLSTree")])
def test_a_contradicting_environment_is_refused_by_its_name(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"compute.deterministic is true, but {name} is '{value}'"):
        make_deterministic({name: value})
    assert not torch.are_deterministic_algorithms_enabled()


def train(options: list[str]) -> bool:
    """In a rank: a whole run. Whether it was strict."""
    sys.argv = ["pretrain/train.py", *options, "--compute.deterministic", "true"]
    main()
    return torch.are_deterministic_algorithms_enabled() and os.environ["NCCL_ALGO"] == "Ring"


def test_a_resumed_run_ends_with_the_same_weights(dataset: Path, tmp_path: Path) -> None:
    options = write_run(tmp_path, dataset)
    assert run_ranks(train, 1, options) == [True]
    last = tmp_path / "run" / "checkpoints" / "step_00000004"
    last.rename(tmp_path / "whole")
    run_ranks(train, 1, options)
    assert same_state(tmp_path / "whole", last)
