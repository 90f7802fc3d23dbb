"""The helper that starts ranks: results in order, and no failure is lost or left running."""

import os
import signal
import time

import pytest

from tests.ranks import RankError, run_ranks


def _describe(greeting: str) -> str:
    return f"{greeting} {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"


def _fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("the cause")
    time.sleep(60)


def _kill_rank_0() -> None:
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(_describe, 2, "rank") == ["rank 0 of 2", "rank 1 of 2"]


def test_the_failing_ranks_traceback_is_raised_and_the_others_are_killed() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="(?s)rank 1 ended with exit code 1.*ValueError: the cause"):
        run_ranks(_fail_on_rank_1, 2)
    assert time.monotonic() - started < 30


def test_a_killed_rank_is_reported() -> None:
    with pytest.raises(RankError, match="rank 0 was killed by SIGKILL"):
        run_ranks(_kill_rank_0, 2)


def test_a_rank_that_hangs_is_reported_with_its_stack() -> None:
    with pytest.raises(RankError, match="(?s)no end after 1 s.*in _sleep"):
        run_ranks(_sleep, 1, timeout=1)


def _sleep() -> None:
    time.sleep(60)
