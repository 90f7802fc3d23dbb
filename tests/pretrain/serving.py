"""A real HTTP server on loopback for a directory, which can be told to serve some of its files badly."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

Fault = Literal["500", "refused", "closes early", "ends early", "cut", "stalls", "changed", "longer", "forbidden", "slow"]
SLOW_SECONDS = 0.05  # between the pieces of a "slow" answer
PIECE = 64


class FileServer(ThreadingHTTPServer):
    """Serves `directory`. Counts requests by file name; `faults[name]` are what the next requests for a file meet, the last for ever."""

    daemon_threads = True

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.directory = directory
        self.requests: Counter[str] = Counter()
        self.times: dict[str, list[float]] = {}
        self.faults: dict[str, deque[Fault | None]] = {}
        self.at_request: Callable[[], None] = lambda: None
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/data"

    def misbehave(self, name: str, *faults: Fault | None) -> None:
        """None: a good answer."""
        self.faults[name] = deque(faults)

    def next_fault(self, name: str) -> Fault | None:
        faults = self.faults.get(name, deque([None]))
        return faults.popleft() if len(faults) > 1 else faults[0]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is what some tests are about."""


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        name = self.path.removeprefix("/data/")
        self.server.requests[name] += 1
        self.server.times.setdefault(name, []).append(time.monotonic())
        self.server.at_request()
        fault = self.server.next_fault(name)
        path = self.server.directory / name
        if fault == "refused":
            self.connection.close()
        elif fault == "500":
            self.send_error(500)
        elif fault == "forbidden":
            self.send_error(403)
        elif not path.is_file():
            self.send_error(404)
        else:
            self._answer(path.read_bytes(), fault)

    def _answer(self, data: bytes, fault: Fault | None) -> None:
        half = len(data) // 2
        if fault == "changed":
            data = data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
        if fault == "longer":
            data += data
        if fault == "cut":
            data = data[:half]
        self.send_response(200)
        if fault != "ends early":  # without a length, only the connection's end says that the file is over
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if fault in ("closes early", "ends early", "stalls"):
            self.wfile.write(data[:half])
            self.wfile.flush()
            if fault == "stalls":
                self.server.ended.wait(60)
            self.close_connection = True
        elif fault == "slow":
            for start in range(0, len(data), PIECE):
                self.wfile.write(data[start : start + PIECE])
                self.wfile.flush()
                time.sleep(SLOW_SECONDS)
        else:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@contextmanager
def serving(directory: Path) -> Iterator[FileServer]:
    with FileServer(directory) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()
