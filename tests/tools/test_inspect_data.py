"""What inspect_data.py shows of a run's stream and of a dataset is what lies there, by other routes."""

import io
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
import yaml

from pretrain.checkpoint_reader import FORMAT, MANIFEST, sign_manifest
from pretrain.config import RunConfig, parse_run_config
from pretrain.data import SequenceDataset
from pretrain.shards import SPLITS, load_index
from pretrain.sources import configured_phases, open_sources
from tests.pretrain.serving import serving
from tokenizer.tokenizer import load_tokenizer
from tools.document_lengths import DocumentLengths
from tools.inspect_data import EOS, decode, main, split_settings

S = 50
END = 5000
WEIGHTS = {"code": 0.5, "calendar": 0.3, "textwrap": 0.2}


def write_config(path: Path, data: dict[str, Any], **sections: Any) -> Path:
    settings: dict[str, Any] = {
        "run_dir": str(path.parent / "elsewhere"),
        "model": {"vocab_size": 512, "hidden_size": 32, "num_heads": 2, "max_depth": 2, "max_positions": 1024},
        "data": {"sequence_length": S, **data},
        "schedule": {"total_tokens": END * S},
        "optim": {"global_batch_size": 8},
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(settings | sections))
    return path


def mixture(datasets: dict[str, Path], weights: dict[str, float]) -> dict[str, Any]:
    return {"sources": {name: {"path": str(datasets[name]), "weight": weight} for name, weight in weights.items()}}


@pytest.fixture
def config_file(mixed_datasets: dict[str, Path], tmp_path: Path) -> Path:
    return write_config(tmp_path / "run" / "config.yaml", mixture(mixed_datasets, WEIGHTS))


def save_checkpoint(config_file: Path, position: int, step: int) -> None:
    """One without weights, beside the config, of a run that read by that config until `position`."""
    config = load(config_file)
    phases = configured_phases(config.data, open_sources(config.data))
    path = config_file.parent / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    identity = {"seed": config.seed, "data.sequence_length": S, "data.window_shards": config.data.window_shards}
    progress = {"step": step, "position": position, "mixture": phases}
    manifest = {"format": FORMAT, "identity": identity, "progress": progress, "files": {}, "parameters": {}}
    (path / MANIFEST).write_text(json.dumps(sign_manifest(manifest)))


def load(config_file: Path) -> RunConfig:
    return parse_run_config(["--config", str(config_file)])


def stream_of(config: RunConfig) -> SequenceDataset:
    sources = open_sources(config.data)
    return SequenceDataset(config.data, sources, configured_phases(config.data, sources), config.seed)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def documents_of(dataset: Path, split: str = "train") -> list[np.ndarray]:
    """All documents' tokens, as webdataset reads the shards."""
    index = load_index(dataset)
    found = []
    for sample in webdataset.WebDataset([str(dataset / shard.name) for shard in index.splits[split].shards], shardshuffle=False):
        ends = np.frombuffer(sample["doc.bin"], "<u4")
        found += np.split(np.frombuffer(sample["tok.bin"], index.dtype), ends[:-1])
    return found


def texts_in(out: str) -> list[str]:
    """What was printed of each sequence, without the description."""
    return [part.rsplit("a target only:\n", 1)[1] for part in re.split(r"\n\n(?=position |\Z)", out) if part]


def shown(out: str, name: str) -> list[str]:
    return re.findall(rf"^  {name} +(.*)$", out, re.MULTILINE)


def test_the_text_at_a_position_is_that_of_the_corpus(dataset: Path, corpus: Path, tmp_path: Path, run: Any) -> None:
    config_file = write_config(tmp_path / "config.yaml", {"path": str(dataset), "sequence_length": 1000})
    code, out, _ = run("at", 40, "--count", 10, "--config", config_file)
    assert code == 0
    documents = {json.loads(line)["text"] for line in corpus.read_text().splitlines()}
    whole = [text for sequence in texts_in(out) for text in sequence.split(f"{EOS}\n")[1:-1]]
    assert len(whole) > 10 and documents.issuperset(whole)
    tokenizer = load_tokenizer(dataset / "tokenizer")
    expected = stream_of(load(config_file)).read(np.arange(40, 50)).tokens
    assert texts_in(out) == [decode(tokenizer, tokens) for tokens in expected]


