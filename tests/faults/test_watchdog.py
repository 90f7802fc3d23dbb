"""A rank that stops, and one that dies: the others say which it is, within the limit, and no process is left."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from pretrain.engine import initialize_distributed
from pretrain.topology import Topology
from pretrain.watchdog import HUNG, Watchdog
from tests.distributed.launching import write_run
from tests.faults.runs import Process, start_ranks
from tests.ranks import run_ranks

LIMIT = 12


def two_ranks(folder: Path, dataset: Path) -> list[Process]:
    command = [*write_run(folder, dataset), "--watchdog_seconds", str(LIMIT), "--schedule.total_tokens", "10000000"]
    ranks = start_ranks(command, folder)
    ranks[0].wait_for("step 3/78125  loss")
    return ranks


@pytest.mark.parametrize("stopped", [1, 0])
def test_a_stopped_rank_is_named_by_the_others_which_end(dataset: Path, tmp_path: Path, stopped: int) -> None:
    ranks = two_ranks(tmp_path, dataset)
    other = 1 - stopped
    os.kill(ranks[stopped].process.pid, signal.SIGSTOP)
    assert ranks[other].process.wait(timeout=4 * LIMIT) == HUNG, ranks[other].text[-3000:]
    assert f"rank {stopped} is behind: its process" in ranks[other].text
    stacks = (tmp_path / "run" / "hang" / f"rank_{other}.txt").read_text()
    assert f"rank {stopped} is behind" in stacks and "train_step" in stacks
    (waits,) = re.findall(rf"^rank {other} waits in (.*)$", ranks[other].text, re.MULTILINE)
    assert re.search(r"gloo:\S+ \d+ of .+, begun in \w+/\w+\.py:\d+ \(\w+\)", waits), waits
    assert all(f"{collective}, NOT ENDED" in stacks for collective in waits.split("; ")), stacks
    ranks[stopped].process.kill()  # as srun's --kill-on-bad-exit does
    for rank in ranks:
        rank.end()


def test_a_rank_that_cannot_leave_its_stack_ends_too(dataset: Path, tmp_path: Path) -> None:
    ranks = two_ranks(tmp_path, dataset)
    (tmp_path / "run" / "hang").write_text("in the way")
    os.kill(ranks[1].process.pid, signal.SIGSTOP)
    assert ranks[0].process.wait(timeout=4 * LIMIT) == HUNG, ranks[0].text[-3000:]
    (said,) = [line for line in ranks[0].text.splitlines() if line.startswith("error on rank 0")]
    assert "rank 1 is behind: its process" in said and "Its stack cannot be left" in said


class Judging(Watchdog):
    """Says who is behind, and ends nothing."""

    who = ""

    def _end(self, who: str) -> None:
        self.who = who


def who_hangs() -> str:
    """In a rank: what its watchdog finds where rank 1 is late for a collective, though its process is well."""
    topology = Topology.from_environment(os.environ)
    initialize_distributed(topology, 1)
    watchdog = Judging(topology, Path("unused"), seconds=4)
    watchdog.at(1, "forward")
    values = torch.zeros(1)
    work = torch.distributed.all_reduce(values, async_op=True) if topology.rank == 0 else None
    while not watchdog.who:
        time.sleep(0.1)
    (work or torch.distributed.all_reduce(values, async_op=True)).wait()
    return watchdog.who


def test_of_ranks_that_are_equally_far_the_one_that_has_begun_fewer_collectives_is_behind() -> None:
    assert run_ranks(who_hangs, 2) == ["rank 1 is behind: it is at step 1, forward"] * 2


def test_the_others_of_a_rank_that_dies_end_at_once(dataset: Path, tmp_path: Path) -> None:
    ranks = two_ranks(tmp_path, dataset)
    ranks[1].process.kill()
    assert ranks[0].process.wait(timeout=LIMIT) == 1
    assert "rank 0 ends too: another rank is gone" in ranks[0].text
    for rank in ranks:
        rank.end()


def test_a_run_that_goes_on_while_it_is_judged_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog = Watchdog(Topology(0, 0, 1, 1, "127.0.0.1", 1, "single"), tmp_path, seconds=0.1)
    ended: list[str] = []
    monkeypatch.setattr(watchdog, "_end", ended.append)
    time.sleep(0.15)

    def goes_on(_: object) -> str:
        watchdog._since = time.monotonic()
        return "nobody"

    monkeypatch.setattr(watchdog, "_who_is_behind", goes_on)
    watchdog._look(HashStore())
    assert not ended
    monkeypatch.setattr(watchdog, "_who_is_behind", lambda _: "rank 7")
    time.sleep(0.15)
    watchdog._look(HashStore())
    assert ended == ["rank 7"]
