"""Fixtures that several folders use: a small tokenizer and a small dataset, both made by the project's own commands, and a world of one.

The text is source code of a few standard modules, so nothing is downloaded.
"""

import argparse
import calendar
import inspect
import json
import os
import tarfile
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenizer.train import main as train_tokenizer
from tools.prepare_data import main as prepare_data

# Before torch is imported, here and in what tests start: `make test` runs two tests at a time, and their tensors are small.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Small sizes, so that there are many shards, several blocks in each and several checked chunks in a block.
DATASET_ARGUMENTS = ["--block-tokens", "6000", "--shard-tokens", "12000", "--validation-fraction", "0.1", "--processes", "1"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .jsonl file of several hundred documents."""
    path = tmp_path_factory.mktemp("corpus") / "modules.jsonl"
    sources = [inspect.getsource(module) for module in (argparse, inspect, tarfile, typing)]
    documents = [text for source in sources for text in source.split("\n\n") if text]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


@pytest.fixture(scope="session")
def tokenizer_directory(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece tokenizer of 512 pieces."""
    directory = tmp_path_factory.mktemp("tokenizer")
    assert train_tokenizer(["--input", str(corpus), "--output", str(directory), "--vocab-size", "512"]) == 0
    return directory


@pytest.fixture(scope="session")
def dataset(corpus: Path, tokenizer_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of about ten training shards. Tests must not write in it."""
    directory = tmp_path_factory.mktemp("dataset") / "small"
    arguments = ["--input", str(corpus), "--tokenizer", str(tokenizer_directory), "--output", str(directory)]
    assert prepare_data(arguments + DATASET_ARGUMENTS) == 0
    return directory


def prepare_text(folder: Path, module_text: str, tokenizer: Path) -> Path:
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": part}) + "\n" for part in module_text.split("\n\n") if part))
    output = folder / "data"
    assert prepare_data(["--input", str(text), "--tokenizer", str(tokenizer), "--output", str(output), *DATASET_ARGUMENTS]) == 0
    return output


@pytest.fixture(scope="session")
def mixed_datasets(dataset: Path, tokenizer_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three datasets of one tokenizer, by name, the first that of `dataset`. Tests must not write in them."""
    others = {
        module.__name__: prepare_text(tmp_path_factory.mktemp(module.__name__), inspect.getsource(module), tokenizer_directory)
        for module in (calendar, textwrap)
    }
    return {"code": dataset, **others}


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    """This process as a whole world, so that Megatron's layers can be built."""
    # Seconds to import, which the tests that need no model do not wait for.
    import torch
    from megatron.core import parallel_state

    from benchmarks.world import world_of_one as initialize

    initialize()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def fused_operators() -> None:
    """For tests of the fused gate operators, which `make test` builds first."""
    from model.ops import fused

    if not fused.load():
        pytest.skip("the fused gate operators are not built: python -m model.ops.build")
