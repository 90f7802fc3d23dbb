import shutil
from pathlib import Path
from typing import Any

import pytest

from pretrain.mixture import BLOCK, Mixture
from pretrain.shards import DatasetError
from pretrain.sources import DataConfig, SourceConfig, WeightChange, configured_phases, epoch_length, open_sources, require_epochs, shares
from tests.conftest import prepare_text
from tokenizer.train import main as train_tokenizer

S = 50


def config(datasets: dict[str, Path], weights: dict[str, float] | None = None, **changes: Any) -> DataConfig:
    sources = {name: SourceConfig(str(path), None if weights is None else weights[name]) for name, path in datasets.items()}
    return DataConfig(S, sources=sources, **changes)


def test_without_weights_each_sequence_comes_equally_often(mixed_datasets: dict[str, Path]) -> None:
    data = config(mixed_datasets)
    sources = open_sources(data)
    whole = sum(epoch_length(index, S) for index in sources.values())
    found = shares(data, sources, configured_phases(data, sources), 0, 20 * BLOCK)
    assert [share.epochs for share in found.values()] == pytest.approx([20 * BLOCK / whole] * 3, rel=0.01)
    assert sum(share.sequences for share in found.values()) == 20 * BLOCK
    assert sum(share.share for share in found.values()) == pytest.approx(1)


def test_epochs_without_weights_say_how_often_a_source_comes(mixed_datasets: dict[str, Path]) -> None:
    epochs = dict(zip(mixed_datasets, (10, 20, 5), strict=True))
    data = DataConfig(S, sources={name: SourceConfig(str(path), epochs=epochs[name]) for name, path in mixed_datasets.items()})
    sources = open_sources(data)
    phases = configured_phases(data, sources)
    whole = int(sum(epoch_length(index, S) * epochs[name] for name, index in sources.items()))
    found = shares(data, sources, phases, 0, whole)
    assert {name: share.epochs for name, share in found.items()} == pytest.approx(epochs, rel=0.05)
    require_epochs(data, sources, phases, whole, 0, slack=30)
    with pytest.raises(ValueError, match=r"data.sources.code.epochs is 10, but this run reads it 12.0. times, with .*% of its seq"):
        require_epochs(data, sources, phases, round(whole * 1.2), 0, slack=30)


def test_weights_change_at_their_tokens_and_follow_the_datasets(mixed_datasets: dict[str, Path], tmp_path: Path) -> None:
    names = list(mixed_datasets)
    weights = dict(zip(names, (1.0, 0.0, 3.0), strict=True))
    changes = [WeightChange(2000 * S - 1, dict.fromkeys(names, 1.0))]
    data = config(mixed_datasets, weights, weight_changes=changes)
    sources = open_sources(data)
    phases = configured_phases(data, sources)
    assert [phase.first_position for phase in phases] == [0, 2000]
    assert [share.sequences for share in shares(data, sources, phases, 0, 2000).values()] == [500, 0, 1500]
    assert [share.sequences for share in shares(data, sources, phases, 2000, 5000).values()] == [1000, 1000, 1000]
    moved = {f"new {name}": shutil.copytree(path, tmp_path / name) for name, path in mixed_datasets.items()}
    renamed = config(moved, {f"new {name}": weight for name, weight in weights.items()})
    assert Mixture(configured_phases(renamed, open_sources(renamed)), 0).sources == Mixture(phases, 0).sources


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "data: give either path, or sources, .* give neither"),
        ({"path": "a", "sources": {"a": SourceConfig("a")}}, "data: give either path, or sources, .* give both"),
        ({"sources": {"a": SourceConfig("a", 1), "b": SourceConfig("b")}}, "data.sources: a have a weight, but b none"),
        ({"sources": {"a": SourceConfig("a", 0), "b": SourceConfig("b", 0)}}, "data.sources: every weight is 0"),
        ({"path": "a", "weight_changes": [WeightChange(9, {"a": 1})]}, "data.weight_changes are of data.sources, and there are none"),
        (
            {"sources": {"a": SourceConfig("a")}, "weight_changes": [WeightChange(9, {"b": 1})]},
            "weights from 9 tokens on must name each of data.sources and nothing else; look at a, b",
        ),
        ({"sources": {"a": SourceConfig("a")}, "weight_changes": [WeightChange(9, {})]}, "and nothing else; look at a"),
        ({"sources": {"a": SourceConfig("a")}, "weight_changes": [WeightChange(9, {"a": 0})]}, "that are not all 0"),
        ({"sources": {"a": SourceConfig("a")}, "weight_changes": [WeightChange(9, {"a": 1})] * 2}, "must rise, from above 0"),
        ({"sources": {"a": SourceConfig("a")}, "weight_changes": [WeightChange(0, {"a": 1})]}, "must rise, from above 0"),
    ],
)
def test_what_contradicts_itself_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(S, **changes)


@pytest.mark.parametrize(("field", "value"), [("weight", -1), ("weight", float("nan")), ("epochs", 0), ("epochs", float("inf"))])
def test_weights_and_epochs_are_numbers(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"data.sources: .*{field} of data/web is"):
        SourceConfig("data/web", **{field: value})


def test_one_dataset_twice_is_refused(mixed_datasets: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(mixed_datasets["code"], tmp_path / "copy")
    with pytest.raises(DatasetError, match="the sources code and again are the same dataset; give it once"):
        open_sources(config({"code": mixed_datasets["code"], "again": copy}))


def test_sources_of_two_tokenizers_are_refused(mixed_datasets: dict[str, Path], corpus: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    assert train_tokenizer(["--input", str(corpus), "--output", str(tokenizer), "--vocab-size", "500"]) == 0
    other = prepare_text(tmp_path, "a document\n\n" * 200, tokenizer)
    with pytest.raises(DatasetError, match=r"the sources code \(.*\) and other \(.*\) were made with different tokenizers"):
        open_sources(config({"code": mixed_datasets["code"], "other": other}))


def test_epochs_bound_a_source_that_is_small_beside_a_block(mixed_datasets: dict[str, Path]) -> None:
    sources = {name: SourceConfig(str(path), 1.0, epochs=1 if name == "textwrap" else None) for name, path in mixed_datasets.items()}
    data = DataConfig(S, sources=sources)
    indices = open_sources(data)
    phases, size = configured_phases(data, indices), epoch_length(indices["textwrap"], S)
    assert size < 200
    require_epochs(data, indices, phases, 2 * size, 0, slack=8)
    with pytest.raises(ValueError, match="data.sources.textwrap.epochs is 1, but this run reads it 2.* times"):
        require_epochs(data, indices, phases, 7 * size, 0, slack=8)
