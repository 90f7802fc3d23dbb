"""Runs of the trainer that are stopped and go on over other ranks, or at another ZeRO stage, and back: losses, masters and moments.

What no layout changes in a checkpoint is tested in test_checkpoint.py; here the whole trainer runs on a real model.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import yaml
from deepspeed import DeepSpeedEngine

from pretrain import train
from pretrain.checkpoint import load_newest_whole
from pretrain.checkpoint_reader import CheckpointReader
from tests.distributed.launching import train_losses, write_run
from tests.ranks import run_ranks
from tests.toy_engine import full_state

STEPS = 2  # of a leg


class Layout(NamedTuple):
    tensor_parallel: int
    data_parallel: int
    stage: int


HOME = Layout(1, 2, 3)


def write_options(folder: Path, dataset: Path, steps: int, precision: str) -> list[str]:
    """Options of a run of so many steps, of 4 and then 8 sequences, at depths 0 to 3; --ds_config is missing."""
    options = write_run(folder, dataset)
    path = folder / "run.yaml"
    config = yaml.safe_load(path.read_text())
    config["model"] |= {"core_blocks": 2, "min_depth": 0, "max_depth": 3, "depth_sampler": "stratified"}
    config["optim"] |= {"precision": precision, "initial_batch_size": 4, "global_batch_size": 8, "ramp_tokens": 3 * 4 * 32}
    config["schedule"]["total_tokens"] = (3 * 4 + (steps - 3) * 8) * 32
    config["checkpoint"]["every_steps"] = config["eval"]["every_steps"] = steps
    path.write_text(yaml.safe_dump(config))
    for stage in (1, 2, 3):
        (folder / f"stage{stage}.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    return options[:2]


def leg(options: list[str], last: int) -> list[str]:
    """In a rank: trains until step `last`. Returns the masters and moments which, merged over all ranks, were not those of the checkpoint
    right after the load."""
    differing: list[str] = []

    def load(engine: DeepSpeedEngine, candidates: list[Path]) -> tuple[Path, dict[str, Any]]:
        found = load_newest_whole(engine, candidates)
        reader = CheckpointReader(found[0])
        for name, tensor in full_state(engine).items():
            kind, _, parameter = name.partition("/")
            if not torch.equal(tensor, reader.read(parameter, kind)):
                differing.append(name)
        assert reader.manifest["optimizer_step"] == last - STEPS
        return found

    command = mock.patch.object(sys, "argv", ["train.py", *options])
    with command, mock.patch.object(train, "load_newest_whole", load), mock.patch.object(train, "steps_to_end", lambda *_: last):
        train.main()
    return differing


def travel(folder: Path, dataset: Path, route: list[Layout], steps: int, precision: str = "fp32") -> list[float]:
    """The losses of a run that is of each layout for STEPS steps, or, if it is of one, for all `steps`. Loads are compared."""
    options = write_options(folder, dataset, steps, precision)
    for number, layout in enumerate(route, start=1):
        last = steps if len(route) == 1 else number * STEPS
        ds_config = ["--ds_config", str(folder / f"stage{layout.stage}.json"), "--parallel.tensor_parallel", str(layout.tensor_parallel)]
        ranks = run_ranks(leg, layout.tensor_parallel * layout.data_parallel, [*options, *ds_config], last)
        assert ranks == [[]] * len(ranks), layout
    return train_losses(folder / "run")


def check_route(folder: Path, dataset: Path, route: list[Layout], tolerance: float, precision: str = "fp32") -> None:
    steps = len(route) * STEPS
    expected = travel(folder / "stayed", dataset, [HOME], steps, precision)
    found = travel(folder / "travelled", dataset, route, steps, precision)
    assert len(found) == steps
    assert found == pytest.approx(expected, rel=tolerance)


def test_a_run_goes_on_over_other_ranks_and_at_other_stages(dataset: Path, tmp_path: Path) -> None:
    check_route(tmp_path, dataset, [HOME, Layout(2, 1, 1), Layout(1, 2, 2), Layout(1, 1, 1), HOME], 1e-5)