def test_tokens_and_place_are_those_that_training_reads(config_file: Path, mixed_datasets: dict[str, Path], run: Any) -> None:
    stream = stream_of(load(config_file))
    positions = np.arange(2990, 3010)
    _, out, _ = run("at", 2990, "--count", 20, "--tokens", "--config", config_file)
    assert [list(map(int, text.split())) for text in texts_in(out)] == stream.read(positions).tokens.tolist()
    names = {load_index(path).fingerprint: name for name, path in mixed_datasets.items()}
    sources, shards, sequences = stream.locate(positions)
    by_number = [names[fingerprint] for fingerprint in sorted(names)]
    assert shown(out, "source") == [f"{by_number[number]}: {mixed_datasets[by_number[number]]}" for number in sources]
    for line, shard, sequence in zip(shown(out, "shard"), shards, sequences, strict=True):
        assert line.startswith(f"train-{shard:05d}.tar, block ")
        assert f"tokens {sequence * S:,} to {sequence * S + S:,} of" in line


def test_documents_of_a_sequence_are_those_of_the_shard(dataset: Path, tmp_path: Path, run: Any) -> None:
    config_file = write_config(tmp_path / "config.yaml", {"path": str(dataset), "sequence_length": 200})
    lengths = [len(document) for document in documents_of(dataset)]
    first = np.cumsum([0] + [shard.documents for shard in load_index(dataset).splits["train"].shards])
    _, out, _ = run("at", 0, "--count", 400, "--config", config_file)
    assert any("), " in line.split(", tokens")[0] for line in shown(out, "shard"))  # one that lies across two blocks
    for part in re.split(r"\n\n(?=position )", out):
        shard, begin = re.findall(r"train-(\d+).tar.*tokens ([\d,]+) to", part)[0]
        ends = np.cumsum(lengths[first[int(shard)] : first[int(shard) + 1]])
        starts, here = ends - np.diff(ends, prepend=0), int(begin.replace(",", ""))
        touched = np.flatnonzero((starts < here + 201) & (ends > here)).tolist()
        rows = re.findall(r"^ +([\d,]+) +([\d,]+)   (\d+) to ([\d,]*\d)", part, re.MULTILINE)
        assert [int(row[0].replace(",", "")) for row in rows] == touched
        assert [int(row[2]) + here for row in rows] == [max(here, starts[number]) for number in touched]
        assert [int(row[3].replace(",", "")) + here for row in rows] == [min(here + 200, ends[number] - 1) for number in touched]


def test_shares_are_what_the_stream_holds(config_file: Path, mixed_datasets: dict[str, Path], run: Any) -> None:
    _, out, _ = run("shares", "--config", config_file, "--from", 1234, "--to", 3456)
    sources = stream_of(load(config_file)).locate(np.arange(1234, 3456))[0].tolist()
    by_number = sorted(mixed_datasets, key=lambda name: load_index(mixed_datasets[name]).fingerprint)
    expected = Counter(by_number[number] for number in sources)
    for name, count in expected.items():
        assert shown(out, name)[0].replace(",", "").split()[:3] == [str(count), f"{count / 2222:.2%}", str(count * S)]
    assert shown(out, "all")[0].split() == ["2,222", "100.00%", "111,100"]
    assert shown(out, "weights")[0].startswith("from position 0 on: ") and "code 50.00%" in out
    assert run("shares", "--config", config_file, "--from-tokens", 1234 * S, "--to-tokens", 3455 * S + 1)[1] == out
    assert shown(run("shares", "--config", config_file)[1], "all")[0].startswith("5,000 ")  # the whole run


def test_a_mixture_that_a_resume_changed_is_shown_as_it_was_read(config_file: Path, mixed_datasets: dict[str, Path], run: Any) -> None:
    last, later = ("at", 1999, "--config", config_file), ("at", 2500, "--count", 20, "--config", config_file)
    before, after = run(*last)[1], run(*later)[1]
    save_checkpoint(config_file, position=2000, step=250)
    write_config(config_file, mixture(mixed_datasets, {"code": 0.5, "calendar": 0.5}))
    _, out, _ = run("shares", "--config", config_file, "--from", 1000, "--to", 3000)
    assert [shown(out, name)[0].split()[0] for name in ("code", "calendar")] == ["1,000", "800"]
    assert "(no longer in the config)             200   10.00%" in out
    assert "weights from position 2,000 on: calendar 50.00%, code 50.00%" in out and "step_00000250 has them" in out
    code, _, error = run("at", 1000, "--count", 100, "--config", config_file)
    assert code == 2 and load_index(mixed_datasets["textwrap"]).fingerprint in error
    write_config(config_file, mixture(mixed_datasets, {"code": 0.5, "calendar": 0.5, "textwrap": 0.0}))
    assert run(*last)[1] == before
    assert run(*later)[1] != after
    warning = run(*last, "--seed", 7)[2]
    assert "was made with seed = 1234, the config has 7: what is shown before position 2,000" in warning


