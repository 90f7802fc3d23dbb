"""A run that reads its data from an HTTP server: two ranks, two data workers, one cache."""

from pathlib import Path

import pytest

from pretrain.shards import load_index
from tests.distributed.launching import launcher, run, train_losses, write_run
from tests.pretrain.serving import serving

pytest.importorskip("aiohttp", reason="HTTP needs aiohttp: pip install -e '.[remote]'")


def test_two_ranks_train_from_a_url_as_from_the_directory_behind_it(dataset: Path, tmp_path: Path) -> None:
    local = write_run(tmp_path / "local", dataset)
    run(launcher("deepspeed", 2), local).check_succeeded()
    with serving(dataset) as server:
        options = [*write_run(tmp_path / "remote", dataset), "--data.path", server.url, "--data.cache_dir", str(tmp_path / "cache")]
        run(launcher("deepspeed", 2), options).check_succeeded()
        shards = [shard.name for split in load_index(dataset).splits.values() for shard in split.shards]
        assert max(server.requests[name] for name in shards) == 1
    assert train_losses(tmp_path / "remote" / "run") == train_losses(tmp_path / "local" / "run")
    assert (tmp_path / "remote" / "run" / "tokenizer" / "tokenizer.model").exists()


def test_a_run_whose_shard_cannot_be_had_ends_with_its_name(dataset: Path, tmp_path: Path) -> None:
    with serving(dataset) as server:
        for shard in load_index(dataset).splits["train"].shards:
            server.misbehave(shard.name, "forbidden")
        options = [*write_run(tmp_path, dataset), "--data.path", server.url, "--data.cache_dir", str(tmp_path / "cache")]
        ended = run(launcher("deepspeed", 2), options)
    assert ended.code != 0 and not ended.left_over
    assert f"error on rank 0: {server.url}/train-0" in ended.output or f"error on rank 1: {server.url}/train-0" in ended.output
    assert "Traceback" not in ended.output
