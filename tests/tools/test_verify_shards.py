import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain import remote
from pretrain.data import Batch, validation_batches
from pretrain.shards import SPLITS, DatasetError, TokenReader, load_index, open_dataset
from pretrain.sources import DataConfig, sequences_per_shard
from tests.pretrain.serving import FileServer, serving
from tests.pretrain.streams import batches_of
from tests.tools.test_prepare_data import children, running, wait_until
from tokenizer.tokenizer import load_tokenizer
from tools import progress, verify_shards
from tools.dataset_writer import DatasetWriter
from tools.verify_shards import main

SHARD = "train-00001.tar"
SEQUENCE_LENGTH = 100


def offset_of(dataset: Path, column: str) -> int:
    """Where the contents of a member of SHARD's second block begin."""
    split = load_index(dataset).splits["train"]
    return int(split.columns[column][split.first_block[1] + 1])


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def zero(path: Path, offset: int, count: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + count] = bytes(count)
    path.write_bytes(data)


def flip_in_index(dataset: Path, text: bytes) -> None:
    flip(dataset / "index.json", (dataset / "index.json").read_bytes().index(text))


def garbage(path: Path) -> None:
    path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size))


def swap(one: Path, other: Path) -> None:
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


MODES = ("quick", "block", "full")

# What is done to a dataset, what the report must name, and the first of the modes that finds it.
DAMAGE: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "cut inside a payload": (lambda d: truncate(d / SHARD, offset_of(d, "token_offset") + 1001), SHARD, "quick"),
    "cut at a header's start": (lambda d: truncate(d / SHARD, offset_of(d, "token_offset") - 512), SHARD, "quick"),
    "cut inside a header": (lambda d: truncate(d / SHARD, offset_of(d, "token_offset") - 300), SHARD, "quick"),
    "a header byte flipped": (
        lambda d: flip(d / SHARD, offset_of(d, "token_offset") - 500),
        f"{SHARD}: blk000003.tok.bin: its tar header",
        "full",
    ),
    "a header zeroed": (
        lambda d: zero(d / SHARD, offset_of(d, "document_offset") - 512, 512),
        f"{SHARD}: blk000003.doc.bin: its tar header",
        "full",
    ),
    "a JSON's header zeroed": (lambda d: zero(d / SHARD, offset_of(d, "json_offset") - 512, 512), f"{SHARD}: blk000003.json: ", "block"),
    "a token byte flipped": (lambda d: flip(d / SHARD, offset_of(d, "token_offset") + 9001), f"{SHARD}: blk000003.tok.bin", "block"),
    "a doc.bin byte flipped": (
        lambda d: flip(d / SHARD, offset_of(d, "document_offset") + 2),
        f"{SHARD}: blk000003.doc.bin: crc32",
        "block",
    ),
    "a JSON byte flipped": (lambda d: flip(d / SHARD, offset_of(d, "json_offset") + 2), f"{SHARD}: blk000003.json: crc32", "block"),
    "a crc.bin byte flipped": (
        lambda d: flip(d / SHARD, offset_of(d, "crc_offset") + 2),
        f"{SHARD}: blk000003.tok.bin or its crc.bin",
        "block",
    ),
    "a padding byte flipped": (lambda d: flip(d / SHARD, (d / SHARD).stat().st_size - 1), f"{SHARD}: sha256", "full"),
    "a missing shard": (lambda d: (d / SHARD).unlink(), f"{SHARD}: cannot be read", "quick"),
    "an empty shard": (lambda d: truncate(d / SHARD, 0), f"{SHARD}: 0 bytes", "quick"),
    "a shard of garbage": (lambda d: garbage(d / SHARD), f"{SHARD}: blk000002.", "block"),
    "two shards swapped": (lambda d: swap(d / "train-00000.tar", d / SHARD), "train-00000.tar: ", "quick"),
    "an index array's byte flipped": (lambda d: flip(d / "train.blocks.bin", 3), "train.blocks.bin is damaged", "quick"),
    "a missing index array": (lambda d: (d / "train.blocks.bin").unlink(), "train.blocks.bin cannot be read", "quick"),
    "an index digit flipped": (lambda d: flip_in_index(d, b'0,"name"'), "index.json is damaged", "quick"),
    "a cut index": (lambda d: truncate(d / "index.json", 200), "index.json is damaged", "quick"),
    "an empty index": (lambda d: truncate(d / "index.json", 0), "index.json is damaged", "quick"),
    "another tokenizer": (lambda d: flip(d / "tokenizer" / "tokenizer.model", 50), "tokenizer: sha256", "quick"),
    "a missing tokenizer": (lambda d: (d / "tokenizer" / "tokenizer.model").unlink(), "tokenizer: ", "quick"),
}
ONLY_FULL = [name for name, (*_, first) in DAMAGE.items() if first != "quick"]  # what leaves every file its size


