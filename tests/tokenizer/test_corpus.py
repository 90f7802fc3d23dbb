import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tokenizer import corpus
from tokenizer.corpus import find_files
from tokenizer.decoding import CorpusError, ReadOptions
from tokenizer.documents import read_documents


def test_files_are_found_by_name_folder_and_glob_once_each_and_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl", "code.py", "deep/c.txt", "skipped/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def names(*inputs: str, pattern: str | None = None) -> list[str]:
        files = find_files([f"{tmp_path}/{name}" for name in inputs], pattern, exclude=["skipped"])
        return [str(Path(file.name).relative_to(tmp_path)) for file in files]

    assert names("") == ["a.jsonl", "b.txt", "deep/c.txt"]
    assert names("", pattern="*.py") == ["code.py"]
    assert names("code.py", "*.txt", "b.txt") == ["b.txt", "code.py"]
    assert names("**/*.txt") == ["b.txt", "deep/c.txt"]


@pytest.mark.parametrize("name", ["missing.txt", "*.nothing", "empty"])
def test_an_input_without_files_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match=name.replace("*", r"\*")):
        find_files([f"{tmp_path}/{name}"])


def save_dataset(directory: Path, tables: list[str]) -> None:
    """As `datasets.Dataset.save_to_disk` of datasets 5.2 lays it out, but with empty tables."""
    directory.mkdir(parents=True)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in tables], "_split": "train"}))
    (directory / "dataset_info.json").write_text("{}")
    for name in tables:
        (directory / name).touch()


def test_a_saved_dataset_is_its_tables(tmp_path: Path) -> None:
    tables = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    save_dataset(tmp_path / "saved", tables)
    (tmp_path / "saved" / "cache-1234.arrow").touch()
    assert [Path(file.name).name for file in find_files([str(tmp_path / "saved")])] == tables
    (tmp_path / "saved" / tables[1]).unlink()
    with pytest.raises(CorpusError, match="without its table data-00001-of-00002.arrow"):
        find_files([str(tmp_path / "saved")])


def test_a_saved_dataset_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    save_dataset(tmp_path / "train", ["data-00000-of-00001.arrow"])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(CorpusError, match=f"name those to use: {tmp_path}/train {tmp_path}/test"):
        find_files([str(tmp_path)])
    assert len(find_files([str(tmp_path / "train")])) == 1


LINES = "".join(f"line {number}\n" for number in range(1000))


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    filesystem = fsspec.filesystem("memory")
    for name in ("dump/b.txt", "dump/a.jsonl", "dump/code.py", "dump/deep/c.txt", "dump/skipped/d.txt"):
        filesystem.pipe(f"/{name}", b'{"text": "x"}\n')
    filesystem.pipe("/long.txt", LINES.encode())
    yield filesystem
    filesystem.rm("/", recursive=True)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("memory://dump", ["a.jsonl", "b.txt", "deep/c.txt"]),
        ("memory://dump/*.txt", ["b.txt"]),
        ("memory://dump/**/*.txt", ["b.txt", "deep/c.txt"]),
        ("memory://dump/code.py", ["code.py"]),
    ],
)
def test_files_of_a_url_are_found_by_name_folder_and_glob(url: str, names: list[str]) -> None:
    assert [file.name for file in find_files([url], exclude=["skipped"])] == [f"memory:///dump/{name}" for name in names]


BAD_URLS = {
    "memory://dump/none.txt": "memory://dump/none.txt cannot be opened: FileNotFoundError",
    "memory://dump/*.nothing": "no file matches memory://dump/",
    "unheardof://bucket/a.txt": "unheardof://bucket/a.txt cannot be opened: ValueError: Protocol not known: unheardof",
}


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("url", BAD_URLS)
def test_a_url_that_cannot_be_opened_is_named(url: str) -> None:
    with pytest.raises(CorpusError) as caught:
        find_files([url])
    assert BAD_URLS[url] in str(caught.value)


class Unsteady:
    """A file whose connection breaks: now with an error, now with an early end."""

    def __init__(self, file: Any, failures: list[Exception | None]) -> None:
        self.file, self.failures = file, failures
        self.tell, self.seek, self.close = file.tell, file.seek, file.close

    def read(self, count: int) -> bytes:
        if self.file.tell() and self.failures:
            failure = self.failures.pop()
            if failure:
                raise failure
            return b""
        data: bytes = self.file.read(min(count, 1000))
        return data


@pytest.fixture
def failures(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> list[Exception | None]:
    """Of the reads to come from memory:// ; None: an early end. The waits are left out."""
    failures: list[Exception | None] = []
    opened = MemoryFileSystem.open
    monkeypatch.setattr(MemoryFileSystem, "open", lambda *arguments, **options: Unsteady(opened(*arguments, **options), failures))
    monkeypatch.setattr(corpus, "REMOTE_WAIT", 0.0)
    return failures


def test_a_broken_connection_is_opened_again_where_it_broke_off(failures: list[Exception | None]) -> None:
    failures += [ConnectionResetError("reset"), None, RuntimeError("of the driver")]
    (document,) = read_documents(find_files(["memory://long.txt"])[0], ReadOptions())
    assert document.text == LINES
    assert not failures


@pytest.mark.parametrize(("failure", "reason"), [(RuntimeError("gone"), "RuntimeError: gone"), (None, r"it ended at byte 1000 of \d+")])
def test_a_connection_that_stays_broken_is_an_error(failures: list[Exception | None], failure: Exception | None, reason: str) -> None:
    failures += [failure] * corpus.REMOTE_ATTEMPTS
    with pytest.raises(CorpusError, match=rf"memory:///long.txt cannot be read: after 5 attempts, {reason}"):
        list(read_documents(find_files(["memory://long.txt"])[0], ReadOptions()))
