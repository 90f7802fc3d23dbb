"""Remote datasets, over a real HTTP server on loopback that serves well and badly."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain import remote, shard_cache
from pretrain.data import Batch, validation_batches
from pretrain.shard_cache import ShardCache
from pretrain.shards import DatasetError, Index, load_index
from pretrain.sources import DataConfig, sequences_per_shard
from tests.pretrain.serving import FileServer, serving
from tests.pretrain.streams import batches_of, open_one, sequences_of
from tests.ranks import REPOSITORY

pytest.importorskip("aiohttp", reason="HTTP needs aiohttp: pip install -e '.[remote]'")

S = 100
SHARD = "train-00001.tar"
LAYOUT = {"global_batch_size": 16, "micro_batch_size": 16, "data_parallel_rank": 0, "data_parallel_size": 1}


@pytest.fixture
def server(dataset: Path) -> Iterator[FileServer]:
    with serving(dataset) as server:
        yield server


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_BACKOFF", 0.02)


def configured(path: str | Path, cache: Path, **changes: Any) -> DataConfig:
    return replace(DataConfig(S, str(path), workers=0, window_shards=4, cache_dir=str(cache), cache_gib=1), **changes)


def one_epoch(config: DataConfig, index: Index, seed: int = 5, **layout: int) -> list[Batch]:
    """Training batches of an epoch, then the whole validation."""
    layout = LAYOUT | layout
    steps = -(-int(sequences_per_shard(index, "train", S).sum()) // layout["global_batch_size"])
    batches = list(islice(batches_of(config, index, seed=seed, position=0, **layout), steps))
    del layout["global_batch_size"]
    return batches + list(validation_batches(config, index, max_sequences=None, **layout))


def same(found: list[Batch], expected: list[Batch]) -> bool:
    return len(found) == len(expected) and all(
        np.array_equal(a, b) for left, right in zip(found, expected, strict=True) for a, b in zip(left[:4], right[:4], strict=True)
    )


@pytest.fixture(scope="module")
def expected(dataset: Path) -> list[Batch]:
    """What a run reads from the local directory."""
    config = DataConfig(S, str(dataset), workers=0, window_shards=4)
    return one_epoch(config, open_one(config))


def cached(cache: Path, pattern: str = "*.tar") -> list[str]:
    return sorted(path.name for path in cache.glob(f"{shard_cache.FOLDER}*/{pattern}"))


def names(dataset: Path, split: str = "train") -> list[str]:
    return [shard.name for shard in load_index(dataset).splits[split].shards]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_url_gives_the_stream_of_the_directory_behind_it(
    server: FileServer, dataset: Path, tmp_path: Path, expected: list[Batch], workers: int
) -> None:
    config = configured(server.url, tmp_path, workers=workers)
    assert same(one_epoch(config, open_one(config)), expected)
    assert {server.requests[name] for name in names(dataset)} == {1}
    before = server.requests.copy()
    assert same(one_epoch(config, open_one(config)), expected)
    assert server.requests - before == {"index.json": 1}, "the second run finds all but the index in the cache"
    assert cached(tmp_path, "*.partial") == []


def test_a_shared_file_system_can_be_read_through_the_cache_too(dataset: Path, tmp_path: Path, expected: list[Batch]) -> None:
    config = configured(f"file://{dataset}", tmp_path)
    assert same(one_epoch(config, open_one(config)), expected)
    assert set(cached(tmp_path)) >= set(names(dataset))


TRANSIENT: list[Any] = ["500", "refused", "closes early", "ends early", "cut", "stalls", "changed", "longer"]


@pytest.mark.parametrize("fault", TRANSIENT)
def test_a_fault_that_passes_is_overcome(
    server: FileServer,
    tmp_path: Path,
    expected: list[Batch],
    fault: Any,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if fault == "stalls":
        monkeypatch.setattr(remote, "STALL_SECONDS", 0.5)
    for name in ("index.json", "train.blocks.bin", "tokenizer/tokenizer.model", SHARD):
        server.misbehave(name, fault, None)
    config = configured(server.url, tmp_path)
    assert same(one_epoch(config, open_one(config)), expected)
    assert server.requests[SHARD] == server.requests["index.json"] == server.requests["train.blocks.bin"] == 2
    if fault != "refused":  # aiohttp tries such a request again by itself
        assert f"{server.url}/train.blocks.bin: " in capfd.readouterr().err


REASONS = {
    "500": "500, message='Internal Server Error'",
    "refused": "",
    "closes early": "",
    "ends early": "the transfer ended after",
    "cut": "the transfer ended after",
    "stalls": "the server stalls",
    "changed": "sha256 expected",
    "longer": "the server sends more than the",
}


@pytest.mark.parametrize("fault", TRANSIENT)
def test_a_fault_that_stays_ends_the_run_with_the_shards_name_and_no_wrong_token(
    server: FileServer, tmp_path: Path, expected: list[Batch], fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "stalls":
        monkeypatch.setattr(remote, "STALL_SECONDS", 0.5)
    config = configured(server.url, tmp_path)
    index = open_one(config)
    server.misbehave(SHARD, fault)
    found = []
    with pytest.raises(DatasetError) as caught:
        for batch in batches_of(config, index, seed=5, position=0, **LAYOUT):
            found.append(batch)
    message = str(caught.value)
    assert f"{server.url}/{SHARD} could not be read in {remote.ATTEMPTS} attempts" in message and REASONS[fault] in message
    assert "\n" not in message
    assert same(found, expected[: len(found)])
    assert SHARD not in cached(tmp_path)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_shard_that_a_worker_cannot_get_is_one_clean_error_in_the_main_process(server: FileServer, tmp_path: Path, workers: int) -> None:
    config = configured(server.url, tmp_path, workers=workers)
    index = open_one(config)
    server.misbehave(SHARD, "500")
    with pytest.raises(DatasetError, match=f"{SHARD} could not be read in 5 attempts, the last of them: 500"):
        list(batches_of(config, index, seed=5, position=0, **LAYOUT))


def test_attempts_are_limited_and_further_and_further_apart(
    server: FileServer, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_BACKOFF", 0.2)
    cache, shard = open_cache(server, tmp_path), load_index(dataset).splits["train"].shards[1]
    server.misbehave(SHARD, "500")
    with pytest.raises(DatasetError):
        cache.fetch(shard)
    times = server.times[SHARD]
    assert len(times) == remote.ATTEMPTS
    for number, pause in enumerate(np.diff(times)):
        assert pause > 0.2 * 2**number * 0.5


def open_cache(server: FileServer, directory: Path, gib: float = 1) -> ShardCache:
    cache = shard_cache.open_remote_dataset(server.url, directory, int(gib * 2**30)).cache
    assert cache is not None
    return cache


@pytest.mark.parametrize(("fault", "words"), [("forbidden", "403"), (None, "no such")])
def test_what_no_retry_would_mend_is_not_tried_again(server: FileServer, tmp_path: Path, fault: Any, words: str) -> None:
    cache = open_cache(server, tmp_path)
    shard = replace(load_index(server.directory).splits["train"].shards[1], name=SHARD if fault else "no such shard.tar")
    server.misbehave(shard.name, fault)
    with pytest.raises(DatasetError, match=f"{shard.name} cannot be read: .*{words}"):
        cache.fetch(shard)
    assert sum(count for name, count in server.requests.items() if name.startswith(("no", SHARD))) == 1


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("{url}/elsewhere", r"elsewhere/index.json cannot be read: FileNotFoundError"),
        ("http://127.0.0.1:9/data", r"127.0.0.1:9/data/index.json could not be read in 5 attempts"),
        ("nosuch://bucket/data", r"nosuch://bucket/data/index.json cannot be read: .*\[remote\]"),
    ],
)
def test_a_url_without_a_dataset_is_named(server: FileServer, tmp_path: Path, path: str, words: str) -> None:
    with pytest.raises(DatasetError, match=words):
        open_one(configured(path.format(url=server.url), tmp_path))


def test_a_cache_that_cannot_be_made_is_named(server: FileServer) -> None:
    with pytest.raises(DatasetError, match="/proc/no/cache.* cannot be written.*data.cache_dir"):
        open_one(configured(server.url, Path("/proc/no/cache")))


def test_the_default_cache_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_cache, "DEFAULT_DIRECTORY", str(tmp_path / "shards"))
    directory = shard_cache.default_directory()
    assert directory.stat().st_mode & 0o777 == 0o700 and directory.name == f"shards-{os.getuid()}"
    if os.getuid() != 0:
        pytest.skip("only root can give a directory to another user")
    os.chown(directory, 12345, -1)
    with pytest.raises(DatasetError, match="belongs to another user.*data.cache_dir"):
        shard_cache.default_directory()


def test_a_cache_that_does_not_hold_two_windows_is_refused(server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data.cache_gib is 1e-05, but two windows of 4 shards"):
        open_one(configured(server.url, tmp_path, cache_gib=1e-5))


def test_a_changed_dataset_never_meets_shards_of_the_old_one(dataset: Path, tmp_path: Path, expected: list[Batch]) -> None:
    """The index says what the shards are: a server that serves another dataset's shards to a run that has the old index is found out."""
    copy = shutil.copytree(dataset, tmp_path / "data")
    with serving(copy) as server:
        config = configured(server.url, tmp_path / "cache")
        index = open_one(config)
        shard = bytearray((copy / SHARD).read_bytes())
        shard[2000] ^= 1
        (copy / SHARD).write_bytes(shard)
        with pytest.raises(DatasetError, match=f"{SHARD}.*sha256 expected.*another file than the index describes"):
            one_epoch(config, index)