def test_a_step_is_its_batch_through_ramp_and_resume(config_file: Path, run: Any) -> None:
    ramp = ("--optim.initial_batch_size", 4, "--optim.ramp_tokens", 100 * S)
    config = parse_run_config(["--config", str(config_file), *map(str, ramp)])
    starts = [0]
    while len(starts) < 40:
        starts.append(starts[-1] + config.batch_size(starts[-1]))
    assert starts[1] - starts[0] == 4 and starts[-1] - starts[-2] == 8
    for step in (1, 5, 26, 39):
        _, out, _ = run("step", step, "--config", config_file, *ramp)
        assert re.findall(r"^position (.*)$", out, re.MULTILINE) == [f"{p:,}" for p in range(starts[step - 1], starts[step])]
        assert set(shown(out, "step")) == {f"{step}, whose batch is positions {starts[step - 1]} to {starts[step] - 1}"}
    save_checkpoint(config_file, position=1000, step=77)  # other batches than the config's led there
    assert shown(run("step", 79, "--config", config_file, "--count", 1)[1], "step") == ["79, whose batch is positions 1,008 to 1,015"]
    code, _, error = run("step", 77, "--config", config_file)
    assert code == 2 and "the batch size was changed before" in error
    assert shown(run("at", 999, "--config", config_file)[1], "step") == []


