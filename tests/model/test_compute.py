"""However the arithmetic is run (hoisted, checkpointed, compiled), the gradients are the reference's; and what each way keeps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks.allocations import allocations
from model.config import ComputeConfig
from model.grt import GRT
from model.parallel import layer_config
from tests.model.test_grt import OPTIONS, SEED, SMALL, check_against_reference, tokens

WAYS: list[dict[str, Any]] = [
    {"hoist": False},
    {"checkpointing": "recurrence"},
    {"checkpointing": "recurrence", "keep_last": 1, "hoist": False},
    {"checkpointing": "block"},
    {"checkpointing": "nested"},
    {"checkpointing": "nested", "keep_last": 2},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2], OPTIONS[4]], ids=str)
def test_every_way_of_computing_gives_the_references_gradients(options: dict[str, Any], way: dict[str, Any]) -> None:
    for depth in (0, 3):
        check_against_reference(replace(SMALL, **options), ComputeConfig(gate_ops="ref", **way), depth)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_fused_operators_in_every_way_of_computing(fused_operators: None, way: dict[str, Any]) -> None:
    check_against_reference(SMALL, ComputeConfig(gate_ops="fused", **way), 3, noisy=False)
    check_against_reference(SMALL, ComputeConfig(gate_ops="fused", **way), 3, tolerance=1e-6)


@pytest.mark.parametrize("checkpointing", ["none", "nested"])
def test_truncated_back_propagation_ends_before_the_last_recurrences(checkpointing: Any) -> None:
    for depth in (1, 2, 3, 5):
        check_against_reference(replace(SMALL, backprop_depth=2), ComputeConfig(checkpointing=checkpointing, gate_ops="ref"), depth)


@pytest.mark.parametrize(("checkpointing", "gate_ops"), [("none", "ref"), ("none", "fused"), ("nested", "fused")])
def test_one_graph_serves_every_depth(fused_operators: None, checkpointing: Any, gate_ops: Any) -> None:
    """A whole graph (a break would raise), compiled for training once and for evaluation once, and right."""
    torch._dynamo.reset()
    counters.clear()
    compute = ComputeConfig(checkpointing=checkpointing, compile="recurrence", gate_ops=gate_ops)
    compiled, plain = (GRT(SMALL, layer_config(1, torch.float32), SEED, way) for way in (compute, replace(compute, compile="none")))
    tokens_BS = tokens()
    for depth in (2, 1, 3, 0, 5, 2):
        losses = []
        for model in (compiled, plain):
            loss, _ = model(tokens_BS, tokens_BS, depth=depth, sequences_B=torch.tensor([0, 1]))
            loss.backward()
            losses.append(float(loss.detach()))
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert counters["stats"]["unique_graphs"] == 1
    with torch.no_grad():
        for depth in (2, 1, 6):
            compiled(tokens_BS, tokens_BS, depth=depth)
    assert counters["stats"]["unique_graphs"] == 2


def test_compiled_recurrences_take_any_number_of_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """With offsets of documents instead of a mask, as on a GPU: each length of them is a graph, of which dynamo must allow that many."""
    torch._dynamo.reset()
    eager = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: eager(function, **options, backend="eager"))
    monkeypatch.setattr("model.grt.attention_documents", lambda cu_seqlens, *_: cu_seqlens)
    monkeypatch.setattr("model.layers.causal_attention", lambda q, k, v, documents: v + 0 * documents.sum())  # whose kernel is a GPU's
    compute = ComputeConfig(compile="recurrence", gate_ops="ref")
    model = GRT(SMALL, layer_config(1, torch.float32), SEED, compute)
    tokens_BS = tokens()
    for length in (2**power for power in range(2, 8)):
        cu_seqlens = torch.full((length,), tokens_BS.numel(), dtype=torch.int32)
        cu_seqlens[:2] = torch.tensor([0, tokens_BS.shape[1]])
        model(tokens_BS, tokens_BS, depth=1, sequences_B=torch.tensor([0, 1]), cu_seqlens=cu_seqlens)[0].backward()
        with torch.no_grad():
            model(tokens_BS, tokens_BS, depth=1, cu_seqlens=cu_seqlens)


def kept(model: GRT, depth: int) -> int:
    """Bytes that a forward pass leaves allocated for the backward pass."""
    tokens_BS = torch.zeros(4, 16, dtype=torch.int64)
    return allocations(lambda: model(tokens_BS, tokens_BS, depth=depth, sequences_B=torch.arange(4)))[1]


@pytest.mark.parametrize("checkpointing", ["recurrence", "nested"])
def test_a_checkpointed_recurrence_keeps_its_state_and_nothing_else(checkpointing: Any) -> None:
    """2 d bytes a token in bf16, and less than 64 bytes whatever the number of tokens."""
    model = GRT(replace(SMALL, hidden_size=64), layer_config(1, torch.bfloat16), SEED, ComputeConfig(checkpointing=checkpointing))
    by_depth = [kept(model, depth) for depth in (1, 2, 3, 8)]
    state = 2 * 64 * 4 * 16
    for recurrences, growth in ((1, by_depth[1] - by_depth[0]), (1, by_depth[2] - by_depth[1]), (5, by_depth[3] - by_depth[2])):
        assert recurrences * state <= growth < recurrences * (state + 64)


def test_the_last_recurrences_are_kept_whole_when_asked_for() -> None:
    def held(depth: int, **way: Any) -> int:
        return kept(GRT(SMALL, layer_config(1, torch.float32), SEED, ComputeConfig(**way)), depth)

    whole = held(4) - held(3)
    state = 4 * SMALL.hidden_size * 4 * 16
    assert whole > 10 * state
    none_kept = held(4, checkpointing="recurrence")
    two_kept = held(4, checkpointing="recurrence", keep_last=2)
    assert two_kept - none_kept == pytest.approx(2 * (whole - state), abs=state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": -1}, "keep_last is -1"),
        ({"keep_last": 1}, "needs compute.checkpointing recurrence or nested; it is none"),
        ({"activation_budget_gib": 1.0, "checkpointing": "block"}, "needs compute.checkpointing recurrence or nested; it is block"),
        ({"activation_budget_gib": 0.0, "checkpointing": "nested"}, "must be above 0"),
        ({"activation_budget_gib": 1.0, "keep_last": 1, "checkpointing": "nested"}, "set one of them"),
    ],
    ids=str,
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ComputeConfig(**options)
