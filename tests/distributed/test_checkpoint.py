"""Checkpoints across layouts, and what happens when saving or loading goes wrong on one rank or all.

A spawn of ranks costs seconds, so fixtures do many things in one and the tests assert on what they returned.
"""

import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param

from pretrain import checkpoint as checkpoint_module
from pretrain.checkpoint import Keep, load_checkpoint, take_snapshot, write_snapshot
from pretrain.checkpoint_reader import CheckpointError, find_newest
from tests import toy_engine
from tests.ranks import RankError, run_ranks

AVAILABLE = ZeroParamStatus.AVAILABLE
Layout = tuple[int, int] | tuple[int, int, int]  # (tensor parallel, data parallel), at ZeRO stage 3 or (..., stage)
Case = tuple[Layout, Layout, str]  # saved at, loaded at, precision
STAGES: list[Layout] = [(1, 2, 1), (1, 2, 2)]  # in fp32: test_elastic.py
# At (1, 4) a rank owns nothing of a bias.
WORLDS: dict[int, list[Layout]] = {1: [(1, 1)], 4: [(2, 2), (1, 4)], 2: [(2, 1), (1, 2), *STAGES]}
PRECISIONS: dict[str, list[Layout]] = {"fp32": [(1, 1), (2, 2), (1, 4), (2, 1), (1, 2)], "bf16": [(1, 1), (2, 2), *STAGES]}
CASES: list[Case] = [
    (source, target, precision)
    for precision, layouts in PRECISIONS.items()
    for source in layouts
    for target in layouts
    if not (source in WORLDS[2] and target in WORLDS[4])  # one more start of four ranks, and (1, 1) to those is of the same kind
    if not {source, target} & {*STAGES} or source == target or (1, 1) in (source, target)
]


def _save(engine: Any, directory: Path, step: int, keep: int | None = None) -> Path:
    snapshot = take_snapshot(engine, {"step": step, "position": 4 * step}, {"model": {}}, {"seed": 0})
    return write_snapshot(snapshot, directory, Keep(keep))


# ---- another layout ----


def _train_save_continue(folder: Path, layout: Layout, precision: str) -> None:
    """Leaves in `folder` a checkpoint of step 3, the state it should hold, and how the run went on."""
    toy_engine.start(layout[0])
    engine = toy_engine.build(layout[0], precision, stage=_stage(layout))
    toy_engine.train(engine, 0, 3)
    folder = folder / f"{layout}{precision}"
    _save(engine, folder, 3)
    expected: dict[str, Any] = {"state": toy_engine.full_state(engine)}
    expected |= {"losses": toy_engine.train(engine, 3, 3), "after": toy_engine.full_state(engine)}
    if torch.distributed.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")
    torch.distributed.barrier()


def _load_continue(folder: Path, source: Layout, target: Layout, precision: str) -> dict[str, Any]:
    """Loads into an engine of other weights and returns how it differs from the run that was saved."""
    toy_engine.start(target[0])
    engine = toy_engine.build(target[0], precision, seed=1, stage=_stage(target))
    toy_engine.train(engine, 7, 2)  # moments and step counts that must go
    folder = folder / f"{source}{precision}"
    newest = find_newest(folder)
    assert newest is not None
    progress = load_checkpoint(engine, newest)
    expected = torch.load(folder / "expected.pt")
    state = toy_engine.full_state(engine)
    resident = engine.optimizer.persistent_parameters if _stage(target) == 3 else []
    outcome = {
        "progress": progress,
        "unequal": [name for name, tensor in state.items() if not torch.equal(tensor, expected["state"][name])],
        "not resident": [parameter.ds_id for parameter in resident if parameter.ds_status != AVAILABLE],
        "stale": _stale_weights(engine),
        "losses": (toy_engine.train(engine, 3, 3), expected["losses"]),
    }
    after = toy_engine.full_state(engine)
    outcome["drift"] = max((tensor - expected["after"][name]).abs().max().item() for name, tensor in after.items())
    return outcome


