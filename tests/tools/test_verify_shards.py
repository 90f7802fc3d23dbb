import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pretrain import remote
from pretrain.data import Batch, validation_batches
from pretrain.shards import DatasetError, load_index, open_dataset
from pretrain.sources import DataConfig, sequences_per_shard
from tests.pretrain.serving import serving
from tests.pretrain.streams import batches_of
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


# What is done to a dataset, and what the report must name.
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut inside a payload": (lambda d: truncate(d / SHARD, offset_of(d, "token_offset") + 1001), SHARD),
    "cut at a header's start": (lambda d: truncate(d / SHARD, offset_of(d, "token_offset") - 512), SHARD),
    "cut inside a header": (lambda d: truncate(d / SHARD, offset_of(d, "token_offset") - 300), SHARD),
    "a header byte flipped": (lambda d: flip(d / SHARD, offset_of(d, "token_offset") - 500), f"{SHARD}: blk000003.tok.bin: its tar header"),
    "a header zeroed": (lambda d: zero(d / SHARD, offset_of(d, "json_offset") - 512, 512), f"{SHARD}: blk000003.json: its tar header"),
    "a token byte flipped": (lambda d: flip(d / SHARD, offset_of(d, "token_offset") + 9001), f"{SHARD}: blk000003.tok.bin"),
    "a doc.bin byte flipped": (lambda d: flip(d / SHARD, offset_of(d, "document_offset") + 2), f"{SHARD}: blk000003.doc.bin: crc32"),
    "a JSON byte flipped": (lambda d: flip(d / SHARD, offset_of(d, "json_offset") + 2), f"{SHARD}: blk000003.json: crc32"),
    "a crc.bin byte flipped": (lambda d: flip(d / SHARD, offset_of(d, "crc_offset") + 2), f"{SHARD}: blk000003.tok.bin or its crc.bin"),
    "a padding byte flipped": (lambda d: flip(d / SHARD, (d / SHARD).stat().st_size - 1), f"{SHARD}: sha256"),
    "a missing shard": (lambda d: (d / SHARD).unlink(), f"{SHARD}: cannot be read"),
    "an empty shard": (lambda d: truncate(d / SHARD, 0), f"{SHARD}: 0 bytes"),
    "a shard of garbage": (lambda d: garbage(d / SHARD), f"{SHARD}: blk000002.crc.bin: its tar header"),
    "an index array's byte flipped": (lambda d: flip(d / "train.blocks.bin", 3), "train.blocks.bin is damaged"),
    "a missing index array": (lambda d: (d / "train.blocks.bin").unlink(), "train.blocks.bin cannot be read"),
    "an index digit flipped": (lambda d: flip_in_index(d, b'0,"name"'), "index.json is damaged"),
    "a cut index": (lambda d: truncate(d / "index.json", 200), "index.json is damaged"),
    "an empty index": (lambda d: truncate(d / "index.json", 0), "index.json is damaged"),
    "a missing index": (lambda d: (d / "index.json").unlink(), "index.json cannot be read"),
    "another tokenizer": (lambda d: flip(d / "tokenizer" / "tokenizer.model", 50), "tokenizer: sha256"),
    "a missing tokenizer": (lambda d: (d / "tokenizer" / "tokenizer.model").unlink(), "tokenizer: "),
}
ONLY_FULL = [  # what leaves every file its size
    "a header byte flipped",
    "a header zeroed",
    "a token byte flipped",
    "a doc.bin byte flipped",
    "a JSON byte flipped",
    "a crc.bin byte flipped",
    "a padding byte flipped",
    "a shard of garbage",
]


@pytest.fixture
def copy(dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset, tmp_path / "copy"))


def read_everything(path: Path) -> list[Batch]:
    """One epoch of training and the whole validation, as a training run reads them."""
    index = open_dataset(path)
    config = DataConfig(SEQUENCE_LENGTH, str(path), workers=0)
    layout = {"micro_batch_size": 16, "data_parallel_rank": 0, "data_parallel_size": 1}
    sequences = sequences_per_shard(index, "train", SEQUENCE_LENGTH).sum()
    train = batches_of(config, index, seed=0, position=0, global_batch_size=16, **layout)
    return [next(train) for _ in range(sequences // 16 + 1)] + list(validation_batches(config, index, max_sequences=None, **layout))


@pytest.mark.parametrize("mode", ["quick", "full"])
def test_an_intact_dataset_passes(dataset: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(dataset), "--mode", mode]) == 0
    assert "no damage found" in capsys.readouterr().out


@pytest.mark.parametrize("name", DAMAGE)
def test_full_finds_and_names_any_damage(copy: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage, expected = DAMAGE[name]
    damage(copy)
    assert main([str(copy), "--mode", "full"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert expected in lines[0]
    if name != "a shard of garbage":
        assert len(lines) == 1


@pytest.mark.parametrize("name", [name for name in DAMAGE if name not in ONLY_FULL])
def test_quick_finds_what_needs_no_reading_of_shards(copy: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage, expected = DAMAGE[name]
    damage(copy)
    assert main([str(copy), "--mode", "quick"]) == 1
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["quick", "full"])
def test_a_dataset_behind_a_url_is_checked_too(
    copy: Path, mode: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp", reason="HTTP needs aiohttp: pip install -e '.[remote]'")
    monkeypatch.setattr(remote, "FIRST_BACKOFF", 0.01)
    with serving(copy) as server:
        assert main([server.url, "--mode", mode]) == 0
        assert f"{server.url}: no damage found" in capsys.readouterr().out
        flip(copy / SHARD, (copy / SHARD).stat().st_size - 1)
        (copy / "train-00000.tar").unlink()
        assert main([server.url, "--mode", mode]) == (mode == "full")
        lines = capsys.readouterr().out.splitlines()
        if mode == "full":
            assert (
                "train-00000.tar cannot be read" in lines[0] and f"{SHARD} could not be read" in lines[1] and "sha256 expected" in lines[1]
            )
        flip(copy / "train.blocks.bin", 3)
        assert main([server.url, "--mode", mode]) == 1
        assert "train.blocks.bin could not be read" in capsys.readouterr().out


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