@pytest.fixture
def copy(dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset, tmp_path / "copy"))


@cache
def read_everything(path: Path) -> list[Batch]:
    """One epoch of training and the whole validation, as a training run reads them."""
    index = open_dataset(path)
    config = DataConfig(SEQUENCE_LENGTH, str(path), workers=0)
    layout = {"micro_batch_size": 16, "data_parallel_rank": 0, "data_parallel_size": 1}
    sequences = sequences_per_shard(index, "train", SEQUENCE_LENGTH).sum()
    train = batches_of(config, index, seed=0, position=0, global_batch_size=16, **layout)
    return [next(train) for _ in range(sequences // 16 + 1)] + list(validation_batches(config, index, max_sequences=None, **layout))


@pytest.mark.parametrize("mode", MODES)
def test_an_intact_dataset_passes(dataset: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(dataset), "--mode", mode]) == 0
    assert "no damage found" in capsys.readouterr().out


@pytest.mark.parametrize("name", DAMAGE)
def test_each_mode_finds_and_names_what_it_is_said_to_find(copy: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage, expected, first = DAMAGE[name]
    damage(copy)
    for mode in MODES:
        finds = MODES.index(mode) >= MODES.index(first)
        assert main([str(copy), "--mode", mode]) == finds
        lines = capsys.readouterr().out.splitlines()
        assert (expected if finds else "no damage found") in lines[0]
        if name not in ("a shard of garbage", "two shards swapped"):
            assert len(lines) == 1


@pytest.fixture
def alike(tokenizer_directory: Path, tmp_path: Path) -> Path:
    """A dataset whose shards differ in nothing but tokens."""
    random = np.random.default_rng(0)
    directory = tmp_path / "alike"
    with DatasetWriter(directory, load_tokenizer(tokenizer_directory), source="text", block_tokens=5000, shard_tokens=10_000) as writer:
        writer.begin({}, [])
        for split, shards in (("train", 3), ("validation", 1)):
            for _ in range(4 * shards):
                writer.splits[split].add(random.integers(0, 500, 2500, "<u2"), 2500)
        writer.finish({})
    return directory


def test_shards_that_differ_in_nothing_but_tokens_are_told_apart_by_the_names_of_their_blocks(
    alike: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swap(alike / "train-00000.tar", alike / "train-00002.tar")
    assert [main([str(alike), "--mode", mode]) for mode in MODES] == [0, 1, 1]
    output = capsys.readouterr().out
    assert "train-00000.tar: blk000000.json: b'blk000004.json{" in output and "train-00002.tar: blk000004.json: b'blk000000.json{" in output
    reader = TokenReader(load_index(alike), "train")
    for shard in (0, 2, 0):  # nor at a second try
        with pytest.raises(DatasetError, match=rf"train-0000{shard}.tar: begins with b'blk00000\d.json"):
            reader.read(shard, 0, 10)


def test_only_full_sees_that_the_first_shards_of_both_splits_are_swapped_where_they_differ_in_nothing_but_tokens(alike: Path) -> None:
    swap(alike / "train-00000.tar", alike / "validation-00000.tar")
    assert [main([str(alike), "--mode", mode]) for mode in MODES] == [0, 0, 1]


@pytest.mark.parametrize("name", DAMAGE)
def test_a_read_gives_the_right_tokens_or_none(dataset: Path, copy: Path, name: str) -> None:
    """Even where nothing was checked at the start."""
    DAMAGE[name][0](copy)
    intact, refused = load_index(dataset), 0
    for split in SPLITS:
        for number, shard in enumerate(intact.splits[split].shards):
            try:
                found = TokenReader(load_index(copy), split).read(number, 0, shard.tokens)
            except DatasetError:
                refused += 1
                continue
            assert np.array_equal(found, TokenReader(intact, split).read(number, 0, shard.tokens))
    assert refused or name in ONLY_FULL or "tokenizer" in name


@pytest.fixture
def server(copy: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    pytest.importorskip("aiohttp", reason="HTTP needs aiohttp: pip install -e '.[remote]'")
    monkeypatch.setattr(remote, "FIRST_BACKOFF", 0.002)
    with serving(copy) as server:
        yield server


@pytest.mark.parametrize("mode", MODES)
def test_a_dataset_behind_a_url_is_checked_too(copy: Path, server: FileServer, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([server.url, "--mode", mode]) == 0
    assert f"{server.url}: no damage found" in capsys.readouterr().out
    (copy / "train-00000.tar").unlink()
    flip(copy / SHARD, offset_of(copy, "token_offset"))
    flip(copy / "train-00002.tar", (copy / "train-00002.tar").stat().st_size - 1)
    truncate(copy / "train-00003.tar", 1000)
    assert main([server.url, "--mode", mode]) == 1
    lines = capsys.readouterr().out.splitlines()
    expected = [
        "train-00000.tar cannot be read: FileNotFound",
        f"{SHARD}: blk000003.tok.bin",
        "train-00002.tar: sha256",
        "train-00003.tar: 1000",
    ]
    for line, text in zip(lines, expected if mode != "quick" else [expected[0], expected[3]], strict=True):
        assert text in line
    flip(copy / "train.blocks.bin", 3)
    assert main([server.url, "--mode", mode]) == 1
    assert "train.blocks.bin could not be read" in capsys.readouterr().out


def test_a_process_keeps_one_shard_at_a_time(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []

    def download(url: str, target: Path, *about: Any) -> None:
        kept.append(len(list(target.parent.glob("*.tar"))))
        original(url, target, *about)

    original = remote.download
    monkeypatch.setattr(remote, "download", download)
    assert main([server.url]) == 0
    assert len(kept) > 10 and not any(kept)


def test_what_a_server_does_not_give_is_not_called_damaged(
    server: FileServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.misbehave(SHARD, "500")
    assert main([server.url, "--mode", "quick", "--report", str(tmp_path / "report.json")]) == 2
    assert f"{SHARD} could not be read in 5 attempts" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_bytes())["shards"][SHARD] == "unchecked"

    monkeypatch.setattr(verify_shards, "GIVE_UP_AFTER", 2)
    server.misbehave("train-00002.tar", "500")
    assert main([server.url, "--mode", "quick"]) == 2
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 2 and "gave up after 2 shards" in captured.err

    server.misbehave("index.json", "refused")
    assert main([server.url]) == 2
    assert "index.json could not be read" in capsys.readouterr().err


def report_of(dataset: Path, *options: str) -> dict[str, Any]:
    file = dataset.parent / "report.json"
    code = main([str(dataset), "--report", str(file), *options])
    report: dict[str, Any] = json.loads(file.read_bytes())
    assert report["exit_code"] == code and sorted(dataset.parent.glob("report.json*")) == [file]
    return report


def test_the_report_says_everything_to_a_machine(copy: Path) -> None:
    index = load_index(copy)
    (copy / "train-00000.tar").unlink()
    flip(copy / SHARD, offset_of(copy, "document_offset"))
    flip(copy / "tokenizer" / "tokenizer.model", 50)
    report = report_of(copy, "--mode", "block")
    shards = {shard.name: shard.bytes for split in index.splits.values() for shard in split.shards}
    assert report["shards"] == dict.fromkeys(shards, "ok") | {"train-00000.tar": "missing", SHARD: "damaged"}
    assert (report["format"], report["version"], report["mode"], report["error"]) == ("grt-verification", 1, "block", None)
    assert (report["dataset"], report["fingerprint"]) == (str(copy), index.fingerprint)
    assert report["bytes_read"] == sum(shards.values()) - shards["train-00000.tar"] and report["seconds"] > 0
    tokenizer, missing, damaged = report["damage"]
    assert (tokenizer["shard"], tokenizer["kind"], tokenizer["expected"]) == (None, "tokenizer", index.tokenizer_fingerprint)
    assert (missing["shard"], missing["kind"]) == ("train-00000.tar", "missing")
    place = {"shard": SHARD, "block": 3, "member": "blk000003.doc.bin", "kind": "crc32"}
    assert damaged == damaged | place and damaged["expected"] != damaged["found"] and damaged["expected"] in damaged["text"]


def test_what_could_not_be_checked_is_exit_code_2(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / SHARD).unlink()
    (copy / SHARD).symlink_to(SHARD)  # a file that cannot be opened, by root either
    assert report_of(copy)["shards"][SHARD] == "unchecked"
    (copy / "index.json").unlink()
    report = report_of(copy)
    assert (report["exit_code"], report["fingerprint"], report["shards"]) == (2, None, {}) and "no dataset in" in report["error"]
    assert "no dataset in" in capsys.readouterr().err
    for wrong in (["--processes", "0"], ["--mode", "slow"], ["--report", str(tmp_path / "no folder" / "report.json")]):
        with pytest.raises(SystemExit) as error:
            main([str(copy), *wrong])
        assert error.value.code == 2


def test_lines_tell_how_far_it_is_where_there_is_no_terminal(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    assert main([str(dataset)]) == 0
    captured = capsys.readouterr()
    shards = sum(len(split.shards) for split in load_index(dataset).splits.values())
    lines = captured.out.splitlines()
    assert len(lines) == shards + 1 and lines[-2].startswith(f"100%, {shards} of {shards} shards") and lines[-2].endswith("MB/s")
    assert captured.err == ""


def test_several_processes_find_the_same_in_the_same_order(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    garbage(copy / "train-00000.tar")
    flip(copy / SHARD, offset_of(copy, "token_offset"))
    (copy / "validation-00000.tar").unlink()
    assert main([str(copy), "--processes", "1"]) == 1
    alone = capsys.readouterr().out
    assert main([str(copy), "--processes", "2"]) == 1
    assert capsys.readouterr().out == alone


def test_a_worker_that_dies_is_a_clear_error(dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(verify_shards, "shard_check", lambda *_: signal.SIGKILL)
    monkeypatch.setattr(verify_shards, "check_shard", signal.raise_signal)
    assert main([str(dataset), "--processes", "2"]) == 2
    assert capsys.readouterr().err.startswith("error: a worker process died")


def test_interrupted_it_leaves_neither_processes_nor_downloads(server: FileServer, tmp_path: Path) -> None:
    for shard in server.directory.glob("*.tar"):
        server.misbehave(shard.name, None, "stalls")  # the size is asked for first
    hear_sigint = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what a shell's background job ignores
    report = tmp_path / "report.json"
    report.write_text("of an earlier check")
    command = [sys.executable, verify_shards.__file__, server.url, "--processes", "2", "--report", str(report)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=hear_sigint) as process:
        wait_until(lambda: min(server.requests["train-00000.tar"], server.requests[SHARD]) > 1)
        workers = children(process.pid)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=20)
    assert (process.returncode, error) == (130, "error: interrupted\n")
    wait_until(lambda: not any(map(running, workers)))
    assert not report.exists() and list(tmp_path.glob("tmp*")) == []


def test_two_damaged_shards_are_two_lines(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "train-00000.tar").unlink()
    flip(copy / SHARD, offset_of(copy, "token_offset"))
    assert main([str(copy)]) == 1
    assert [line[:15] for line in capsys.readouterr().out.splitlines()] == ["train-00000.tar", SHARD]


@pytest.mark.parametrize("name", DAMAGE)
def test_training_stops_or_the_damage_is_in_bytes_it_does_not_read(dataset: Path, copy: Path, name: str) -> None:
    DAMAGE[name][0](copy)
    try:
        batches = read_everything(copy)
    except DatasetError:
        return
    assert name in ONLY_FULL
    for found, expected in zip(batches, read_everything(dataset), strict=True):
        assert all(map(np.array_equal, found[:4], expected[:4]))
