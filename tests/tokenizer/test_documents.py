import gzip
import io
import json
import tarfile
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from tokenizer import documents
from tokenizer.corpus import local_file
from tokenizer.decoding import CorpusError, ReadOptions
from tokenizer.documents import read_chunks, read_documents

TEXTS = ["one", "two\nlines", "é😀"]


def texts(path: Path, options: ReadOptions | None = None) -> list[str]:
    return [document.text for document in read_documents(local_file(path), options or ReadOptions())]


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def write_parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path)


def write_arrow(path: Path, batches: list[pyarrow.RecordBatch]) -> None:
    with pyarrow.ipc.new_stream(path, batches[0].schema) as file:
        for batch in batches:
            file.write_batch(batch)


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "a.tar"])
def test_every_format_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    data = json_lines(TEXTS)
    if name == "a.parquet":
        write_parquet(path)
    elif name == "a.arrow":
        write_arrow(path, [pyarrow.record_batch({"text": part}) for part in (TEXTS[:2], TEXTS[2:])])
    elif name == "a.tar":
        write_tar(path, {f"{number}.txt": text.encode() for number, text in enumerate(TEXTS)})
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(data))
    elif name.endswith(".zst"):
        frames = [zstandard.compress(data[:20]), zstandard.compress(data[20:])]
        path.write_bytes(b"".join(frames))
    else:
        path.write_bytes(data)
    read = list(read_documents(local_file(path), ReadOptions()))
    assert [document.text for document in read] == TEXTS
    assert read[-1].bytes_read in (path.stat().st_size, path.stat().st_size - 8)  # an Arrow table's end mark is not waited for


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


LONG = [f"document {number} " + "words " * (number % 7) for number in range(500)]


def chunks_of(path: Path) -> int:
    return len(list(read_chunks(local_file(path), ReadOptions())))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.parquet", "a.arrow", "a.tar"])
def test_where_chunks_are_cut_does_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": LONG}), path, row_group_size=130)
    elif name == "a.arrow":
        write_arrow(path, [pyarrow.record_batch({"text": LONG[:300]}), pyarrow.record_batch({"text": LONG[300:]})])
    elif name == "a.tar":
        write_tar(path, {f"{number}.json": json.dumps({"text": text}).encode() for number, text in enumerate(LONG)})
    else:
        path.write_bytes(json_lines(LONG) if name == "a.jsonl" else zstandard.compress(json_lines(LONG)))
    for chunk_bytes in (1, 700, 1 << 20):
        monkeypatch.setattr(documents, "CHUNK_BYTES", chunk_bytes)
        assert texts(path) == LONG
        assert (chunks_of(path) > 10) == (chunk_bytes < 1000)


def test_the_line_of_an_error_is_right_in_a_later_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "CHUNK_BYTES", 100)
    (tmp_path / "a.jsonl").write_bytes(json_lines(LONG) + b"[\n")
    with pytest.raises(CorpusError, match="a.jsonl, line 501: not JSON"):
        texts(tmp_path / "a.jsonl")


def test_text_without_line_ends_is_cut_between_characters(tmp_path: Path) -> None:
    text = "é😀" * 1000
    (tmp_path / "a.txt").write_text(text)
    pieces = texts(tmp_path / "a.txt", ReadOptions(max_text_bytes=101))
    assert "".join(pieces) == text
    assert max(len(piece.encode()) for piece in pieces) <= 202


def test_a_sample_of_a_tar_is_one_document_its_text_before_its_json(tmp_path: Path) -> None:
    members = {
        "a.json": b'{"text": "not this"}',
        "a.txt": b"one",
        "b.jpg": b"\xff",
        "b.meta.json": b'{"text": "two"}',
        "folder/b.txt": b"three",
        "c.cls": b"7",
    }
    write_tar(tmp_path / "a.tar", members)
    assert texts(tmp_path / "a.tar") == ["one", "two", "three"]


TAR_DAMAGE = {
    "cut between members": (lambda data: data[:1024], "ends at byte 1024 without the end mark of a tar"),
    "cut in a header": (lambda data: data[:1324], "the tar header at byte 1024 is damaged"),
    "cut in the contents": (lambda data: data[:1540], "cannot be read as a tar: unexpected end of data"),
    "a changed header": (lambda data: data[:1030] + b"!" + data[1031:], "the tar header at byte 1024 is damaged"),
    "a zeroed header": (lambda data: data[:1024] + bytes(512) + data[1536:], "the tar header at byte 1024 is damaged"),
    "no tar": (lambda data: b"garbage " * 1000, "cannot be read as a tar"),
}


@pytest.mark.parametrize("case", TAR_DAMAGE)
def test_a_damaged_tar_is_an_error_and_not_a_shorter_corpus(tmp_path: Path, case: str) -> None:
    damage, message = TAR_DAMAGE[case]
    write_tar(tmp_path / "a.tar", {"a.txt": b"one", "b.txt": b"two", "c.txt": b"three"})
    (tmp_path / "a.tar").write_bytes(damage((tmp_path / "a.tar").read_bytes()))
    with pytest.raises(CorpusError, match=message):
        texts(tmp_path / "a.tar")


def test_a_tar_without_text_is_an_error(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"a.jpg": b"\xff"})
    with pytest.raises(CorpusError, match=r"holds no \.txt or \.json member"):
        texts(tmp_path / "a.tar")


def test_a_cut_arrow_table_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write_arrow(path, [pyarrow.record_batch({"text": TEXTS})] * 3)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CorpusError, match="does not end as an Arrow table does"):
        texts(path)


@pytest.mark.parametrize("kind", [pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())])
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_columns_of_text_may_be_of_any_kind_and_have_nulls(tmp_path: Path, ending: str, kind: pyarrow.DataType) -> None:
    column = pyarrow.array([*TEXTS, None, "last"]).cast(kind)
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    else:
        write_arrow(path, [pyarrow.record_batch({"text": column})])
    assert texts(path) == [*TEXTS, "last"]


def test_a_column_of_numbers_is_an_error(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": [1]}), tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match="the column 'text' holds int64, not text"):
        texts(tmp_path / "a.parquet")
