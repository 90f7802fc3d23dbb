"""What every test of this folder leaves behind, however it ends: no process."""

from collections.abc import Iterator

import pytest

from tests.faults.runs import Process


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    while Process.started:
        Process.started.pop().kill_what_is_left()