def _stage(layout: Layout) -> int:
    return layout[2] if len(layout) == 3 else 3


def _stale_weights(engine: Any) -> list[str]:
    """Names of parameters whose weight in use, gathered or resident, is not the rounded master."""
    masters = {name: safe_get_full_fp32_param(parameter) for name, parameter in engine.module.named_parameters()}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [
            name
            for name, parameter in engine.module.named_parameters()
            if not torch.equal(parameter.data, masters[name].to(parameter.dtype))
        ]


def _save_and_load(folder: Path, world_size: int, saves: bool, loads: list[Case]) -> dict[Case, dict[str, Any]]:
    for precision, layouts in PRECISIONS.items():
        for layout in layouts:
            if saves and layout in WORLDS[world_size]:
                _train_save_continue(folder, layout, precision)
    return {case: _load_continue(folder, *case) for case in loads}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, dict[str, Any]]:
    """Rank 0's outcome of each case. Each world saves its layouts and loads all that is there; one rank comes back for the rest."""
    folder = tmp_path_factory.mktemp("layouts")
    found: dict[Case, dict[str, Any]] = {}
    there: list[Layout] = []
    for world_size in (1, 4, 2, 1):
        own = WORLDS[world_size]
        new = own[0] not in there
        there += own if new else []
        cases = [case for case in CASES if case[0] in there and case[1] in own and case not in found]
        found |= run_ranks(_save_and_load, world_size, folder, world_size, new, cases)[0]
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_masters_and_moments_are_equal_at_any_layout(outcomes: dict[Case, dict[str, Any]], case: Case) -> None:
    assert outcomes[case]["unequal"] == []
    assert outcomes[case]["progress"] == {"step": 3, "position": 12}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_in_use_are_the_loaded_ones(outcomes: dict[Case, dict[str, Any]], case: Case) -> None:
    assert outcomes[case]["stale"] == []
    assert outcomes[case]["not resident"] == []


@pytest.mark.parametrize("case", [case for case in CASES if case[0] == case[1]], ids=str)
def test_training_goes_on_bit_for_bit_on_the_same_layout(outcomes: dict[Case, dict[str, Any]], case: Case) -> None:
    losses, expected = outcomes[case]["losses"]
    assert losses == expected
    assert outcomes[case]["drift"] == 0


@pytest.mark.parametrize("case", [case for case in CASES if case[0] != case[1]], ids=str)
def test_training_goes_on_alike_on_another_layout(outcomes: dict[Case, dict[str, Any]], case: Case) -> None:
    losses, expected = outcomes[case]["losses"]
    tolerance = 1e-6 if case[2] == "fp32" else 1e-2  # in bf16 partial sums round differently
    assert losses == pytest.approx(expected, rel=tolerance)
    assert outcomes[case]["drift"] < (1e-6 if case[2] == "fp32" else 1e-2)


# ---- what is refused, and saves that fail ----


def _message(action: Callable[[], Any]) -> str:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return "no error"


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _refusals(folder: Path) -> dict[str, str]:
    """Two tensor-parallel ranks that are asked to load what they must not."""
    toy_engine.start(2)
    engine = toy_engine.build(2)
    toy_engine.train(engine, 0, 1)
    good = _save(engine, folder, 1)
    damaged, short = folder / "damaged", folder / "short"
    if torch.distributed.get_rank() == 0:
        for copy in (damaged, short):
            shutil.copytree(good, copy)
        _flip(damaged / "__1_0.distcp")
        os.truncate(short / "__1_0.distcp", 1000)
    torch.distributed.barrier()
    before = toy_engine.full_state(engine)
    wider, other = toy_engine.build(2, outputs=4), toy_engine.build(2)
    other.module.extra = other.module.head  # as if the model had a further layer of that name, and none called head
    del other.module.head
    messages = {
        "damaged": _message(lambda: load_checkpoint(engine, damaged)),
        "short": _message(lambda: load_checkpoint(engine, short)),
        "absent": _message(lambda: load_checkpoint(engine, folder / "step_00000009")),
        "shape": _message(lambda: load_checkpoint(wider, good)),
        "shape at stage 1": _message(lambda: load_checkpoint(toy_engine.build(2, outputs=4, stage=1), good)),
        "name": _message(lambda: load_checkpoint(other, good)),
        "stage": _message(lambda: _save(toy_engine.build(2, stage=0), folder, 2)),
    }
    after = toy_engine.full_state(engine)
    assert all(torch.equal(before[name], after[name]) for name in before), "a refused checkpoint changed the engine"
    return messages


