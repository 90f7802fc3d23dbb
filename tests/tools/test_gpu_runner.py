"""Checks in a process of their own: what one does to it keeps no other from running."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.gpu.runner import Check, Row, Setting, run


@dataclass(frozen=True)
class FailingDevice(Setting):
    """Its kernels fail, and go on to."""

    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand a second line")


def process(setting: Setting) -> Iterator[Row]:
    print("says something")
    yield Row("process", str(os.getpid()))


def raises(setting: Setting) -> Iterator[Row]:
    yield Row("raises", "a row before")
    raise ValueError("a reason\nand what else there is to say")


def crashes(setting: Setting) -> Iterator[Row]:
    yield from ()
    os.abort()


def hangs(setting: Setting) -> Iterator[Row]:
    yield Row("hangs", "a row before")
    time.sleep(600)


def rows(tmp_path: Path, *checks: Check, setting: Setting | None = None, seconds: float = 100) -> list[Row]:
    return list(run(checks, setting or Setting(device="cpu"), time.monotonic() + seconds, tmp_path / "log"))


PROCESS = Check("process", process, 20)


def test_a_check_that_raises_is_a_failed_row_and_the_next_runs_in_the_same_process(tmp_path: Path) -> None:
    first, before, failure, second = rows(tmp_path, PROCESS, Check("raises", raises, 20), PROCESS)
    assert (before.value, before.ok) == ("a row before", True)
    assert (failure.check, failure.value, failure.ok) == ("raises", "ValueError: a reason", False)
    assert first.value == second.value != str(os.getpid())
    log = (tmp_path / "log").read_text()
    assert log.count("says something") == 2
    assert "and what else there is to say" in log


def test_a_process_that_starts_late_runs_its_check_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.gpu.runner.START_SECONDS", 0)
    (row,) = rows(tmp_path, Check("process", process, 60))
    assert row.ok
    assert row.value != str(os.getpid())


def test_after_a_crash_or_a_hang_the_next_check_has_a_new_process(tmp_path: Path) -> None:
    checks = [PROCESS, Check("crashes", crashes, 20), PROCESS, Check("hangs", hangs, 2), PROCESS]
    first, crash, second, before, hang, third = rows(tmp_path, *checks)
    assert (crash.check, crash.value, crash.ok) == ("crashes", "its process ended, exit code -6", False)
    assert before.ok
    assert (hang.check, hang.value, hang.ok) == ("hangs", "stopped: no answer in 4 s", False)
    assert len({first.value, second.value, third.value}) == 3


def test_an_error_of_the_device_is_its_checks_and_the_next_check_has_a_new_process(tmp_path: Path) -> None:
    first, failure, second, _ = rows(tmp_path, PROCESS, PROCESS, setting=FailingDevice(device="cpu"))
    assert (failure.check, failure.ok) == ("process", False)
    assert failure.value == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert first.value != second.value


def test_what_no_longer_fits_into_the_time_is_skipped(tmp_path: Path) -> None:
    (skipped,) = rows(tmp_path, Check("long", process, 50), seconds=40)
    assert (skipped.check, skipped.ok) == ("long", None)
    assert skipped.value.startswith("not begun: ")
