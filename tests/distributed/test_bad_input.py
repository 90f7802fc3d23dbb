"""Bad input ends with one message that names the thing and the remedy, a non-zero exit and no process left; nothing is lost.

What is found before ranks meet is shown by one process, forked from one that has imported the trainer. Two ranks under the
deepspeed launcher show what depends on ranks.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import numpy as np
import pytest
import yaml

from pretrain.agreement import DisagreementError, require_same_run
from pretrain.engine import initialize_distributed
from pretrain.shards import CHUNK_TOKENS, Index, open_dataset
from pretrain.sources import DataConfig
from pretrain.topology import Topology
from pretrain.train import BAD_INPUT
from tests.distributed.launching import LIMIT, Ended, launcher, run, train_losses, write_run
from tests.distributed.runs import small_run
from tests.pretrain.streams import sequences_of
from tests.ranks import SETTING, run_ranks, run_trainer, trainer_processes
from tools.prepare_data import main as prepare_data


@pytest.fixture(scope="module")
def trainer() -> ForkServerContext:
    """Processes that need not import the trainer again."""
    return trainer_processes()


def run_alone(trainer: ForkServerContext, options: list[str], output: Path, environment: dict[str, str] | None = None) -> Ended:
    """One process, no launcher."""
    process = trainer.Process(target=run_trainer, args=(options, os.environ | SETTING | (environment or {}), output))
    process.start()
    process.join(LIMIT)
    left = [f"process {process.pid}"] if process.is_alive() else []
    process.kill()
    return Ended(process.exitcode or 0, output.read_text(), left)


def digests(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()}


def cut_shard(dataset: Path) -> None:
    shard = dataset / "train-00001.tar"
    os.truncate(shard, shard.stat().st_size - 512)


def tamper_with_tokenizer(dataset: Path) -> None:
    model = dataset / "tokenizer" / "tokenizer.model"
    model.write_bytes(model.read_bytes() + b"\0")


def remove_index(dataset: Path) -> None:
    (dataset / "index.json").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove_index, ["no dataset in", "index.json", "make one with tools/prepare_data.py"]),
        (cut_shard, ["train-00001.tar", "bytes, the index says", "restore the file"]),
        (tamper_with_tokenizer, ["tokenizer", "sha256 expected", "restore the file"]),
    ],
)
def test_a_damaged_dataset_is_refused_at_start(
    trainer: ForkServerContext, dataset: Path, tmp_path: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    copy = shutil.copytree(dataset, tmp_path / "copy")
    damage(copy)
    run_alone(trainer, write_run(tmp_path, copy), tmp_path / "output").check_refused(str(copy), *words)
    assert not (tmp_path / "run").exists()


def test_an_environment_that_contradicts_a_setting_is_refused_at_start(trainer: ForkServerContext, dataset: Path, tmp_path: Path) -> None:
    options = [*write_run(tmp_path, dataset), "--compute.deterministic", "true"]
    ended = run_alone(trainer, options, tmp_path / "output", {"NCCL_ALGO": "Tree"})
    ended.check_refused("compute.deterministic", "NCCL_ALGO is 'Tree'", "Unset it")
    assert ended.code == BAD_INPUT and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--data.path", "no/such/place"], ["no dataset in no/such/place", "tools/prepare_data.py"]),
        (["--model.num_head", "4"], ["--model.num_head", "--help"]),
        (["--model.hidden_size", "33"], ["model.num_heads is 2", "divisor of hidden_size 33"]),
        (["--model.vocab_size", "500"], ["model.vocab_size is 500", "512 pieces", "Set model.vocab_size to 512"]),
        (["--optim.global_batch_size", "8"], ["ds_batch.json says train_batch_size = 4", "makes it 8", "write auto"]),
        (["--parallel.tensor_parallel", "2"], ["parallel.tensor_parallel is 2", "1 processes", "multiple of 2"]),
        (["--checkpoint.resume", "no/such/step"], ["no complete checkpoint", "no/such/step"]),
        (["--run_dir", "/proc/no/run"], ["/proc/no/run cannot be written", "--run_dir"]),
    ],
)
def test_a_setting_that_cannot_be_is_refused_at_start(
    trainer: ForkServerContext, dataset: Path, tmp_path: Path, options: list[str], words: list[str]
) -> None:
    given = write_run(tmp_path, dataset)
    (tmp_path / "ds_batch.json").write_text(json.dumps({"train_batch_size": 4, "zero_optimization": {"stage": 3}}))
    given[-1] = str(tmp_path / "ds_batch.json")
    run_alone(trainer, given + options, tmp_path / "output").check_refused(*words)
    assert not (tmp_path / "run").exists()


def test_a_second_run_in_the_same_directory_is_refused(trainer: ForkServerContext, dataset: Path, tmp_path: Path) -> None:
    options = write_run(tmp_path, dataset)
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "lock").open("w") as first:
        fcntl.lockf(first, fcntl.LOCK_EX)
        run_alone(trainer, options, tmp_path / "output").check_refused("Another run is at work in", str(tmp_path / "run"), "--run_dir")
        assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == ["checkpoints", "lock"]


def test_the_other_apex_is_refused_at_start(dataset: Path, tmp_path: Path) -> None:
    package = tmp_path / "packages" / "apex"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from pyramid.session import UnencryptedCookieSessionFactoryConfig\n")
    (package / "models.py").touch()
    search = [str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = run(launcher("plain", 1), write_run(tmp_path, dataset), {"PYTHONPATH": os.pathsep.join(search)})
    ended.check_refused("not NVIDIA apex", str(package), "pip uninstall apex")


def test_two_ranks_say_what_is_wrong_once(dataset: Path, tmp_path: Path) -> None:
    options = write_run(tmp_path, dataset)
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"modle": {"vocab_size": 512}}))
    run(launcher("deepspeed", 2), options).check_refused("modle", "--help")


def test_a_busy_port_is_refused_at_start(dataset: Path, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        ended = run(launcher("deepspeed", 2, port), write_run(tmp_path, dataset))
    ended.check_refused(f"Port {port}", "another run may be using it", "--master_port")


# ---- found while training ----


def place_of(index: Index, shard: int, token: int) -> tuple[int, int]:
    """Block of the training split, and token in the block, of a token of a shard."""
    split = index.splits["train"]
    block = int(split.first_block[shard])
    while token >= split.columns["tokens"][block]:
        token -= int(split.columns["tokens"][block])
        block += 1
    return block, token


def flip_byte_for_rank_1(dataset: Path) -> str:
    """Damages a chunk that, of the first 4 steps' sequences (4 each), only one of rank 1 touches, in the third step or the fourth.

    Returns:
        the shard's name.
    """
    index = open_dataset(dataset)
    order = sequences_of(DataConfig(32, str(dataset)), index, seed=1234)
    _, shards, sequences = (column.tolist() for column in order.locate(np.arange(16)))
    ends = [[place_of(index, shard, sequence * 32 + i) for i in (0, 32)] for shard, sequence in zip(shards, sequences, strict=True)]
    chunks = [{(block, token // CHUNK_TOKENS) for block, token in pair} for pair in ends]
    position = next(p for p in range(9, 16, 2) if not any(chunks[p] & chunks[other] for other in range(16) if other != p))
    shard = dataset / index.splits["train"].shards[shards[position]].name
    block, token = ends[position][0]
    content = bytearray(shard.read_bytes())
    content[int(index.splits["train"].columns["token_offset"][block]) + token * index.dtype.itemsize] ^= 1
    shard.write_bytes(content)
    return shard.name


def test_a_flipped_byte_ends_both_ranks_with_the_shards_name(dataset: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(dataset, tmp_path / "copy")
    shard = flip_byte_for_rank_1(copy)
    ended = run(launcher("deepspeed", 2), write_run(tmp_path, copy))
    ended.check_refused("rank 1", shard, "crc32 expected", "restore it")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == ["step_00000002"]
    assert len(train_losses(tmp_path / "run")) in (2, 3)


def test_a_changed_dataset_is_refused_at_a_resume_unless_it_is_allowed(
    trainer: ForkServerContext, dataset: Path, corpus: Path, tokenizer_directory: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    made = ["--input", str(corpus), "--tokenizer", str(tokenizer_directory), "--output", str(other), "--validation-fraction", "0.2"]
    assert prepare_data([*made, "--processes", "1"]) == 0
    options = write_run(tmp_path, dataset)
    run_alone(trainer, [*options, "--schedule.total_tokens", "256"], tmp_path / "first").check_succeeded()
    before = digests(tmp_path / "run")

    changed = [*options, "--schedule.total_tokens", "256", "--data.path", str(other)]
    ended = run_alone(trainer, changed, tmp_path / "changed")
    ended.check_refused("step_00000002 was made with dataset = ", "--checkpoint.allow_change '[\"dataset\"]'")
    assert digests(tmp_path / "run") == before

    longer = [*options, "--data.path", str(other), "--checkpoint.allow_change", '["dataset", "schedule"]']
    run_alone(trainer, longer, tmp_path / "allowed").check_succeeded()
    assert len(train_losses(tmp_path / "run")) == 4


def test_ranks_with_different_depths_are_refused_instead_of_waiting_for_one_another(tmp_path: Path, dataset: Path) -> None:
    each_its_own = ["--no-python", "bash", "-c", f'exec {sys.executable} "$0" "$@" --model.min_depth "$RANK"']
    ended = run([*launcher("torchrun", 2), *each_its_own], write_run(tmp_path, dataset))
    (error,) = ended.errors
    assert "model.min_depth is 0 on rank 0 and 1 on rank 1" in error
    assert ended.code != 0
    assert not ended.left_over


def refusal(gate_ops: list[str], datasets: list[str]) -> str:
    """In a rank: what the start says when the ranks have these operators and these datasets."""
    rank = int(os.environ["RANK"])
    initialize_distributed(Topology.from_environment(os.environ), 1)
    with pytest.raises(DisagreementError) as raised:
        require_same_run(small_run(Path("unused"), compute={"gate_ops": gate_ops[rank]}), {}, {"data": datasets[rank]})
    return str(raised.value)


def test_ranks_with_and_without_fused_operators_are_told_so() -> None:
    for message in run_ranks(refusal, 2, ["fused", "ref"], ["a", "a"]):
        assert re.search("for some ranks only .rank 0: fused, rank 1: ref.*python -m model.ops.build", message)


def test_ranks_that_read_different_datasets_are_refused() -> None:
    for message in run_ranks(refusal, 2, ["ref", "ref"], ["a", "b"]):
        assert "the fingerprint of the dataset data is 'a' on rank 0 and 'b' on rank 1" in message
