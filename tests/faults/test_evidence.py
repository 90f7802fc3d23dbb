"""What is left of a run that cannot go on says where the numbers went wrong, whatever the layout and however it is computed."""

import json
import math
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoint import take_snapshot
from pretrain.evidence import CannotGoOnError, stop_with_evidence
from pretrain.train import train_step
from tests.distributed.runs import small_run, start, stream
from tests.ranks import run_ranks

DEPTH = 3


def evidence(dataset: Path, folder: Path, options: dict[str, Any], broken: str | None) -> dict[str, Any]:
    """Of the first step, of 8 sequences; in a rank. The layer `broken` puts out an infinity."""
    config = small_run(dataset, **options)
    engine = start(config)
    if broken is not None:
        engine.module.get_submodule(broken).register_forward_hook(lambda _, inputs, output: output.index_fill(0, torch.tensor(3), math.inf))
    batches = list(islice(stream(config), engine.gradient_accumulation_steps()))
    state = take_snapshot(engine, {"step": 0}, {}, {}).partitions
    again = partial(train_step, engine, batches, DEPTH, 0.0, torch.device("cpu"), refuses=lambda _: True, measure=False)
    with pytest.raises(CannotGoOnError, match="it is a test, up to step 1: .*step_00000001.json"):
        stop_with_evidence(folder, {"step": 1, "why": "it is a test"}, engine, state, batches, again)
    torch.distributed.barrier()
    found: dict[str, Any] = json.loads((folder / "step_00000001.json").read_text())
    return found


def several(dataset: Path, folder: Path, cases: list[tuple[dict[str, Any], str | None]]) -> list[dict[str, Any]]:
    return [evidence(dataset, folder, *case) for case in cases]


def test_it_is_the_same_for_every_layout_and_way_to_compute(dataset: Path, tmp_path: Path) -> None:
    nested = {"compute": {"checkpointing": "nested", "keep_last": 0}}
    one = run_ranks(several, 1, dataset, tmp_path, [({}, None), (nested, None)])[0]
    two = run_ranks(several, 2, dataset, tmp_path, [({}, None), ({"tensor_parallel": 2}, None)])[0]
    first, others = one[0], [one[1], *two]

    hidden = ["embedding", "prelude.0"]
    for recurrence in range(1, DEPTH + 1):
        in_core = ("core.state", "core.gate_logits", "core.blocks.0", "core.blocks.1")
        hidden += [f"{name}/recurrence_{recurrence}" for name in in_core]
    assert list(first["hidden"]) == [*hidden, "core", "coda.0", "final_norm"]
    assert set(first["gradients"]) == set(first["hidden"])
    assert first["state"]["master/embedding.positions.weight"]["rms"] == pytest.approx(0.02, rel=0.05)
    assert first["state"]["exp_avg/final_norm.weight"] == {"rms": 0, "largest": 0, "not_finite": 0}
    for other in others:
        assert {batch["positions"][0]: batch["loss"] for batch in other["micro_batches"]} == pytest.approx(
            {batch["positions"][0]: batch["loss"] for batch in first["micro_batches"]}, rel=1e-5
        )
        for part in ("hidden", "gradients", "state"):
            assert set(other[part]) == set(first[part])
            for name, row in first[part].items():
                assert other[part][name] == pytest.approx(row, rel=1e-4, abs=1e-9), (part, name)


def test_it_shows_the_layer_and_the_recurrence_in_which_numbers_go_wrong(dataset: Path, tmp_path: Path) -> None:
    (found,) = run_ranks(several, 1, dataset, tmp_path, [({}, "core.blocks.1")])[0]
    bad = [name for name, row in found["hidden"].items() if row["not_finite"]]
    assert bad[0] == "core.blocks.1/recurrence_1" and "coda.0" in bad and "prelude.0" not in bad
    assert found["hidden"][bad[0]]["not_finite"] == 8 * 64  # a token of each of 8 sequences, 64 channels