def _failing_saves(folder: Path, small_disk: Path | None) -> dict[str, Any]:
    """Two data-parallel ranks, of which one cannot write; checkpoints that come and go; a disk that fills."""
    toy_engine.start(1)
    engine = toy_engine.build(1)
    toy_engine.train(engine, 0, 1)
    _save(engine, folder, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if torch.distributed.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # within the first large tensor
    found: dict[str, Any] = {"one rank": _message(lambda: _save(engine, folder, 2)), "left": sorted(os.listdir(folder))}
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for step in (2, 3, 4):
        _save(engine, folder, step, keep=2)
    found["kept"] = sorted(os.listdir(folder))
    if torch.distributed.get_rank() == 0:
        (folder / "step_00000004" / "manifest.json").unlink()
    _save(engine, folder, 5, keep=2)
    found["kept beside an incomplete one"] = sorted(os.listdir(folder))
    _save(engine, folder, 3, keep=2)  # as a run that was resumed from step 2
    torch.distributed.barrier()
    found["back"] = str(find_newest(folder))
    with mock.patch.object(shutil, "rmtree"):  # nothing can be removed
        _save(engine, folder, 6, keep=1)
        found["kept where nothing can be removed"] = sorted(os.listdir(folder))
    _save(engine, folder, 7, keep=1)
    found["kept afterwards"] = sorted(os.listdir(folder))
    if small_disk is not None:
        found["disk"] = _message(lambda: [_save(engine, small_disk, step) for step in range(20)])
        newest = find_newest(small_disk)
        assert newest is not None
        load_checkpoint(engine, newest)
        found["disk left"] = sorted(os.listdir(small_disk))
    return found


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A file system of 8 MiB: room for some checkpoints of the toy. None where this user may not mount one."""
    folder = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True).returncode == 0
    yield folder if mounted else None
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def _refusals_and_failing_saves(folder: Path, small_disk: Path | None) -> tuple[dict[str, str], dict[str, Any]]:
    return _refusals(folder / "refusals"), _failing_saves(folder / "saves", small_disk)


@pytest.fixture(scope="module")
def trouble(tmp_path_factory: pytest.TempPathFactory, small_disk: Path | None) -> list[tuple[dict[str, str], dict[str, Any]]]:
    return run_ranks(_refusals_and_failing_saves, 2, tmp_path_factory.mktemp("trouble"), small_disk)


@pytest.fixture
def refusals(trouble: list[tuple[dict[str, str], dict[str, Any]]]) -> list[dict[str, str]]:
    """What each of two ranks was told, by case."""
    return [refused for refused, _ in trouble]


@pytest.fixture
def failing_saves(trouble: list[tuple[dict[str, str], dict[str, Any]]]) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return [found for _, found in trouble]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("damaged", "damaged/__1_0.distcp does not match its sha256"),
        ("damaged", "/damaged: the checkpoint is damaged: "),
        ("short", "short/__1_0.distcp has 1000 bytes, not"),
        ("absent", "step_00000009/manifest.json is missing"),
        ("shape", "the parameter head.weight is [3, 5] in it and [4, 5] in the model"),
        ("name", "it holds the parameter head.weight, which the model does not have"),
        ("shape at stage 1", "the parameter head.weight is [3, 5] in it and [4, 5] in the model"),
        ("stage", "checkpoints hold the state of ZeRO, and ds_config has stage 0"),
    ],
)
def test_every_rank_refuses_with_the_same_message(refusals: list[dict[str, str]], case: str, expected: str) -> None:
    assert expected in refusals[0][case]
    assert refusals[0][case] == refusals[1][case]


def test_a_write_error_on_one_rank_is_an_error_on_every_rank(failing_saves: list[dict[str, Any]]) -> None:
    for found in failing_saves:
        assert re.search("cannot save .*step_00000002 .*: rank 1: .*File too large", found["one rank"])
        assert found["left"] == ["latest", "step_00000001"]


def test_a_full_disk_is_named_and_leaves_the_earlier_checkpoints(failing_saves: list[dict[str, Any]], small_disk: Path | None) -> None:
    if small_disk is None:
        pytest.skip("this user may not mount a small file system")
    for found in failing_saves:
        assert "No space left on device" in found["disk"]
        assert str(small_disk) in found["disk"]
        saved = found["disk left"][1:]
        assert found["disk left"][0] == "latest"
        assert saved == [f"step_{step:08d}" for step in range(len(saved))]


def test_old_checkpoints_that_cannot_be_removed_stop_no_save(failing_saves: list[dict[str, Any]]) -> None:
    for found in failing_saves:
        assert {"step_00000006", ".tmp_old_step_00000005"} < set(found["kept where nothing can be removed"])
        assert [name for name in found["kept afterwards"] if name != "step_00000004"] == ["latest", "step_00000007"]


def test_keep_removes_older_checkpoints_only(failing_saves: list[dict[str, Any]]) -> None:
    assert failing_saves[0]["kept"] == ["latest", "step_00000003", "step_00000004"]


def test_incomplete_checkpoints_do_not_count_towards_keep(failing_saves: list[dict[str, Any]]) -> None:
    complete, incomplete = {"step_00000003", "step_00000005"}, {"step_00000004"}
    assert set(failing_saves[0]["kept beside an incomplete one"]) == complete | incomplete | {"latest"}


def test_a_run_that_went_back_continues_from_what_it_saved_last(failing_saves: list[dict[str, Any]]) -> None:
    assert Path(failing_saves[0]["back"]).name == "step_00000003"


# ---- kill -9 ----


def _resume_save_and_die(folder: Path, moment: tuple[str, int] | None) -> str:
    """Resumes, saves the next step, and is killed in the save after it: at the n-th call of a function, on rank 0."""
    toy_engine.start(1)
    engine = toy_engine.build(1)
    newest = find_newest(folder)
    step = load_checkpoint(engine, newest)["step"] if newest else 0
    toy_engine.train(engine, step, 1)
    _save(engine, folder, step + 1)
    if moment is not None:
        if torch.distributed.get_rank() == 0:
            _die_at(*moment)
        _save(engine, folder, step + 2)
    return f"resumed from {step}"


def _die_at(name: str, call: int) -> None:
    original = getattr(checkpoint_module, name)
    calls = iter(range(1, 100))

    def deadly(*args: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(checkpoint_module, name, deadly)


def test_a_killed_save_leaves_the_earlier_checkpoint_and_the_next_run_goes_on(tmp_path: Path) -> None:
    not_yet_renamed, latest_not_yet_moved = ("_hash_own_files", 1), ("_sync", 2)
    for step, (ranks, moment) in enumerate(((2, not_yet_renamed), (1, latest_not_yet_moved)), start=1):
        with pytest.raises(RankError, match="rank 0 was killed by SIGKILL"):
            run_ranks(_resume_save_and_die, ranks, tmp_path, moment)
        newest = find_newest(tmp_path)
        assert newest is not None
        assert newest.name == f"step_{step:08d}"
    assert run_ranks(_resume_save_and_die, 1, tmp_path, None) == ["resumed from 2"]
    assert sorted(os.listdir(tmp_path)) == ["latest", *(f"step_{step:08d}" for step in (1, 2, 3))]
