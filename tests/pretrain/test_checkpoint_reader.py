"""Checkpoints as seen without an engine or ranks: contents, damage, and which one is the newest."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint import Keep, take_snapshot, write_snapshot
from pretrain.checkpoint_reader import KINDS, CheckpointError, CheckpointReader, find_newest, passed_over
from tests import toy_engine
from tests.ranks import run_ranks


def _save_at_tensor_parallel_2(folder: Path) -> dict[str, torch.Tensor]:
    toy_engine.start(2)
    engine = toy_engine.build(2)
    toy_engine.train(engine, 0, 2)
    write_snapshot(take_snapshot(engine, {"step": 2}, {"model": {"vocab_size": 20022}}, {"seed": 0, "dataset": "abc"}), folder, Keep())
    return toy_engine.full_state(engine)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of tensor parallel size 2, and the full tensors it should hold."""
    folder = tmp_path_factory.mktemp("checkpoints")
    state = run_ranks(_save_at_tensor_parallel_2, 2, folder)[0]
    return folder / "step_00000002", state


@pytest.fixture
def checkpoint(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved[0], tmp_path / "step_00000002"))


def test_reader_gives_the_full_tensors_that_were_trained(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    reader = CheckpointReader(saved[0])
    assert {f"{kind}/{name}" for name in reader.names() for kind in KINDS} == saved[1].keys()
    for key, expected in saved[1].items():
        kind, name = key.split("/")
        tensor = reader.read(name, kind)
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected), key


def test_manifest_says_what_is_in_it(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    manifest = CheckpointReader(saved[0]).manifest
    assert (manifest["step"], manifest["optimizer_step"], manifest["tensor_parallel"]) == (2, 2, 2)
    assert manifest["progress"] == {"step": 2}
    assert manifest["config"] == {"model": {"vocab_size": 20022}}
    assert manifest["identity"] == {"seed": 0, "dataset": "abc"}
    assert manifest["parameters"]["down.weight"] == {"shape": [5, 6], "tensor_parallel_dim": 1}
    assert manifest["parameters"]["norm.bias"] == {"shape": [5], "tensor_parallel_dim": None}
    assert manifest["files"].keys() == set(os.listdir(saved[0])) - {"manifest.json"}


def test_reading_starts_neither_deepspeed_nor_megatron() -> None:
    program = "import sys, pretrain.checkpoint_reader; sys.exit(bool({'deepspeed', 'megatron'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
def test_one_flipped_bit_is_found_in_any_file(checkpoint: Path, name: str) -> None:
    path = checkpoint / name
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 16
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} does not match its sha256"):
        CheckpointReader(checkpoint).verify()


def test_a_changed_manifest_is_refused(checkpoint: Path) -> None:
    manifest = checkpoint / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(CheckpointError, match="manifest.json does not match its own sha256"):
        CheckpointReader(checkpoint)


def test_a_truncated_file_is_refused_by_name_and_is_not_the_newest(checkpoint: Path) -> None:
    os.truncate(checkpoint / "__1_0.distcp", 10)
    with pytest.raises(CheckpointError, match="__1_0.distcp has 10 bytes"):
        CheckpointReader(checkpoint)
    assert find_newest(checkpoint.parent) is None


def test_a_missing_file_is_refused_by_name_and_is_not_the_newest(checkpoint: Path) -> None:
    (checkpoint / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="__0_0.distcp is missing"):
        CheckpointReader(checkpoint)
    assert find_newest(checkpoint.parent) is None


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}"])
def test_no_or_half_a_manifest_is_refused_and_is_not_the_newest(checkpoint: Path, content: str | None) -> None:
    manifest = checkpoint / "manifest.json"
    manifest.unlink()
    if content is not None:
        manifest.write_text(content)
    with pytest.raises(CheckpointError, match="manifest.json"):
        CheckpointReader(checkpoint)
    assert find_newest(checkpoint.parent) is None


def test_newest_is_what_latest_names_then_the_highest_complete_step(checkpoint: Path) -> None:
    directory = checkpoint.parent
    for step in (3, 4, 5):
        shutil.copytree(checkpoint, directory / f"step_{step:08d}")
    (directory / "step_00000005" / "manifest.json").unlink()
    shutil.copytree(checkpoint, directory / ".tmp_step_00000009")
    assert find_newest(directory) == directory / "step_00000004"
    (directory / "latest").write_text("step_00000003\n")
    assert find_newest(directory) == directory / "step_00000003"
    (directory / "latest").write_text("step_00000005\n")
    assert find_newest(directory) == directory / "step_00000004"
    missing = directory / "step_00000005" / "manifest.json"
    sentence = f"{directory}/step_00000005 is passed over: no complete checkpoint: {missing} is missing"
    assert passed_over(directory, directory / "step_00000004") == [sentence]  # once, though it is the newest by name and by `latest`


@pytest.mark.parametrize("content", [b"", b"\n", b"step_0000", b"/etc/passwd", b".", b"\xff\0\0"])
def test_a_damaged_latest_names_nothing_and_is_told(checkpoint: Path, content: bytes) -> None:
    directory = checkpoint.parent
    (directory / "latest").write_bytes(content)
    assert find_newest(directory) == checkpoint
    (sentence,) = passed_over(directory, checkpoint)
    assert sentence.startswith(f"{directory}/latest is damaged")


def test_there_is_no_newest_in_a_directory_that_is_empty_or_absent(tmp_path: Path) -> None:
    assert find_newest(tmp_path) is None
    assert find_newest(tmp_path / "absent") is None
