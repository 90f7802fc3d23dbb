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

from pretrain import saving, train
from pretrain.checkpoint import Snapshot, load_first_whole, take_snapshot
from pretrain.checkpoint_reader import CheckpointReader
from tests.distributed.launching import train_losses, write_run
from tests.distributed.runs import run_steps, small_run, start
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
    config["checkpoint"]["every_steps"] = steps
    config["eval"] |= {"every_steps": steps, "max_sequences": 2, "depths": [1]}
    config["data"]["workers"] = 0
    path.write_text(yaml.safe_dump(config))
    for stage in (1, 2, 3):
        (folder / f"stage{stage}.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    return options[:2]


def leg(folder: Path, options: list[str], last: int) -> list[str]:
    """In a rank: trains until step `last` and leaves in `folder` all masters and moments, merged over the ranks, as they were when saved.
    Returns those which, right after the load, were not as the leg before left them, or not as the checkpoint has them."""
    differing: list[str] = []

    def save(engine: DeepSpeedEngine, *arguments: Any) -> Snapshot:
        state = full_state(engine)
        if torch.distributed.get_rank() == 0:
            torch.save(state, folder / "state.pt")
        return take_snapshot(engine, *arguments)

    def load(engine: DeepSpeedEngine, candidates: list[Path]) -> tuple[Path, dict[str, Any]] | None:
        found = load_first_whole(engine, candidates)
        if found is None:
            return None
        left, reader = torch.load(folder / "state.pt"), CheckpointReader(found[0])
        for name, tensor in full_state(engine).items():
            kind, _, parameter = name.partition("/")
            if not torch.equal(tensor, left[name]) or not torch.equal(tensor, reader.read(parameter, kind)):
                differing.append(name)
        assert reader.manifest["optimizer_step"] == last - STEPS
        return found

    with (
        mock.patch.object(sys, "argv", ["train.py", *options]),
        mock.patch.object(saving, "take_snapshot", save),
        mock.patch.object(train, "load_first_whole", load),
        mock.patch.object(train, "steps_to_end", lambda *_: last),
    ):
        train.main()
    return differing


def travel(folder: Path, dataset: Path, route: list[Layout], steps: int, precision: str = "fp32") -> list[float]:
    """The losses of a run that is of each layout for STEPS steps, or, if it is of one, for all `steps`. Loads are compared."""
    options = write_options(folder, dataset, steps, precision)
    for number, layout in enumerate(route, start=1):
        last = steps if len(route) == 1 else number * STEPS
        ds_config = ["--ds_config", str(folder / f"stage{layout.stage}.json"), "--parallel.tensor_parallel", str(layout.tensor_parallel)]
        ranks = run_ranks(leg, layout.tensor_parallel * layout.data_parallel, folder, [*options, *ds_config], last)
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


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [3, 2, 1])
def test_a_run_goes_on_at_every_layout_and_back(dataset: Path, tmp_path: Path, stage: int) -> None:
    layouts = [Layout(2, 1, stage), Layout(2, 2, stage), Layout(1, 4, stage), Layout(1, 1, stage)]
    check_route(tmp_path, dataset, [HOME, *(leg for layout in layouts for leg in (layout, HOME))], 1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-4)])
def test_a_run_goes_from_any_stage_to_any_other(dataset: Path, tmp_path: Path, precision: str, tolerance: float) -> None:
    route = [
        HOME,
        Layout(2, 2, 1),
        Layout(1, 4, 2),
        Layout(2, 1, 3),
        Layout(1, 2, 2),
        Layout(2, 2, 2),
        Layout(1, 1, 1),
        Layout(1, 4, 1),
        HOME,
    ]
    check_route(tmp_path, dataset, route, tolerance, precision)


def bf16_runs(dataset: Path) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """In a rank: losses and final state of 20 steps of 4 micro-batches in fp32, and in bf16 at each stage."""
    found = []
    for stage, precision in ((3, "fp32"), (3, "bf16"), (2, "bf16"), (1, "bf16")):
        config = small_run(dataset, precision=precision, core_residency="auto" if stage < 3 else "step", micro_batch_size=1)
        engine = start(config, stage)
        found.append((run_steps(engine, config, 20), full_state(engine)))
        engine.destroy()
    return found


@pytest.mark.nightly
def test_bf16_is_as_close_to_fp32_at_every_stage(dataset: Path) -> None:
    """DeepSpeed 0.19.8 has another optimizer class for bf16 with fp32 gradients at each stage."""
    (losses, exact), *others = run_ranks(bf16_runs, 2, dataset)[0]
    masters = [name for name in exact if name.startswith("master/")]
    size = sum(float(exact[name].square().sum()) for name in masters) ** 0.5
    distances = [sum(float((state[name] - exact[name]).square().sum()) for name in masters) ** 0.5 / size for _, state in others]
    assert max(distances) < 2e-3 and distances == pytest.approx([distances[0]] * 3, rel=0.1)
    for own, _ in others:
        assert own == pytest.approx(losses, rel=1e-3)