@pytest.mark.parametrize("split", SPLITS)
def test_lengths_are_those_of_the_documents_tokenised_one_by_one(dataset: Path, corpus: Path, split: str, run: Any) -> None:
    tokenizer = load_tokenizer(dataset / "tokenizer")
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    of_split = Counter(tuple(document.tolist()) for document in documents_of(dataset, split))
    tokenised = [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    lengths = np.array([len(tokens) for tokens in tokenised if tuple(tokens) in of_split])
    _, out, _ = run("lengths", dataset, "--split", split, "--sequence-length", 100)
    expected = {"documents": len(lengths), "tokens": lengths.sum(), "longest": lengths.max()}
    expected |= {f"p{p}": np.percentile(lengths, p, method="inverted_cdf") for p in (1, 10, 90, 99)}
    expected["median"] = np.percentile(lengths, 50, method="inverted_cdf")
    for name, value in expected.items():
        assert shown(out, name)[0] == f"{value:,}"
    assert shown(out, "mean") == [f"{lengths.mean():,.1f}"]
    assert f"{(lengths > 100).mean():.2%} of the documents are longer than 100 tokens, and have " in out
    assert f"{lengths[lengths > 100].sum() / lengths.sum():.2%} of the tokens" in out
    rows = re.findall(r"^ +([\d,]+) to ([\d,]+) +([\d,]+) +([\d.]+%)[ #]+([\d.]+%)", out, re.MULTILINE)
    for row in rows:
        least, most, count = (int(text.replace(",", "")) for text in row[:3])
        inside = lengths[(lengths >= least) & (lengths <= most)]
        assert (len(inside), row[4]) == (count, f"{inside.sum() / lengths.sum():.2%}") and most == 2 * least - 1
    assert sum(int(row[2].replace(",", "")) for row in rows) == len(lengths)


def test_lengths_of_parts_are_lengths_of_the_whole() -> None:
    lengths = np.random.default_rng(0).geometric(0.001, 5000)
    parts, whole = DocumentLengths(), DocumentLengths()
    whole.add(lengths)
    for part in np.array_split(lengths, 7):
        parts.add(part)
    assert (parts.lengths.tolist(), parts.documents.tolist()) == (whole.lengths.tolist(), whole.documents.tolist())
    assert (whole.count, whole.tokens) == (5000, lengths.sum())
    assert whole.percentile(0) == lengths.min() and whole.percentile(100) == lengths.max()


def test_a_dataset_behind_a_url_is_inspected_too(dataset: Path, tmp_path: Path, run: Any) -> None:
    pytest.importorskip("aiohttp", reason="HTTP needs aiohttp: pip install -e '.[remote]'")
    local = write_config(tmp_path / "local" / "config.yaml", {"path": str(dataset)})
    with serving(dataset) as server:
        assert run("lengths", server.url)[1].split("\n", 1)[1] == run("lengths", dataset)[1].split("\n", 1)[1]
        remote = write_config(tmp_path / "remote" / "config.yaml", {"path": server.url, "cache_dir": str(tmp_path / "cache")})
        server.requests.clear()
        _, out, _ = run("at", 40, "--config", remote)
        assert out == run("at", 40, "--config", local)[1].replace(str(dataset), server.url)
        assert sum(count for name, count in server.requests.items() if name.endswith(".tar")) == 1  # and not its window
        (shard,) = (tmp_path / "cache").glob("*/*.tar")
        split = load_index(dataset).splits["train"]
        number = int(shard.name[6:11])
        for block in range(int(split.first_block[number]), int(split.first_block[number + 1])):
            damage(shard, int(split.columns["document_offset"][block]))
        assert run("at", 40, "--config", remote)[1] == out  # the copy here was damaged, and is fetched anew


def damage(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_the_lengths_are_drawn(dataset: Path, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="pip install -e '.[dev]'")
    picture = tmp_path / "lengths.png"
    assert run("lengths", dataset, "--plot", picture, "--sequence-length", S)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "lengths.wrong: the name must end as one of " in run("lengths", dataset, "--plot", "lengths.wrong")[2]
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backend_bases", None)
    assert "--plot needs matplotlib" in run("lengths", dataset, "--plot", picture)[2]


def test_damage_is_named(dataset: Path, tmp_path: Path, run: Any) -> None:
    copy = Path(shutil.copytree(dataset, tmp_path / "copy"))
    split = load_index(copy).splits["train"]
    damage(copy / "train-00001.tar", int(split.columns["document_offset"][split.first_block[1] + 1]))
    code, _, error = run("lengths", copy)
    assert code == 2 and re.fullmatch(
        rf"error: {copy}/train-00001.tar: block 1, doc.bin: crc32 expected \w{{8}}, found \w{{8}}; .*\n", error
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["at", "-1"], "the position is -1; positions count sequences of the stream, from 0"),
        (["at", "1" + "0" * 30], "the position is 1000"),
        (["at", "0", "--count", "0"], "--count is 0"),
        (["at", "0", "--data.path", "no/such/place", "--data.sources", "{}"], "no dataset in no/such/place"),
        (["at", "0", "--data.windw", "1"], "data.windw"),
        (["step", "0"], "the step is 0"),
        (["shares", "--from", "10", "--to", "10"], "there is nothing"),
        (["shares", "--from", "-3"], "the first position is -3"),
    ],
)
def test_mistakes_end_with_a_line(config_file: Path, arguments: list[str], message: str, run: Any) -> None:
    code, out, error = run(*arguments, "--config", config_file)
    assert (code, out) == (2, "") and error.startswith("error: ") and error.count("\n") == 1 and message in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/place"], "no dataset in no/such/place"),
        (["no/such/place", "--sequence-length", "0"], "--sequence-length is 0"),
        (["no/such/place", "--data.workers", "1"], "takes no --data.workers"),
    ],
)
def test_mistakes_about_a_dataset_end_with_a_line(arguments: list[str], message: str, run: Any) -> None:
    code, out, error = run("lengths", *arguments)
    assert (code, out) == (2, "") and error.startswith("error: ") and error.count("\n") == 1 and message in error


def test_a_settings_value_is_no_position() -> None:
    arguments = ["at", "--data.workers", "0", "--seed=3", "--config", "x", "12", "--run_dir", "y"]
    assert split_settings(arguments) == (["at", "--config", "x", "12"], ["--data.workers", "0", "--seed=3", "--run_dir", "y"])


def test_text_cannot_command_the_terminal(dataset: Path) -> None:
    tokenizer = load_tokenizer(dataset / "tokenizer")
    tokens = np.array([*tokenizer.encode("a\x1b[2J\r\n\tb"), tokenizer.eos_id, *tokenizer.encode(EOS)])
    assert decode(tokenizer, tokens) == f"a\\x1b[2J\\x0d\n\tb{EOS}\n{EOS}"


def test_a_reader_that_has_enough_is_no_error(dataset: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def fileno(self) -> int:
            return spare.fileno()

    with open(tmp_path / "spare", "w") as spare:
        monkeypatch.setattr("sys.stdout", Closed())
        assert main(["lengths", str(dataset)]) == 0
