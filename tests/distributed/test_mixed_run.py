"""A run over a mixture, with documents kept apart, a loss mask and a batch ramp: other layouts, a resume, and changes at a resume."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.distributed.launching import launcher, run, write_run

STEPS = 8  # of 2, 2, 4, 4, ... sequences of 32 tokens


def options(folder: Path, datasets: dict[str, Path], **changes: Any) -> list[str]:
    written = write_run(folder, next(iter(datasets.values())))
    path = folder / "run.yaml"
    config = yaml.safe_load(path.read_text())
    weights = dict(zip(datasets, (0.5, 0.3, 0.2), strict=True))
    config["data"] = {
        "sequence_length": 32,
        "sources": {name: {"path": str(dataset), "weight": weights[name]} for name, dataset in datasets.items()},
        "document_boundaries": "attention_and_loss",
    }
    config["optim"] |= {"initial_batch_size": 2, "ramp_tokens": 4 * 32}
    config["schedule"]["total_tokens"] = (2 * 2 + (STEPS - 2) * 4) * 32
    config["log"] |= {"digest_every_steps": 1}
    for section, values in changes.items():
        config[section] |= values
    path.write_text(yaml.safe_dump(config))
    return written


def rows(folder: Path, key: str) -> list[Any]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row[key] for row in map(json.loads, lines) if key in row]


@pytest.fixture(scope="module")
def whole(mixed_datasets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process, uninterrupted."""
    folder = tmp_path_factory.mktemp("whole")
    run(launcher("plain", 1), options(folder, mixed_datasets)).check_succeeded()
    assert rows(folder, "step")[-1] == STEPS and len(rows(folder, "loss")) == len(rows(folder, "batch_digest")) == STEPS
    assert rows(folder, "tokens") == [32 * n for n in (2, 4, 8, 12, 16, 20, 24, 28)]
    return folder


def forget_after(folder: Path, step: int) -> None:
    """As if the run had been killed when the checkpoint of that step was its newest."""
    for checkpoint in (folder / "run" / "checkpoints").glob("step_*"):
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)


def test_two_data_parallel_ranks_give_the_same_run_and_two_tensor_parallel_ones_go_on_with_it(
    whole: Path, mixed_datasets: dict[str, Path], tmp_path: Path
) -> None:
    command = options(tmp_path, mixed_datasets)
    run(launcher("torchrun", 2), command).check_succeeded()
    assert len(rows(tmp_path, "slowest_rank")) == STEPS and not rows(whole, "slowest_rank")
    for _ in ("data parallel", "tensor parallel from the fifth step"):
        assert rows(tmp_path, "batch_digest") == rows(whole, "batch_digest")
        assert rows(tmp_path, "loss") == pytest.approx(rows(whole, "loss"), rel=1e-5)
        assert rows(tmp_path, "validation_loss/depth_2") == pytest.approx(rows(whole, "validation_loss/depth_2"), rel=1e-5)
        if len(list(tmp_path.glob("run/checkpoints/step_*"))) > 2:
            forget_after(tmp_path, 4)
            run(launcher("torchrun", 2), [*command, "--parallel.tensor_parallel", "2", "--data.workers", "0"]).check_succeeded()


def test_every_source_is_validated_by_itself(whole: Path, mixed_datasets: dict[str, Path]) -> None:
    for name in mixed_datasets:
        first, *_, last = rows(whole, f"validation_loss/{name}/depth_2")
        assert last < first


def test_batch_and_mixture_may_change_at_a_resume(whole: Path, mixed_datasets: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(whole / "run", tmp_path / "run")
    forget_after(tmp_path, 4)
    names = list(mixed_datasets)
    sources = {name: {"path": str(mixed_datasets[name]), "weight": 1} for name in names[:2]}
    command = options(
        tmp_path, mixed_datasets, data={"sources": sources}, optim={"global_batch_size": 8, "initial_batch_size": None, "ramp_tokens": None}
    )
    run(launcher("plain", 1), command).check_refused("was made with data.mixture", "--checkpoint.allow_change")
    allow = ["--checkpoint.allow_change", '["data.mixture", "dataset", "optim"]']
    ended = run(launcher("plain", 1), [*command, *allow])
    ended.check_succeeded()
    assert rows(tmp_path, "tokens") == [32 * n for n in (2, 4, 8, 12, 20, 28)]
    assert rows(tmp_path, "batch_digest")[:4] == rows(whole, "batch_digest")[:4]
    manifest = json.loads((tmp_path / "run/checkpoints/step_00000006/manifest.json").read_text())
    firsts = [first for first, _ in manifest["progress"]["mixture"]]
    assert firsts == [0, 12]
