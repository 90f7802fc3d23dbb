"""Sizes: the published parameter counts, FLOPs, and refusal of bad fields."""

from dataclasses import replace

import pytest
import torch

from model.config import PRESETS, GRTConfig
from model.grt import GRT
from model.parallel import layer_config
from tests.ranks import run_ranks

PUBLISHED = {
    "small-isoflop": 63_611_904,
    "medium-isoflop": 171_073_536,
    "large-isoflop": 290_196_480,
    "small-isoparam": 127_326_720,
    "medium-isoparam": 359_847_936,
    "large-isoparam": 781_780_480,
    "dense-small": 124_373_760,
    "dense-medium": 354_599_936,
    "dense-large": 773_582_080,
    "grt-1b": 1_332_064_256,
    "grt-1b-isoflop": 577_028_096,
}
OPTIONS = [
    {},
    {"position": "rope"},
    {"norm": "rmsnorm", "mlp": "swiglu"},
    {"num_kv_heads": 2},
    {"gate_input_norm": False},
    {"ffn_hidden_size": 96},
    {"core_blocks": 0, "max_depth": 0, "min_depth": 0},
]


def build_on_meta(config: GRTConfig, tensor_parallel: int = 1) -> GRT:
    with torch.device("meta"):
        return GRT(config, layer_config(tensor_parallel, torch.bfloat16), seed=0)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_the_published_number_of_parameters(name: str) -> None:
    config = PRESETS[name]
    assert sum(parameter.numel() for parameter in build_on_meta(config).parameters()) == PUBLISHED[name]
    assert config.parameter_count == PUBLISHED[name]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_formula_counts_every_option(options: dict[str, object]) -> None:
    config = replace(GRTConfig(vocab_size=256, hidden_size=64, num_heads=4, max_positions=32), **options)  # type: ignore[arg-type]  # one dict for fields of several types
    assert config.parameter_count == sum(parameter.numel() for parameter in build_on_meta(config).parameters())


def shard_counts(names: list[str]) -> dict[str, tuple[int, int]]:
    """By preset: parameters of this rank that are shards, and that are replicated."""
    torch.distributed.init_process_group("gloo")
    from model.parallel import initialize_model_parallel

    initialize_model_parallel(2)
    counts = {}
    for name in names:
        parameters = list(build_on_meta(PRESETS[name], 2).parameters())
        sharded = sum(p.numel() for p in parameters if getattr(p, "tensor_model_parallel", False))
        counts[name] = (sharded, sum(p.numel() for p in parameters) - sharded)
    return counts


def test_shards_of_two_ranks_add_up_to_the_published_number() -> None:
    first, second = run_ranks(shard_counts, 2, list(PRESETS))
    for name in PRESETS:
        assert first[name][1] == second[name][1]
        assert first[name][0] + second[name][0] + first[name][1] == PUBLISHED[name]


def test_flops_are_those_of_the_formula() -> None:
    config = PRESETS["grt-1b"]
    d, length = 2048, 2048
    for depth in (0, 1, 4):
        blocks = 4 + 20 * depth
        expected = blocks * (24 * d * d + 4 * length * d) + depth * 10 * d * d + 2 * 50304 * d
        assert config.forward_flops_per_token(length, depth) == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_heads": 7}, "num_heads"),
        ({"num_kv_heads": 5}, "num_kv_heads"),
        ({"max_depth": 0}, "max_depth"),
        ({"max_depth": 4096}, "max_depth"),
        ({"max_depth": 1024, "depth_sampler": "poisson"}, "max_depth"),
        ({"min_depth": 11}, "min_depth"),
        ({"core_blocks": 0}, "max_depth"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"prelude_blocks": -1}, "prelude_blocks"),
        ({"norm": "batchnorm"}, "norm"),
        ({"gate_temperature": 0.0}, "gate_temperature"),
        ({"state_noise": -0.1}, "state_noise"),
    ],
)
def test_bad_field_is_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=rf"model\.{named} is .* must be"):
        replace(GRTConfig(), **change)  # type: ignore[arg-type]  # one dict for fields of several types


def test_tensor_parallel_size_that_does_not_divide_is_named() -> None:
    with pytest.raises(ValueError, match="num_heads"):
        GRTConfig().validate_tensor_parallel(5)
