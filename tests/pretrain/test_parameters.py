"""The planned list of parameters is the model's."""

from typing import Any

import pytest

from model.config import PRESETS, GRTConfig
from pretrain.parameters import count, rank_parameters
from tests.reference import parameter_shapes

SMALL: dict[str, Any] = {"vocab_size": 250, "hidden_size": 32, "num_heads": 4, "core_blocks": 2, "max_depth": 3, "max_positions": 24}
DENSE: dict[str, Any] = {"prelude_blocks": 3, "core_blocks": 0, "coda_blocks": 0, "max_depth": 0, "min_depth": 0}


@pytest.mark.parametrize(
    "change", [{}, {"position": "rope"}, {"mlp": "swiglu"}, {"num_kv_heads": 2}, {"gate_input_norm": False}, DENSE], ids=str
)
def test_names_and_shapes_are_the_models(change: dict[str, Any]) -> None:
    model = GRTConfig(**(SMALL | change))
    assert {p.name: p.shape for p in rank_parameters(model, 1)} == parameter_shapes(model)


def test_the_count_is_the_models_with_its_padded_vocabulary() -> None:
    model = PRESETS["grt-1b"]
    padding = (model.padded_vocab_size - model.vocab_size) * model.hidden_size
    assert count(rank_parameters(model, 1)) == model.parameter_count + padding


def test_a_rank_of_two_has_half_of_each_sharded_parameter_and_all_of_the_others() -> None:
    model = GRTConfig(**SMALL)
    for whole, part in zip(rank_parameters(model, 1), rank_parameters(model, 2), strict=True):
        assert part.numel * (2 if part.sharded else 1) == whole.numel
