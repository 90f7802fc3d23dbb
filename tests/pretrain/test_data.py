import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pretrain.data import Batch, document_offsets, validation_batches
from pretrain.shards import DatasetError, Index, TokenReader, open_dataset
from pretrain.sources import DataConfig, sequences_per_shard
from tests.pretrain.streams import batches_of, sequences_of
from tests.ranks import REPOSITORY

S = 100
GLOBAL_BATCH = 16
ALONE = {"data_parallel_rank": 0, "data_parallel_size": 1}


@pytest.fixture(scope="session")
def index(dataset: Path) -> Index:
    return open_dataset(dataset)


def train(index: Index, *, rank: int = 0, ranks: int = 1, micro_batch: int = 4, workers: int = 0, position: int = 0) -> Iterator[Batch]:
    return batches_of(
        DataConfig(S, str(index.directory), workers=workers, window_shards=4),
        index,
        seed=5,
        position=position,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=micro_batch,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
    )


def stream(index: Index, steps: int, *, ranks: int = 1, micro_batch: int = 4, **options: Any) -> dict[int, list[int]]:
    """What all ranks together read in `steps` steps: position -> its S + 1 tokens."""
    result: dict[int, list[int]] = {}
    for rank in range(ranks):
        batches = train(index, rank=rank, ranks=ranks, micro_batch=micro_batch, **options)
        for batch in islice(batches, steps * GLOBAL_BATCH // (ranks * micro_batch)):
            for position, tokens, targets in zip(batch.sequence.tolist(), batch.tokens.tolist(), batch.targets.tolist(), strict=True):
                assert tokens[1:] == targets[:-1]
                assert position not in result
                result[position] = [*tokens, targets[-1]]
    return result


@pytest.fixture(scope="session")
def expected(index: Index) -> dict[int, list[int]]:
    return stream(index, 6)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_ranks_and_micro_batches_do_not_change_the_stream(
    index: Index, expected: dict[int, list[int]], ranks: int, micro_batch: int
) -> None:
    assert stream(index, 6, ranks=ranks, micro_batch=micro_batch) == expected


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_do_not_change_the_stream(index: Index, expected: dict[int, list[int]], workers: int) -> None:
    assert stream(index, 6, workers=workers) == expected


@pytest.mark.parametrize("steps_done", [1, 2, 5])
def test_a_resume_at_any_step_continues_the_stream(index: Index, expected: dict[int, list[int]], steps_done: int) -> None:
    rest = stream(index, 6 - steps_done, position=steps_done * GLOBAL_BATCH, ranks=2)
    assert rest == {position: tokens for position, tokens in expected.items() if position >= steps_done * GLOBAL_BATCH}


def test_a_position_need_not_be_a_multiple_of_anything(index: Index, expected: dict[int, list[int]]) -> None:
    later = stream(index, 1, position=37)
    assert later == {position: expected[position] for position in range(37, 37 + GLOBAL_BATCH)}


def test_micro_batches_cover_a_step_in_the_documented_order(index: Index) -> None:
    batches = train(index, rank=1, ranks=2, micro_batch=4, position=32)
    assert [next(batches).sequence.tolist() for _ in range(2)] == [[36, 37, 38, 39], [44, 45, 46, 47]]


def test_batches_are_contiguous_int64_with_everything_counted(index: Index) -> None:
    batch = next(train(index))
    assert (batch.tokens.shape, batch.tokens.dtype, batch.targets.dtype) == ((4, S), torch.int64, torch.int64)
    assert batch.tokens.is_contiguous() and batch.targets.is_contiguous()
    assert batch.loss_mask.dtype == torch.bool and batch.loss_mask.all()


def test_an_epoch_has_each_sequence_of_each_shard_once(index: Index) -> None:
    """The targets of an epoch are all tokens but each shard's first and what is left at its end."""
    counts = sequences_per_shard(index, "train", S)
    epoch = sequences_of(DataConfig(S, str(index.directory)), index, seed=5)
    found = sorted(row.tobytes() for row in epoch.read(np.arange(counts.sum())).tokens)
    reader = TokenReader(index, "train")
    wanted = sorted(reader.read(shard, i * S, S + 1).tobytes() for shard, count in enumerate(counts) for i in range(count))
    assert found == wanted
    again = epoch.read(np.arange(counts.sum(), 2 * counts.sum())).tokens
    assert sorted(row.tobytes() for row in again) == wanted


def test_a_loader_does_not_touch_the_trainers_random_numbers(index: Index) -> None:
    before = torch.get_rng_state()
    next(train(index, workers=1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("limit", [None, 1, 10])
def test_validation_is_unshuffled_and_the_same_for_any_ranks(index: Index, ranks: int, limit: int | None) -> None:
    config = DataConfig(S, str(index.directory))
    counts = sequences_per_shard(index, "validation", S)
    reader = TokenReader(index, "validation")
    wanted = [reader.read(shard, i * S, S + 1)[1:].tolist() for shard, count in enumerate(counts) for i in range(count)][:limit]
    found: dict[int, list[int]] = {}
    lengths = []
    for rank in range(ranks):
        layout = {"micro_batch_size": 4, "data_parallel_rank": rank, "data_parallel_size": ranks}
        batches = list(validation_batches(config, index, max_sequences=limit, **layout))
        lengths.append([batch.tokens.shape for batch in batches])
        for batch in batches:
            for row, position in enumerate(batch.sequence.tolist()):
                assert batch.loss_mask[row].all() == batch.loss_mask[row].any() == (position < len(wanted))
                if position < len(wanted):
                    found[position] = batch.targets[row].tolist()
    assert [found[position] for position in range(len(wanted))] == wanted
    assert all(length == lengths[0] for length in lengths)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_split_without_a_full_sequence_is_named(index: Index, split: str) -> None:
    with pytest.raises(DatasetError, match=f"the {split} split of .* has no sequence of 1000000 . 1 tokens: it has"):
        sequences_per_shard(index, split, 10**6)


@pytest.mark.parametrize("field", ["sequence_length", "window_shards", "workers"])
def test_config_names_a_field_out_of_range(field: str) -> None:
    with pytest.raises(ValueError, match=rf"data\.{field} is -1, but must be at least"):
        DataConfig(path="unused", **{"sequence_length": 8, field: -1})  # type: ignore[arg-type]  # one dict for fields of several types


@pytest.fixture
def damaged(dataset: Path, tmp_path: Path) -> Index:
    """A copy whose second shard has a flipped byte in its second block's second chunk."""
    copy = shutil.copytree(dataset, tmp_path / "copy")
    index = open_dataset(copy)
    split = index.splits["train"]
    offset = int(split.columns["token_offset"][split.first_block[1] + 1]) + 2 * 4096
    with open(copy / "train-00001.tar", "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    return index


@pytest.mark.parametrize("workers", [0, 2])
def test_damage_met_by_a_worker_is_one_clean_error_in_the_main_process(damaged: Index, workers: int) -> None:
    with pytest.raises(DatasetError) as caught:
        for _ in islice(train(damaged, workers=workers), 1000):
            pass
    message = str(caught.value)
    assert "train-00001.tar: block 1, tokens from 4096: crc32 expected" in message and "found" in message
    assert "\n" not in message


def flip(shard: Path, offset: int) -> None:
    data = bytearray(shard.read_bytes())
    data[offset] ^= 1
    shard.write_bytes(data)


@pytest.mark.parametrize(("column", "before"), [("token_offset", False), ("token_offset", True), ("crc_offset", False)])
def test_a_reader_notices_damage_in_a_block_that_it_has_read_and_its_repair(
    dataset: Path, tmp_path: Path, column: str, before: bool
) -> None:
    index = open_dataset(shutil.copytree(dataset, tmp_path / "copy"))
    shard, offset = index.directory / "train-00000.tar", int(index.splits["train"].columns[column][0])
    reader = TokenReader(index, "train")
    if before:
        reader.read(0, 0, S)
    flip(shard, offset)
    with pytest.raises(DatasetError, match="train-00000.tar: block 0, tokens from 0: crc32 expected"):
        reader.read(0, 0, S)
    flip(shard, offset)
    assert np.array_equal(reader.read(0, 0, S), TokenReader(index, "train").read(0, 0, S))


def test_a_reader_keeps_no_more_shards_than_it_may(index: Index) -> None:
    reader = TokenReader(index, "train")
    reader.max_open_shards = 3
    wanted = [TokenReader(index, "train").read(shard, 0, S).tolist() for shard in range(6)]
    assert [reader.read(shard, 0, S).tolist() for shard in [*range(6), *range(6)]] == wanted * 2
    assert len(reader._layouts) == len(reader._open_files) == 3


def test_a_shard_that_vanishes_during_training_is_named(damaged: Index) -> None:
    batches = train(damaged, workers=1)
    (damaged.directory / "train-00001.tar").unlink()
    with pytest.raises(DatasetError, match="train-00001.tar cannot be read at byte"):
        for _ in islice(batches, 1000):
            pass


def test_a_dataset_can_be_sent_to_a_spawned_worker(index: Index) -> None:
    dataset = sequences_of(DataConfig(S, str(index.directory)), index, seed=5)
    copy = pickle.loads(pickle.dumps(dataset))
    assert np.array_equal(copy.read(np.arange(3)).tokens, dataset.read(np.arange(3)).tokens)


SIGNALLED_RUN = """
import multiprocessing, os, signal, subprocess, sys, time
from pathlib import Path
from pretrain.shards import open_dataset
from pretrain.sources import DataConfig
from tests.ranks import REPOSITORY
from tests.pretrain.streams import batches_of

def main():
    multiprocessing.set_start_method(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: os.write(1, b"handled in %d\\n" % os.getpid()))
    index = open_dataset(Path(sys.argv[1]))
    layout = dict(global_batch_size=1, micro_batch_size=1, data_parallel_rank=0, data_parallel_size=1)
    batches = batches_of(DataConfig(100, sys.argv[1], workers=2), index, seed=0, position=0, **layout)
    next(batches), next(batches)  # one from each worker: both have begun
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        for child in multiprocessing.active_children():
            for _ in range(2):
                subprocess.run(["kill", "-%d" % number, str(child.pid)], check=True)
    time.sleep(0.5)
    for _ in range(20):
        next(batches)
    print("went on", flush=True)
    main.kept_alive = batches
    raise SystemExit(3)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_outlive_signals_run_no_handler_and_end_with_the_trainer(index: Index, tmp_path: Path, start_method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SIGNALLED_RUN)
    command = [sys.executable, str(script), str(index.directory), start_method]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}  # for tests/
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "went on\n"), done.stderr


def test_reading_a_dataset_loads_no_tokenizer_library() -> None:
    script = "import sys, pretrain.data; sys.exit(bool({'sentencepiece', 'tokenizers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_documents_begin_with_the_end_of_the_one_before() -> None:
    eos = 9
    tokens = np.array([[1, 2, eos, 3, eos], [eos, eos, 5, 6, 7]])
    offsets = document_offsets(tokens, eos)
    assert offsets.dtype == np.int32
    assert offsets.tolist() == [0, 2, 4, 5, 6, 10, 10, 10]
    assert document_offsets(np.array([[1, 2], [3, 4], [5, 6]]), eos).tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("boundaries", ["none", "attention", "loss", "attention_and_loss"])
def test_document_boundaries_are_those_of_the_dataset(index: Index, boundaries: Any) -> None:
    """The dataset's own list of documents says where attention starts anew and which targets are left out."""
    config = DataConfig(S, str(index.directory), workers=0, document_boundaries=boundaries)
    batch = next(batches_of(config, index, seed=5, position=0, global_batch_size=16, micro_batch_size=16, **ALONE))
    _, shards, sequences = sequences_of(config, index, seed=5).locate(np.arange(16))
    first_of_document, begins = [], []
    for row, (shard, sequence) in enumerate(zip(shards.tolist(), sequences.tolist(), strict=True)):
        starts = document_starts(index, shard)
        places = sequence * S + np.arange(S)
        first_of_document.append(np.isin(places + 1, list(starts)))
        begins += [row * S, *(row * S + i for i in range(1, S) if places[i] + 1 in starts)]
    masked = "loss" in boundaries
    assert np.array_equal(batch.loss_mask.numpy(), ~np.array(first_of_document) if masked else np.ones((16, S), bool))
    if "attention" in boundaries:
        assert batch.cu_seqlens is not None
        assert sorted(set(batch.cu_seqlens.tolist())) == [*begins, 16 * S]
    else:
        assert batch.cu_seqlens is None


def document_starts(index: Index, shard: int) -> set[int]:
    """Offsets at which documents begin in the shard's stream, from its doc.bin."""
    split = index.splits["train"]
    content = (index.directory / split.shards[shard].name).read_bytes()
    starts, before = [], 0
    for block in range(int(split.first_block[shard]), int(split.first_block[shard + 1])):
        offset, count = int(split.columns["document_offset"][block]), int(split.columns["documents"][block])
        ends = np.frombuffer(content, "<u4", count, offset)
        starts += [before, *(before + ends[:-1]).tolist()]
        before += int(split.columns["tokens"][block])
    return set(starts)


def test_with_substitutes_training_goes_on_past_damage_and_every_rank_reads_the_same(
    damaged: Index, index: Index, capfd: pytest.CaptureFixture[str]
) -> None:
    config = DataConfig(S, str(damaged.directory), workers=0, window_shards=4, corrupt_blocks="substitute")
    epoch = int(sequences_per_shard(damaged, "train", S).sum())
    read = sequences_of(config, damaged, seed=5).read(np.arange(epoch)).tokens
    whole = sequences_of(config, index, seed=5).read(np.arange(epoch)).tokens
    replaced = np.flatnonzero((read != whole).any(axis=1))
    sequences = {row.tobytes() for row in whole}
    assert 1 <= len(replaced) <= 4096 // S + 2
    assert all(read[position].tobytes() in sequences for position in replaced)
    warnings = capfd.readouterr().err.splitlines()
    assert len(warnings) == 1 and "train-00001.tar: block 1, tokens from 4096: crc32 expected" in warnings[0]
    for position in replaced.tolist():  # whoever reads it, alone or with others
        again = sequences_of(config, damaged, seed=5).read(np.array([position])).tokens
        assert np.array_equal(again[0], read[position])


def test_where_everything_is_damaged_no_substitute_is_found(dataset: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(dataset, tmp_path / "copy")
    index = open_dataset(copy)
    for shard in index.splits["train"].shards:
        (copy / shard.name).write_bytes(bytes(shard.bytes))
    config = DataConfig(S, str(copy), workers=0, corrupt_blocks="substitute")
    with pytest.raises(DatasetError, match="begins with"):
        sequences_of(config, index, seed=5).read(np.arange(1))
