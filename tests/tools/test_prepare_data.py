import io
import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import webdataset

from pretrain.shards import TokenReader, open_dataset
from tests.conftest import DATASET_ARGUMENTS
from tests.tokenizer.test_documents import write_arrow, write_tar
from tokenizer import documents
from tokenizer.tokenizer import load_tokenizer
from tools import corpus_estimate, duplicates, prepare_data, progress
from tools.dataset_writer import DatasetWriter
from tools.prepare_data import main
from tools.shard_writer import token_dtype

Files = dict[str, bytes]


@pytest.fixture
def run(corpus: Path, tokenizer_directory: Path, tmp_path: Path) -> Callable[..., int]:
    """Runs the command on the small corpus, into tmp_path / "out" unless told otherwise; later arguments win."""

    def run(*arguments: str) -> int:
        command = ["--input", str(corpus), "--tokenizer", str(tokenizer_directory), "--output", str(tmp_path / "out")]
        return main([*command, *DATASET_ARGUMENTS, *arguments])

    return run


def files(directory: Path) -> Files:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def documents_of(dataset: Path, split: str) -> list[str]:
    """The split's documents, read by webdataset."""
    tokenizer = load_tokenizer(dataset / "tokenizer")
    texts = []
    for sample in webdataset.WebDataset(shards(dataset, split), shardshuffle=False):
        tokens, ends = np.frombuffer(sample["tok.bin"], "<u2"), np.frombuffer(sample["doc.bin"], "<u4")
        for document in np.split(tokens, ends[:-1]):
            assert document[-1] == tokenizer.eos_id
            texts.append(tokenizer.decode(document[:-1].tolist()))
    return texts


def shards(dataset: Path, split: str) -> list[str]:
    return sorted(map(str, dataset.glob(f"{split}-*.tar")))


def test_webdataset_reads_the_tokens_that_the_index_leads_to(dataset: Path) -> None:
    index = open_dataset(dataset)
    for split in ("train", "validation"):
        samples = list(webdataset.WebDataset(shards(dataset, split), shardshuffle=False))
        streamed = np.concatenate([np.frombuffer(sample["tok.bin"], "<u2") for sample in samples])
        reader = TokenReader(index, split)
        read = [reader.read(number, 0, shard.tokens) for number, shard in enumerate(index.splits[split].shards)]
        assert np.array_equal(streamed, np.concatenate(read))
        assert len(streamed) == index.token_count(split)
        assert sum(json.loads(sample["json"])["tokens"] for sample in samples) == len(streamed)


def test_every_document_is_in_one_split_in_its_order(dataset: Path, corpus: Path) -> None:
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    validation = documents_of(dataset, "validation")
    chosen = set(validation)
    assert 0.05 < len(validation) / len(texts) < 0.2
    assert validation == [text for text in texts if text in chosen]
    assert documents_of(dataset, "train") == [text for text in texts if text not in chosen]


def test_tars_have_sorted_members_and_nothing_of_the_machine(dataset: Path) -> None:
    with tarfile.open(shards(dataset, "train")[0]) as tar:
        members = tar.getmembers()
    assert [member.name for member in members[:4]] == [f"blk000000.{ending}" for ending in ("crc.bin", "doc.bin", "json", "tok.bin")]
    assert {(member.mtime, member.uid, member.gid, member.uname, member.gname) for member in members} == {(0, 0, 0, "", "")}


