"""Which checkpoint a run starts from, and which changes it refuses by name."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.config import GRTConfig
from pretrain.checkpoint_reader import FORMAT, LATEST, MANIFEST, CheckpointError, sign_manifest
from pretrain.config import CheckpointConfig, EvalConfig, LogConfig, OptimConfig, ParallelConfig, RunConfig
from pretrain.mixture import Mixture
from pretrain.resume import Progress, find_checkpoint, identity, resume_candidates, rollback_candidates, stream_phases
from pretrain.schedule import ScheduleConfig
from pretrain.sources import DataConfig, SourceConfig, open_sources


@pytest.fixture
def run(dataset: Path, tmp_path: Path) -> RunConfig:
    return RunConfig(
        run_dir=tmp_path / "run",
        model=GRTConfig(vocab_size=512, hidden_size=32, num_heads=2, max_depth=2, max_positions=64),
        data=DataConfig(32, str(dataset)),
        schedule=ScheduleConfig(total_tokens=4096),
        optim=OptimConfig(global_batch_size=8),
    )


def current(run: RunConfig) -> dict[str, Any]:
    return identity(run, open_sources(run.data))


def find(run: RunConfig) -> Path | None:
    return find_checkpoint(run, current(run))


def save(run: RunConfig, step: int, position: int = 0) -> Path:
    """A checkpoint without weights, as far as the search for one goes."""
    path = run.run_dir / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    manifest = {"format": FORMAT, "step": step, "identity": current(run), "progress": {"position": position}, "files": {}, "parameters": {}}
    (path / MANIFEST).write_text(json.dumps(sign_manifest(manifest)))
    return path


def changed(run: RunConfig, section: str, **values: Any) -> RunConfig:
    return replace(run, **{section: replace(getattr(run, section), **values)})


def resume(run: RunConfig, source: str | Path, *allow_change: str) -> RunConfig:
    return replace(run, checkpoint=CheckpointConfig(resume=str(source), allow_change=list(allow_change)))


def test_progress_counts_steps_sequences_and_tokens(run: RunConfig) -> None:
    ramp = changed(run, "optim", initial_batch_size=4, ramp_tokens=64)
    assert Progress().after_step(ramp) == Progress(1, 4, 128)
    assert Progress().after_step(ramp).after_step(ramp) == Progress(2, 12, 384)
    assert Progress(2, 16, 512).after_step(run) == Progress(3, 24, 768)


def test_a_run_starts_afresh_in_an_empty_directory(run: RunConfig) -> None:
    assert find(run) is None
    assert find(resume(run, "none")) is None


def test_auto_takes_the_newest_complete_checkpoint(run: RunConfig) -> None:
    save(run, 9)
    newest = save(run, 10)
    half_written = save(run, 11)
    (half_written / MANIFEST).unlink()
    (run.run_dir / "checkpoints" / ".tmp_step_00000012").mkdir()
    assert find(run) == newest


def test_a_run_without_a_whole_checkpoint_starts_afresh_only_when_it_is_asked_to(run: RunConfig) -> None:
    (save(run, 9) / MANIFEST).unlink()
    with pytest.raises(
        ValueError, match="holds no whole checkpoint: .*step_00000009 is passed over: .*manifest.json is missing.*move this directory away"
    ):
        find(run)
    assert find(resume(run, "none")) is None


def test_what_a_damaged_checkpoint_gives_way_to_fits_the_run_as_it_does(run: RunConfig) -> None:
    first, second = save(run, 10), save(run, 20)
    other = changed(run, "optim", weight_decay=0.2)
    newest = save(other, 30)
    assert resume_candidates(run, current(run), None) == []
    assert resume_candidates(other, current(other), newest) == [newest]
    allowed = changed(other, "checkpoint", allow_change=["optim.weight_decay"])
    assert resume_candidates(allowed, current(allowed), newest) == [newest, second, first]


def test_a_run_rolls_back_to_checkpoints_that_it_has_without_interruptions_too(run: RunConfig, tmp_path: Path) -> None:
    run = changed(run, "checkpoint", every_steps=10)
    assert rollback_candidates(run, None) == []
    elsewhere = save(replace(run, run_dir=tmp_path / "elsewhere"), 40)
    assert rollback_candidates(run, elsewhere) == [elsewhere]
    for step in (10, 20, 23):
        save(run, step)
    assert [path.name[-2:] for path in rollback_candidates(run, elsewhere)] == ["20", "10", "23"]
    assert rollback_candidates(changed(run, "checkpoint", every_steps=9), None)[0].name[-2:] == "23"


def test_existing_checkpoints_are_not_overwritten_by_a_fresh_start(run: RunConfig) -> None:
    save(run, 9)
    with pytest.raises(ValueError, match="holds checkpoints, up to step_00000009. Choose another run_dir, or checkpoint.resume auto"):
        find(resume(run, "none"))


def test_with_the_newest_moved_away_the_run_goes_on_from_the_one_before(run: RunConfig, tmp_path: Path) -> None:
    before, newest = save(run, 9), save(run, 10)
    (run.run_dir / "checkpoints" / LATEST).write_text(newest.name)
    assert find(run) == newest
    newest.rename(tmp_path / "damaged")
    assert find(run) == before


def test_a_named_checkpoint_starts_a_run_that_then_goes_on_from_its_own(run: RunConfig, tmp_path: Path) -> None:
    start = save(replace(run, run_dir=tmp_path / "other"), 100)
    requeued = resume(run, start)
    assert find(requeued) == start
    (run.run_dir / "checkpoints" / ".tmp_step_00000101").mkdir(parents=True)
    assert find(requeued) == start
    own = save(run, 102)
    assert find(requeued) == own


def test_what_must_agree_is_checked_with_a_named_start_and_after_it(run: RunConfig, tmp_path: Path) -> None:
    start = save(replace(run, run_dir=tmp_path / "other"), 100)
    other_seed = replace(resume(run, start), seed=99)
    with pytest.raises(ValueError, match="other/checkpoints/step_00000100 was made with seed"):
        find(other_seed)
    save(run, 101)
    with pytest.raises(ValueError, match="run/checkpoints/step_00000101 was made with seed"):
        find(other_seed)


def test_a_named_checkpoint_must_exist_and_be_whole(run: RunConfig) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint: .*step_00000099"):
        find(resume(run, run.run_dir / "step_00000099"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data.sequence_length", 16),
        ("data.window_shards", 2),
        ("model.hidden_size", 64),
        ("model.state_noise", 0.0),
        ("model.depth_sampler", "fixed"),
        ("schedule.total_tokens", 8192),
        ("schedule.learning_rate", 1e-3),
        ("optim.global_batch_size", 16),
        ("optim.precision", "fp32"),
        ("optim.weight_decay", 0.0),
    ],
)
def test_a_changed_setting_is_refused_by_name_unless_it_is_allowed(run: RunConfig, name: str, value: Any) -> None:
    checkpoint = save(run, 1)
    section, field = name.split(".")
    other = changed(run, section, **{field: value})
    with pytest.raises(ValueError) as refused:
        find(other)
    old = getattr(getattr(run, section), field)
    assert f"was made with {name} = {old!r}; this run has {value!r}" in str(refused.value)
    assert f"--checkpoint.allow_change '[\"{name}\"]'" in str(refused.value)
    assert find(resume(other, "auto", name)) == checkpoint
    assert find(resume(other, "auto", section)) == checkpoint  # the whole section
    with pytest.raises(ValueError, match=f"was made with {name}"):
        find(resume(other, "auto", "seed"))  # another setting


@pytest.mark.parametrize("entry", ["sched", "schedule.total", "log"])
def test_an_allowed_change_of_what_is_not_compared_is_refused(run: RunConfig, entry: str) -> None:
    save(run, 1)
    with pytest.raises(ValueError, match=f"allow_change names {entry}, but .*schedule.total_tokens"):
        find(resume(run, "auto", entry))


def test_another_seed_is_refused_unless_it_is_allowed(run: RunConfig) -> None:
    checkpoint = save(run, 1)
    with pytest.raises(ValueError, match="made with seed = 1234; this run has 99"):
        find(replace(run, seed=99))
    assert find(resume(replace(run, seed=99), "auto", "seed")) == checkpoint


@pytest.mark.parametrize("name", ["dataset", "tokenizer"])
def test_another_dataset_or_tokenizer_is_refused_unless_it_is_allowed(run: RunConfig, name: str) -> None:
    checkpoint = save(run, 1)
    other = current(run) | {name: "f00d"}
    with pytest.raises(ValueError, match=f"made with {name} = '[0-9a-f]{{64}}'; this run has 'f00d'"):
        find_checkpoint(run, other)
    assert find_checkpoint(resume(run, "auto", name), other) == checkpoint


def test_the_dataset_may_move(run: RunConfig, dataset: Path, tmp_path: Path) -> None:
    checkpoint = save(run, 1)
    assert find(changed(run, "data", path=shutil.copytree(dataset, tmp_path / "moved"))) == checkpoint


def test_layout_logging_evaluation_and_saving_may_change(run: RunConfig) -> None:
    checkpoint = save(run, 1)
    other = replace(
        changed(run, "data", workers=3),
        parallel=ParallelConfig(tensor_parallel=2, micro_batch_size=4),
        checkpoint=CheckpointConfig(every_steps=7, keep=2),
        eval=EvalConfig(every_steps=5, max_sequences=None, depths=[1]),
        log=LogConfig(every_steps=1, tensorboard=False),
    )
    assert find(other) == checkpoint


def mixture_of(run: RunConfig, datasets: dict[str, Path], **weights: float) -> RunConfig:
    sources = {name: SourceConfig(str(datasets[name]), weight) for name, weight in weights.items()}
    return replace(run, data=DataConfig(32, sources=sources))


def test_a_mixture_is_part_of_the_identity_and_follows_the_datasets(
    run: RunConfig, mixed_datasets: dict[str, Path], tmp_path: Path
) -> None:
    mixed = mixture_of(run, mixed_datasets, code=0.75, calendar=0.25)
    checkpoint = save(mixed, 1)
    assert find(mixed) == checkpoint
    assert find(mixture_of(run, mixed_datasets, calendar=0.25, code=0.75)) == checkpoint  # another order
    moved = {name: shutil.copytree(path, tmp_path / name) for name, path in mixed_datasets.items()}
    assert find(mixture_of(run, moved, code=0.75, calendar=0.25)) == checkpoint
    other = mixture_of(run, mixed_datasets, code=0.5, calendar=0.5)
    with pytest.raises(
        ValueError, match=r"data.mixture = {'from sequence 0': {.*0.75.*this run has .*0.5.*allow_change '\[\"data.mixture\"\]'"
    ):
        find(other)
    assert find(resume(other, "auto", "data.mixture")) == checkpoint
    third = mixture_of(run, mixed_datasets, code=0.5, calendar=0.25, textwrap=0.25)
    with pytest.raises(ValueError, match="made with dataset.textwrap = None"):
        find(resume(third, "auto", "data.mixture"))
    assert find(resume(third, "auto", "data.mixture", "dataset")) == checkpoint


def test_a_run_of_one_dataset_goes_on_as_a_mixture_and_reads_nothing_again(run: RunConfig, mixed_datasets: dict[str, Path]) -> None:
    """The annealing phase that somebody adds to a run that is under way."""
    one = changed(run, "data", path=str(mixed_datasets["code"]))
    checkpoint = save(one, 1, position=700)
    sources = {"pretraining": SourceConfig(str(mixed_datasets["code"]), 1), "new": SourceConfig(str(mixed_datasets["calendar"]), 3)}
    later = resume(replace(run, data=DataConfig(32, sources=sources)), "auto", "dataset", "data.mixture")
    assert find(later) == checkpoint
    indices = open_sources(later.data)
    phases = stream_phases(later, indices, checkpoint)
    assert [phase.first_position for phase in phases] == [0, 700]
    mixture = Mixture(phases, later.seed)
    old = mixture.sources.index(indices["pretraining"].fingerprint)
    located, places = mixture.locate(np.arange(700, 1700))
    assert sorted(places[located == old].tolist()) == list(range(700, 950))
    assert sorted(places[located != old].tolist()) == list(range(750))


def test_document_boundaries_are_part_of_the_identity_and_older_checkpoints_had_none(run: RunConfig) -> None:
    checkpoint = save(run, 1)
    other = changed(run, "data", document_boundaries="attention")
    with pytest.raises(ValueError, match="made with data.document_boundaries = 'none'; this run has 'attention'"):
        find(other)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    del manifest["identity"]["data.document_boundaries"], manifest["sha256"]
    (checkpoint / MANIFEST).write_text(json.dumps(sign_manifest(manifest)))
    assert find(run) == checkpoint
    with pytest.raises(ValueError, match="made with data.document_boundaries = 'none'; this run has 'attention'"):
        find(other)


def test_sources_may_become_a_path_again(run: RunConfig, mixed_datasets: dict[str, Path]) -> None:
    mixed = mixture_of(run, mixed_datasets, code=0.75, calendar=0.25)
    checkpoint = save(mixed, 1)
    one = changed(run, "data", path=str(mixed_datasets["code"]))
    with pytest.raises(ValueError) as refused:
        find(one)
    for name in ("data.mixture", "dataset", "dataset.calendar", "dataset.code"):  # all of them at once, in the command that allows them
        assert f'"{name}"' in str(refused.value)
    assert find(resume(one, "auto", "data.mixture", "dataset")) == checkpoint
    dropped = mixture_of(run, mixed_datasets, code=1.0)
    assert find(resume(dropped, "auto", "data.mixture", "dataset.calendar")) == checkpoint


def test_another_sequence_length_is_refused_where_something_comes_after_so_many_tokens(run: RunConfig) -> None:
    checkpoint = save(run, 1)
    shorter = changed(run, "data", sequence_length=16)
    assert find(resume(shorter, "auto", "data.sequence_length")) == checkpoint
    ramp = changed(shorter, "optim", initial_batch_size=4, ramp_tokens=64)
    with pytest.raises(ValueError, match="was made with data.sequence_length 32: positions count sequences of it"):
        find(resume(ramp, "auto", "data.sequence_length", "optim"))
