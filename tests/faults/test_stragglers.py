"""A rank that is slow, or waits for its data, is named, though every rank's steps take the same time."""

import time
from pathlib import Path

import pytest
import torch

from model.config import GRTConfig
from model.grt import GRT
from model.parallel import layer_config
from pretrain.data import Batch
from pretrain.stragglers import ROWS, ComputeTime, Judge
from pretrain.train import train_step
from tests.distributed.runs import small_run, start
from tests.ranks import run_ranks

SLEEP = 0.2


def own_and_wall_seconds() -> tuple[float, float, float]:
    """In a rank: of a step in which rank 1 sleeps in each block outside the core; and its own seconds of an evaluation."""
    engine = start(small_run(Path("unused"), core_residency="loop"))  # so that the forward pass waits for its weights
    compute = ComputeTime(engine.module)
    if torch.distributed.get_rank() == 1:
        for block in (*engine.module.prelude, *engine.module.coda):
            block.attention_norm.register_forward_hook(lambda *_: time.sleep(SLEEP))
    tokens = torch.arange(66).view(2, 33)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(2, 32, dtype=torch.bool), torch.tensor([0, 1]))
    micro_batches = [batch] * engine.gradient_accumulation_steps()

    def step() -> float:
        begin = time.perf_counter()
        train_step(engine, micro_batches, 2, 1e-3, torch.device("cpu"), measure=False)
        return time.perf_counter() - begin

    step()
    compute.read()
    wall = step()
    own = compute.read()
    engine.eval()
    with torch.no_grad():
        engine(batch.tokens, batch.targets, depth=2)
    return own, wall, compute.read()


def test_a_ranks_own_time_holds_what_it_does_and_not_its_wait_for_a_slower_rank() -> None:
    (fast, fast_wall, _), (slow, _, evaluation) = run_ranks(own_and_wall_seconds, 2)
    slept = 2 * 2 * SLEEP  # in two blocks of two micro-batches
    assert slow > slept
    assert fast_wall > slept and fast < slept / 2
    assert evaluation == 0


class Event:
    """Stands in for CUDA's: each is a second after the one before."""

    now, finished = 0, 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.now += 1
        self.time = Event.now

    def query(self) -> bool:
        return self.time <= Event.finished

    def synchronize(self) -> None:
        Event.finished = max(Event.finished, self.time)

    def elapsed_time(self, later: "Event") -> float:
        assert later.query()
        return 1e3 * (later.time - self.time)


@pytest.mark.usefixtures("world_of_one")
def test_on_a_gpu_nothing_is_waited_for_but_in_a_reading_and_what_has_ended_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GRT(GRTConfig(vocab_size=128, hidden_size=32, num_heads=2, max_depth=2, max_positions=8), layer_config(1, torch.float32), 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        compute = ComputeTime(model)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    calls = 3  # of prelude, core and coda
    model(tokens, depth=1)
    assert Event.finished == 0 and len(compute._pending) == calls and compute.seconds == 0
    Event.finished = 10**9
    model(tokens, depth=1)
    assert len(compute._pending) == 1 and compute.seconds == 2 * calls - 1
    Event.finished = 0
    model(tokens, depth=1)
    assert compute.read() == 3 * calls and compute.read() == 0


def named(rows: list[tuple[list[float], list[float]]]) -> tuple[list[dict[str, float]], list[str]]:
    said: list[str] = []
    judge = Judge(["node1", "node1", "node2", "node2"], said.append)
    return [judge.row(*row) for row in rows], said


def test_the_slowest_rank_is_in_each_row_and_named_with_its_host_once_while_it_is_far_from_the_others() -> None:
    slow, usual, even = ([1.0, 1.1, 1.5, 0.9], [0.0] * 4), ([1.0, 1.1, 1.05, 0.9], [0.0] * 4), ([1.0] * 4, [0.0] * 4)
    rows, said = named([slow, usual, *[slow] * (ROWS + 3), even])
    assert rows[0]["slowest_rank"] == 2 and rows[0]["slowest_rank_slowdown"] == 1.5
    assert rows[-1]["slowest_rank_slowdown"] == 1
    assert said == ["WARNING: rank 2 on node2 takes 1.50 times as long for its own work as the median of the ranks"]
    assert len(named([slow] * ROWS + [even] + [slow] * ROWS)[1]) == 2


def test_other_ranks_in_turn_are_not_named() -> None:
    assert named([([2.0, 1.0, 1.0, 1.0], [0.0] * 4), ([1.0, 2.0, 1.0, 1.0], [0.0] * 4)] * ROWS)[1] == []


def test_the_rank_that_waits_longest_for_data_is_named_if_the_others_do_not() -> None:
    rows, said = named([([1.0] * 4, [0.01, 0.0, 0.02, 0.4])] * ROWS)
    assert rows[-1]["longest_data_wait_rank"] == 3 and rows[-1]["longest_data_wait"] == 0.4
    assert said == ["WARNING: rank 3 on node2 waits for data 40% of the time, the median of the ranks 1%"]
    assert named([([1.0] * 4, [0.4, 0.39, 0.4, 0.41])] * ROWS)[1] == []