@pytest.mark.parametrize("processes", ["1", "2"])
def test_the_same_input_gives_the_same_bytes_whatever_the_processes(
    run: Callable[..., int], dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    monkeypatch.setattr(documents, "CHUNK_BYTES", 10_000)  # several tasks for each worker
    assert run("--processes", processes) == 0
    assert files(tmp_path / "out") == files(dataset)


def test_a_wide_vocabulary_is_stored_in_four_bytes() -> None:
    assert token_dtype(65536).itemsize == 2
    assert token_dtype(65537).itemsize == 4


def test_an_existing_dataset_is_kept_unless_told(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    first = files(tmp_path / "out")
    assert run("--shard-tokens", "100000") == 1
    assert "already holds a dataset; pass --overwrite" in capsys.readouterr().err
    assert files(tmp_path / "out") == first
    assert run("--shard-tokens", "100000", "--overwrite") == 0
    assert len(shards(tmp_path / "out", "train")) < len([name for name in first if name.startswith("train-")])
    open_dataset(tmp_path / "out")


def test_the_index_arrives_last(run: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[str] = []
    rename = Path.rename

    def recorded(path: Path, target: Path) -> Path:
        arrived.append(path.name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", recorded)
    assert run() == 0
    assert "train-00000.tar" in arrived and arrived[-1] == "index.json"


def test_a_failing_overwrite_keeps_the_old_dataset(run: Callable[..., int], tmp_path: Path) -> None:
    assert run() == 0
    first = files(tmp_path / "out")
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    assert run("--overwrite", "--input", str(tmp_path / "bad.txt")) == 1
    assert files(tmp_path / "out") == first


@pytest.mark.parametrize("moves", [1, 4, 8])
def test_an_overwrite_killed_at_any_move_is_ended_by_the_next_command(
    run: Callable[..., int], dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], moves: int
) -> None:
    assert run() == 0
    overwrite = ["--shard-tokens", "30000", "--overwrite"]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", KilledAfter(moves))
        patch.setattr(DatasetWriter, "__exit__", lambda *_: None)  # SIGKILL runs none
        with pytest.raises(Killed):
            run(*overwrite)
    assert not (tmp_path / "out" / "index.json").exists()
    assert run() == 1
    assert "already holds a dataset" in capsys.readouterr().err
    ended = files(tmp_path / "out")
    open_dataset(tmp_path / "out")
    assert run(*overwrite) == 0
    assert files(tmp_path / "out") == ended != files(dataset)


class Killed(BaseException):
    """No handler of the command catches it."""


class KilledAfter:
    """`Path.rename` for a process that ends after some calls."""

    def __init__(self, calls: int) -> None:
        self.left, self.rename = calls, Path.rename

    def __get__(self, path: Path, _: type) -> Callable[[Path], Path]:
        def rename(target: Path) -> Path:
            if not self.left:
                raise Killed
            self.left -= 1
            return self.rename(path, target)

        return rename


def test_a_folder_of_other_things_is_never_written_to(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    assert run("--overwrite") == 1
    assert "is not empty and holds no dataset" in capsys.readouterr().err
    assert files(tmp_path / "out") == {"thesis.txt": b"precious"}


BAD_RUNS = {
    "a missing corpus": (["--input", "missing/*.txt"], "no file matches missing/*.txt"),
    "an empty corpus": (["--input", "empty.txt"], "it holds no text"),
    "bytes that are not UTF-8": (["--input", "latin1.txt"], "latin1.txt is not UTF-8: byte 0xe9 at offset 3"),
    "a missing tokenizer": (["--tokenizer", "nowhere"], "no tokenizer in nowhere"),
    "everything held out": (["--input", "one.txt", "--validation-fraction", "0.999999"], "lower --validation-fraction"),
}


@pytest.mark.parametrize("case", BAD_RUNS)
@pytest.mark.parametrize("processes", ["1", "2"])
def test_bad_input_ends_with_a_clear_error_and_nothing_written(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str, processes: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("one.txt").write_text("text")
    Path("latin1.txt").write_bytes("café".encode("latin-1"))
    arguments, message = BAD_RUNS[case]
    assert run(*arguments, "--processes", processes) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not Path("out").exists()


def test_a_corpus_without_validation_documents_is_said(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.txt").write_text("text")
    assert run("--input", str(tmp_path / "one.txt"), "--validation-fraction", "0.000001") == 0
    assert "warning: no document fell to the validation split" in capsys.readouterr().out


def test_a_full_disk_is_a_clear_error_and_leaves_no_dataset(corpus: Path, tokenizer_directory: Path, tmp_path: Path) -> None:
    """The limit on a file's size fails the same writes as a full disk does, and needs no disk of its own."""
    command = [sys.executable, prepare_data.__file__, "--input", str(corpus), "--tokenizer", str(tokenizer_directory)]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "out"), "--processes", "1"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert f"error: cannot write {tmp_path}/out: " in done.stderr and "no dataset was made" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def working(tokenizer_directory: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command at work with two processes on a corpus that takes it long."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("text that goes on\n" * 3_000_000)
    command = [sys.executable, prepare_data.__file__, "--input", str(corpus), "--tokenizer", str(tokenizer_directory)]
    options = ["--output", str(tmp_path / "out"), "--processes", "2", "--block-tokens", "1000"]
    # A test run in the background of a shell script has SIGINT ignored, and its children inherit that.
    hear_sigint = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, preexec_fn=hear_sigint) as process:
        wait_until((tmp_path / "out" / ".partial" / "train-00000.tar").exists)
        yield process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_command_leaves_neither_a_dataset_nor_processes(working: subprocess.Popen[str], tmp_path: Path, number: int) -> None:
    workers = children(working.pid)
    working.send_signal(number)
    _, error = working.communicate(timeout=60)
    wait_until(lambda: not any(map(running, workers)))
    assert not (tmp_path / "out" / "index.json").exists()
    if number != signal.SIGKILL:
        assert (working.returncode, error) == (130, "error: interrupted; no dataset was made\n")
        assert not (tmp_path / "out").exists()


def test_a_worker_that_dies_is_a_clear_error(working: subprocess.Popen[str], tmp_path: Path) -> None:
    os.kill(children(working.pid)[-1], signal.SIGKILL)
    _, error = working.communicate(timeout=60)
    assert (working.returncode, error) == (1, "error: a worker process died, most often because memory ran out; use fewer --processes\n")
    assert not (tmp_path / "out").exists()


PRINT_PEAK_MEMORY = """
import sys
from tools.prepare_data import main
code = main(sys.argv[1:])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""


def test_memory_does_not_grow_with_the_corpus(tokenizer_directory: Path, tmp_path: Path) -> None:
    line = json.dumps({"text": "some text that goes on and on " * 30}) + "\n"
    peaks = []
    for megabytes in (1, 10):
        corpus = tmp_path / f"{megabytes}.jsonl"
        corpus.write_text(line * (megabytes * 1_000_000 // len(line)))
        command = [sys.executable, "-c", PRINT_PEAK_MEMORY, "--input", str(corpus), "--tokenizer", str(tokenizer_directory)]
        options = ["--output", str(tmp_path / str(megabytes)), "--processes", "1", "--block-tokens", "10000"]
        output = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60, check=True).stdout
        peaks.append(int(output.splitlines()[-1]) * 1024)
    assert peaks[1] < peaks[0] + 4_000_000


def test_plain_lines_replace_the_bar_when_there_is_no_terminal(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(documents, "CHUNK_BYTES", 50_000)
    assert run() == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines()[0].endswith("MB/s") and "%" in captured.out


def test_the_bar_appears_on_a_terminal(run: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert run() == 0
    assert "M tokens" in terminal.getvalue()


def write_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_the_first_of_equal_documents_is_kept(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(documents, "CHUNK_BYTES", 100)
    monkeypatch.setattr(duplicates, "RUN_DOCUMENTS", 7)
    texts = [f"document {number % 40} of forty" for number in range(100)]
    write_lines(tmp_path / "a.jsonl", texts[:55])
    write_lines(tmp_path / "b.jsonl", texts[55:])
    assert run("--input", str(tmp_path / "*.jsonl"), "--deduplicate") == 0
    assert "left out: 60 duplicates" in capsys.readouterr().out
    kept = documents_of(tmp_path / "out", "train") + documents_of(tmp_path / "out", "validation")
    assert sorted(kept) == sorted(set(texts))
    train = documents_of(tmp_path / "out", "train")
    assert train == [text for text in texts[:40] if text in train]


def test_a_corpus_without_duplicates_gives_the_same_bytes_with_and_without_the_search(run: Callable[..., int], tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [f"document {number}" for number in range(500)])
    assert run("--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "plain")) == 0
    assert run("--input", str(tmp_path / "a.jsonl"), "--deduplicate", "--processes", "2") == 0
    assert files(tmp_path / "out") == files(tmp_path / "plain")


def test_documents_are_left_out_by_length(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "a.jsonl", ["é" * length for length in range(1, 21)])
    lengths = ["--min-characters", "5", "--max-characters", "12", "--validation-fraction", "0"]
    assert run("--input", str(tmp_path / "a.jsonl"), *lengths) == 0
    assert [len(text) for text in documents_of(tmp_path / "out", "train")] == list(range(5, 13))
    assert "left out: 4 too short, 8 too long" in capsys.readouterr().out


def test_a_filter_that_leaves_nothing_is_said(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--min-characters", "10000000") == 1
    assert "every document was left out (1" in capsys.readouterr().err


def test_the_summary_counts_what_is_in_the_shards(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    printed = capsys.readouterr().out
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer")
    for split, numbers in summary["splits"].items():
        texts = documents_of(tmp_path / "out", split)
        lengths = [len(tokenizer.encode(text)) + 1 for text in texts]
        assert (numbers["documents"], numbers["tokens"], numbers["longest_document_tokens"]) == (len(texts), sum(lengths), max(lengths))
        assert numbers["text_bytes"] == sum(len(text.encode()) for text in texts)
        assert numbers["bytes_per_token"] == round(numbers["text_bytes"] / numbers["tokens"], 4)
        assert f"{split}: {len(texts)} documents, {sum(lengths)} tokens" in printed


def test_a_dry_run_estimates_and_writes_nothing(
    run: Callable[..., int], dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--dry-run", "--deduplicate", "--processes", "8") == 0
    out = capsys.readouterr().out
    splits = json.loads((dataset / "summary.json").read_bytes())["splits"].values()
    assert f"about {sum(split['documents'] for split in splits):,} documents" in out
    assert f"{sum(split['tokens'] for split in splits) / 1e6:.1f} M tokens" in out
    assert "time: about" in out and "with 8 processes" in out and "to find duplicates" in out
    assert not (tmp_path / "out").exists()


def test_a_dry_run_extrapolates_from_a_part(
    run: Callable[..., int], dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(documents, "CHUNK_BYTES", 5_000)
    monkeypatch.setattr(corpus_estimate, "SAMPLE_CHUNKS", 10)
    assert run("--dry-run") == 0
    estimate = float(capsys.readouterr().out.partition(" M tokens")[0].rpartition(" ")[2])
    index = open_dataset(dataset)
    tokens = index.token_count("train") + index.token_count("validation")
    assert 0.5 < estimate * 1e6 / tokens < 2


@pytest.mark.parametrize("name", ["a.parquet", "a.tar", "saved", "memory"])
def test_every_kind_of_input_gives_the_same_dataset(
    run: Callable[..., int], corpus: Path, dataset: Path, tmp_path: Path, name: str
) -> None:
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    path = tmp_path / name
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    elif name == "a.tar":
        write_tar(path, {f"{number}.txt": text.encode() for number, text in enumerate(texts)})
    elif name == "saved":
        path.mkdir()
        write_arrow(path / "data-00000-of-00001.arrow", [pyarrow.record_batch({"text": texts})])
        (path / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    else:
        fsspec.filesystem("memory").pipe("/corpus.jsonl", corpus.read_bytes())
    assert run("--input", "memory://*.jsonl" if name == "memory" else str(path)) == 0
    assert files(tmp_path / "out") == files(dataset)
