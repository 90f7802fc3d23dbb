"""A corpus behind a real HTTP server on this machine."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from tokenizer import corpus
from tokenizer.corpus import find_files
from tokenizer.decoding import CorpusError, ReadOptions
from tokenizer.documents import read_documents

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install -e '.[remote]'")

TEXTS = [f"document {number} " + "words " * (number % 100) for number in range(20_000)]


class Server(ThreadingHTTPServer):
    """Serves `files`, in parts too; `failures` are what it does to the requests for contents that come next."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.failures: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self.answer(with_contents=False)

    def do_GET(self) -> None:
        self.answer(with_contents=True)

    def answer(self, with_contents: bool) -> None:
        data = self.server.files.get(self.path.partition("?")[0])
        failure = self.server.failures.pop() if with_contents and self.server.failures else None
        if data is None or failure == "500":
            self.send_error(404 if data is None else 500)
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, end = (int(asked[1]), min(int(asked[2]) + 1, len(data))) if asked else (0, len(data))
        self.send_response(206 if asked else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start))
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.end_headers()
        if with_contents:
            self.wfile.write(data[start : end - (end - start) // 2 if failure == "closes early" else end])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    parquet = tmp_path_factory.mktemp("parquet") / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), parquet, row_group_size=3000, compression="none")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    return {"/a.jsonl": lines, "/a.jsonl.zst": zstandard.compress(lines), "/a.parquet": parquet.read_bytes()}


@pytest.fixture
def server(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(corpus, "REMOTE_WAIT", 0.01)
    server = Server()
    server.files = files
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def read(url: str) -> list[str]:
    return [document.text for file in find_files([url]) for document in read_documents(file, ReadOptions())]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst?signature=x/y.z", "a.parquet"])
def test_documents_are_those_of_the_file(server: Server, name: str) -> None:
    assert read(f"{server.url}/{name}") == TEXTS


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_server_that_fails_now_and_then_changes_nothing(server: Server, name: str) -> None:
    server.failures += ["closes early", "500", "closes early"]
    assert read(f"{server.url}/{name}") == TEXTS
    assert not server.failures


def test_a_server_that_goes_on_failing_is_an_error_with_the_url(server: Server) -> None:
    server.failures += ["500"] * 100
    with pytest.raises(CorpusError, match=rf"{server.url}/a.jsonl cannot be read: after 5 attempts, .*500"):
        read(f"{server.url}/a.jsonl")


def test_a_file_that_is_not_there_is_an_error_with_the_url(server: Server, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=f"{server.url}/b.jsonl cannot be opened: FileNotFoundError"):
        read(f"{server.url}/b.jsonl")


def test_the_name_without_its_signature_is_what_a_restart_compares(server: Server) -> None:
    (file,) = find_files([f"{server.url}/a.jsonl?signature=of-today"])
    assert file.path == f"{server.url}/a.jsonl"
    assert file.size == len(server.files["/a.jsonl"])