# Sharing


def _read_an_epoch(url: str, cache: Path, seed: int, rank: int, result: Any) -> None:
    config = configured(url, cache)
    layout = {"micro_batch_size": 8, "data_parallel_rank": rank, "data_parallel_size": 2}
    batches = one_epoch(config, open_one(config), seed, **layout)
    result.put((seed, rank, [batch.tokens.numpy().tobytes() for batch in batches]))


def test_ranks_of_two_jobs_that_start_together_fetch_each_shard_once(server: FileServer, dataset: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    result = context.Queue()
    jobs = [(seed, rank) for seed in (5, 6) for rank in (0, 1)]
    processes = [context.Process(target=_read_an_epoch, args=(server.url, tmp_path, *job, result)) for job in jobs]
    for process in processes:
        process.start()
    found = {(seed, rank): tokens for seed, rank, tokens in (result.get(timeout=240) for _ in jobs)}
    for process in processes:
        process.join(60)
    assert {server.requests[name] for name in names(dataset) + names(dataset, "validation")} == {1}
    assert server.requests["train.blocks.bin"] == 1
    local = configured(dataset, tmp_path)
    for seed, rank in jobs:
        batches = one_epoch(local, open_one(local), seed, micro_batch_size=8, data_parallel_rank=rank, data_parallel_size=2)
        assert found[seed, rank] == [batch.tokens.numpy().tobytes() for batch in batches]


FETCH = """
import sys
from pathlib import Path
from pretrain.shard_cache import open_remote_dataset
index = open_remote_dataset(sys.argv[1], Path(sys.argv[2]), 2**30)
print("fetching", flush=True)
index.cache.fetch(index.splits["train"].shards[1])
"""


def start(server: FileServer, cache: Path) -> "subprocess.Popen[str]":
    """Another process that fetches SHARD."""
    process = subprocess.Popen([sys.executable, "-c", FETCH, server.url, str(cache)], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert process.stdout is not None and process.stdout.readline() == "fetching\n"
    return process


def start_fetching(server: FileServer, cache: Path) -> "subprocess.Popen[str]":
    """Another process in the middle of a download of SHARD that takes half a minute."""
    server.misbehave(SHARD, "slow", None)
    process = start(server, cache)
    while not any(path.stat().st_size for path in cache.glob("*/*.partial")):
        time.sleep(0.01)
    return process


def test_a_download_killed_half_way_leaves_nothing_that_is_read_and_no_lock(server: FileServer, dataset: Path, tmp_path: Path) -> None:
    with start_fetching(server, tmp_path) as process:
        process.kill()
    assert cached(tmp_path) == [] and len(cached(tmp_path, "*.partial")) == 1
    cache = open_cache(server, tmp_path)
    begin = time.monotonic()
    path = cache.fetch(load_index(dataset).splits["train"].shards[1])
    assert time.monotonic() - begin < 60
    assert path.read_bytes() == (dataset / SHARD).read_bytes()
    assert cached(tmp_path, "*.partial") == []


def test_who_waits_for_a_download_takes_over_when_its_process_is_killed(server: FileServer, dataset: Path, tmp_path: Path) -> None:
    with start_fetching(server, tmp_path) as first, start(server, tmp_path) as second:
        time.sleep(0.5)
        assert server.requests[SHARD] == 1, "the second one waits"
        first.send_signal(signal.SIGKILL)
        assert second.wait(240) == 0
    assert server.requests[SHARD] == 2
    assert cached(tmp_path) == [SHARD]


def test_who_waits_in_vain_says_for_whom(server: FileServer, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_cache, "WAIT_SECONDS", 0.5)
    cache = open_cache(server, tmp_path)
    with start_fetching(server, tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(DatasetError, match=f"{SHARD}.*another process has held its download for 0.5 s"):
            cache.fetch(load_index(dataset).splits["train"].shards[1])
        process.kill()


# What is kept


def test_a_cached_shard_that_the_disk_damages_is_fetched_again(server: FileServer, tmp_path: Path, expected: list[Batch]) -> None:
    config = configured(server.url, tmp_path)
    one_epoch(config, open_one(config))
    flip_everywhere(next(tmp_path.glob(f"*/{SHARD}")))
    before = server.requests[SHARD]
    assert same(one_epoch(config, open_one(config)), expected)
    assert server.requests[SHARD] == before + 1


@pytest.mark.parametrize("name", ["index.json", "train.blocks.bin", "tokenizer/tokenizer.model"])
def test_a_damaged_copy_of_what_describes_the_shards_is_fetched_again(
    server: FileServer, tmp_path: Path, expected: list[Batch], name: str
) -> None:
    config = configured(server.url, tmp_path)
    index = open_one(config)
    flip_everywhere(index.directory / name)
    open_one(config)
    assert (index.directory / name).read_bytes() == (server.directory / name).read_bytes()
    assert same(one_epoch(config, open_one(config)), expected)


def flip_everywhere(path: Path) -> None:
    path.write_bytes((np.frombuffer(path.read_bytes(), np.uint8) ^ 1).tobytes())


def size_of(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.glob("*/*") if path.is_file())


def test_the_cache_stays_below_its_bound_and_the_stream_is_right(
    server: FileServer, dataset: Path, tmp_path: Path, expected: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_cache, "IN_USE_SECONDS", 0.0)
    largest = max(shard.bytes for shard in load_index(dataset).splits["train"].shards)
    others = sum((dataset / name).stat().st_size for name in ("index.json", "train.blocks.bin", "validation.blocks.bin"))
    bound = 6 * largest + others + 8192
    sizes = []

    def measure() -> None:
        sizes.append(size_of(tmp_path))

    server.at_request = measure
    config = configured(server.url, tmp_path, cache_gib=bound / 2**30, window_shards=2)
    local = replace(config, path=str(dataset))
    assert same(one_epoch(config, open_one(config)), one_epoch(local, open_one(local)))
    measure()
    assert bound - 2 * largest < max(sizes) <= bound


def test_what_was_unused_for_longest_goes_first_and_nothing_else_of_the_directory(
    server: FileServer, dataset: Path, tmp_path: Path
) -> None:
    shards = load_index(dataset).splits["train"].shards
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train-00000.tar").write_bytes(b"of somebody")
    full = open_cache(server, tmp_path)
    for age, shard in ((300, shards[2]), (900, shards[0]), (600, shards[1])):
        path = full.fetch(shard)
        os.utime(path, (time.time() - age,) * 2)
    used = full._used()
    small = ShardCache(full.url, full.folder, used + shards[3].bytes - shards[0].bytes - 1)
    small.fetch(shards[3])
    assert cached(tmp_path) == [shard.name for shard in shards[2:4]]
    assert (tmp_path / "mine" / "train-00000.tar").exists()


def test_nothing_in_use_is_evicted_for_what_is_only_fetched_ahead(server: FileServer, dataset: Path, tmp_path: Path) -> None:
    shards = load_index(dataset).splits["train"].shards
    cache = open_cache(server, tmp_path)
    cache.fetch(shards[0])
    full = ShardCache(cache.url, cache.folder, cache._used())
    assert not full.fetch_ahead(shards[1])
    assert cached(tmp_path) == [shards[0].name] and cached(tmp_path, "*.partial") == []
    os.utime(cache.folder / shards[0].name, (0, 0))
    assert full.fetch_ahead(shards[1])
    assert cached(tmp_path) == [shards[1].name]


def test_an_evicted_shard_can_be_read_on_by_who_has_it_open(server: FileServer, tmp_path: Path, expected: list[Batch]) -> None:
    config = configured(server.url, tmp_path)
    batches = batches_of(config, open_one(config), seed=5, position=0, **LAYOUT)
    found = [next(batches)]
    for path in tmp_path.glob("*/*.tar"):
        path.unlink()
    found += islice(batches, 3)
    assert same(found, expected[:4])


def test_this_window_and_the_next_are_fetched_ahead_and_nothing_more(server: FileServer, dataset: Path, tmp_path: Path) -> None:
    config = configured(server.url, tmp_path, window_shards=2)
    index = open_one(config)
    stream = sequences_of(config, index, seed=5)
    order = stream._source(0)._order
    assert order is not None
    stream.read(np.arange(1))
    first = [index.splits["train"].shards[number].name for number in order.window_shards(0, 0) + order.window_shards(0, 1)]
    assert wait_for(tmp_path, first) == sorted(first)
    position = int(order._epoch(0).first_sequence[2])  # where the second window begins
    assert order.window(position) == (0, 1) and order.window(position - 1) == (0, 0)
    stream.read(np.array([position]))
    later = first + [index.splits["train"].shards[number].name for number in order.window_shards(0, 2)]
    assert wait_for(tmp_path, later) == sorted(later)


def wait_for(cache: Path, shards: list[str]) -> list[str]:
    """What is cached when all of `shards` are, and a little later."""
    deadline = time.monotonic() + 60
    while not set(shards) <= set(cached(cache)) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    return cached(cache)


# A full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", disk], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def test_on_a_disk_that_others_fill_the_cache_makes_do_with_less(
    server: FileServer, dataset: Path, small_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two shards are read and one or two written at a time, and as many evicted ones may still be open."""
    config = configured(server.url, small_disk, window_shards=2)
    index = open_one(config)
    fill(small_disk, leave=7 * max(shard.bytes for shard in index.splits["train"].shards))
    local = replace(config, path=str(dataset))
    assert same(one_epoch(config, index), one_epoch(local, open_one(local)))
    assert "no space left" in capfd.readouterr().err


def test_a_full_disk_is_named_with_the_shard(server: FileServer, dataset: Path, small_disk: Path) -> None:
    cache = open_cache(server, small_disk)
    fill(small_disk, leave=8192)
    with pytest.raises(DatasetError, match=rf"{SHARD} could not be read .*: no space left in .*; free some, or .*data.cache_dir"):
        cache.fetch(load_index(dataset).splits["train"].shards[1])
    assert cached(small_disk) == [] and cached(small_disk, "*.partial") == []


def fill(disk: Path, leave: int) -> None:
    status = os.statvfs(disk)
    (disk / "of others").write_bytes(bytes(max(0, status.f_bavail * status.f_frsize - leave)))
