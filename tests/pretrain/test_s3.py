"""The stream from a real S3-compatible server on loopback: moto's, in a process of its own."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from pretrain import remote
from pretrain.data import Batch
from pretrain.shards import DatasetError, load_index
from pretrain.sources import DataConfig
from tests.pretrain.streams import batches_of, open_one
from tests.ranks import free_port

s3fs = pytest.importorskip("s3fs", reason="S3 needs s3fs: pip install -e '.[remote]'")
pytest.importorskip("moto", reason="the S3 server is not installed: pip install -e '.[s3-server]'")
pytest.importorskip("flask_cors", reason="the S3 server is not installed: pip install -e '.[s3-server]'")

SHARD = "train-00001.tar"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    port = free_port()
    with subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL) as server:
        while server.poll() is None:
            with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
        server.kill()


@pytest.fixture
def bucket(endpoint: str, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket that holds the dataset under data/; address and credentials come from the environment, as on a cluster."""
    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setattr(remote, "FIRST_BACKOFF", 0.02)
    name = f"bucket-{time.monotonic_ns()}"
    files = s3fs.S3FileSystem()
    files.mkdir(name)
    files.put(str(dataset), f"{name}/data", recursive=True)
    return name


def config(path: str | Path, cache: Path) -> DataConfig:
    return DataConfig(100, str(path), workers=1, window_shards=4, cache_dir=str(cache), cache_gib=1)


def some_batches(config: DataConfig) -> list[Batch]:
    layout = {"global_batch_size": 16, "micro_batch_size": 16, "data_parallel_rank": 0, "data_parallel_size": 1}
    return list(islice(batches_of(config, open_one(config), seed=5, position=0, **layout), 30))


def test_s3_gives_the_stream_of_the_directory_that_was_put_there(bucket: str, dataset: Path, tmp_path: Path) -> None:
    found = some_batches(config(f"s3://{bucket}/data", tmp_path))
    for ours, wanted in zip(found, some_batches(config(dataset, tmp_path)), strict=True):
        assert np.array_equal(ours.tokens, wanted.tokens) and np.array_equal(ours.sequence, wanted.sequence)


def test_an_object_that_was_replaced_or_removed_is_named(bucket: str, dataset: Path, tmp_path: Path) -> None:
    shard = load_index(dataset).splits["train"].shards[1]
    cache = open_one(config(f"s3://{bucket}/data", tmp_path)).cache
    assert cache is not None
    files = s3fs.S3FileSystem()
    files.pipe(f"{bucket}/data/{SHARD}", bytes(shard.bytes))
    with pytest.raises(DatasetError, match=rf"s3://{bucket}/data/{SHARD} .* sha256 expected {shard.sha256}"):
        cache.fetch(shard)
    files.rm(f"{bucket}/data/{SHARD}")
    with pytest.raises(DatasetError, match=rf"s3://{bucket}/data/{SHARD} cannot be read: FileNotFoundError"):
        cache.fetch(shard)


def test_a_bucket_that_is_not_there_is_named(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"s3://no-such-bucket/data/index.json cannot be read: FileNotFoundError"):
        open_one(config("s3://no-such-bucket/data", tmp_path))
