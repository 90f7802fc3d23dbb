import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from tokenizer.documents import CorpusError, ReadOptions, find_files, read_documents

TEXTS = ["one", "two\nlines", "é😀"]


def texts(path: Path, options: ReadOptions | None = None) -> list[str]:
    return [document.text for document in read_documents(path, options or ReadOptions())]


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def write_parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_every_format_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    data = json_lines(TEXTS)
    if name == "a.parquet":
        write_parquet(path)
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(data))
    elif name.endswith(".zst"):
        frames = [zstandard.compress(data[:20]), zstandard.compress(data[20:])]
        path.write_bytes(b"".join(frames))
    else:
        path.write_bytes(data)
    documents = list(read_documents(path, ReadOptions()))
    assert [document.text for document in documents] == TEXTS
    assert documents[-1].bytes_read == path.stat().st_size


def test_a_text_file_is_one_document_and_a_long_one_is_cut_at_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"first\nsecond\r\nthird")
    assert texts(path) == ["first\nsecond\r\nthird"]
    assert texts(path, ReadOptions(max_text_bytes=7)) == ["first\nsecond\r\n", "third"]


def test_empty_documents_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "a.jsonl").write_bytes(json_lines(["", "x"]) + b"\n")
    assert texts(tmp_path / "a.txt") == []
    assert texts(tmp_path / "a.jsonl") == ["x"]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_a_truncated_compressed_file_is_an_error_and_not_a_shorter_corpus(tmp_path: Path, ending: str) -> None:
    data = json_lines([f"document {i * 7919}" for i in range(20000)])
    compressed = gzip.compress(data) if ending == ".gz" else zstandard.compress(data)
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(compressed[: len(compressed) // 2])
    with pytest.raises(CorpusError, match=f"{path} cannot be decompressed"):
        texts(path)


BAD_INPUT = {
    "text that is not UTF-8": ("a.txt", b"fine\nna\xefve", "a.txt is not UTF-8: byte 0xef at offset 7"),
    "a JSON line that is not UTF-8": ("a.jsonl", json_lines(["x"]) + b'{"text": "\xff"}', "a.jsonl is not UTF-8: byte 0xff at offset 33"),
    "half a surrogate pair": ("a.jsonl", b'{"text": "\\ud800"}', r"a.jsonl, line 1: the escape \ud800 is half a surrogate pair"),
    "broken JSON": ("a.jsonl", json_lines(["x"]) + b'{"text": "y', "a.jsonl, line 2: not JSON"),
    "a missing field": ("a.jsonl", b'{"content": "y"}', "a.jsonl, line 1: no text in the field 'text' (fields: content); see --text-field"),
    "a JSON list": ("a.jsonl", b'["y"]', "no text in the field 'text' (fields: none: it is a list)"),
    "no Parquet": ("a.parquet", b"garbage", "a.parquet cannot be read as Parquet"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_named_with_its_place(tmp_path: Path, case: str) -> None:
    name, data, message = BAD_INPUT[case]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorpusError) as caught:
        texts(tmp_path / name)
    assert message in str(caught.value)


@pytest.mark.parametrize("data", [b'{"text": "a\xff"}\n', b'{"text": "a\\ud800"}\n'])
def test_invalid_utf8_can_be_replaced_or_skipped(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(data + json_lines(["b"]))
    assert texts(path, ReadOptions(invalid_utf8="skip")) == ["b"]
    replaced, kept = texts(path, ReadOptions(invalid_utf8="replace"))
    assert set(replaced[1:]) == {"\ufffd"}
    assert kept == "b"


def test_a_missing_parquet_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match=r"no column 'body' \(columns: text\)"):
        texts(tmp_path / "a.parquet", ReadOptions(text_field="body"))


def test_files_are_found_by_name_folder_and_glob_once_each_and_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl", "code.py", "deep/c.txt", "skipped/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def names(*inputs: str, pattern: str | None = None) -> list[str]:
        files = find_files([f"{tmp_path}/{name}" for name in inputs], pattern, exclude=["skipped"])
        return [str(file.relative_to(tmp_path)) for file in files]

    assert names("") == ["a.jsonl", "b.txt", "deep/c.txt"]
    assert names("", pattern="*.py") == ["code.py"]
    assert names("code.py", "*.txt", "b.txt") == ["b.txt", "code.py"]
    assert names("**/*.txt") == ["b.txt", "deep/c.txt"]


@pytest.mark.parametrize("name", ["missing.txt", "*.nothing", "empty"])
def test_an_input_without_files_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match=name.replace("*", r"\*")):
        find_files([f"{tmp_path}/{name}"])
