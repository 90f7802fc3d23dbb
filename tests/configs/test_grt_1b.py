"""The shipped GRT-1B runs are the presets, the recipe and the layout that they claim to be."""

from dataclasses import replace
from pathlib import Path

import pytest

from model.config import PRESETS, ComputeConfig
from pretrain.config import RunConfig, parse_arguments
from pretrain.ds_config import load_ds_config
from tools.planning import Machine, search

CONFIGS = Path(__file__).parents[2] / "configs"
DS_CONFIG = CONFIGS / "ds_zero3.json"


def load(name: str) -> RunConfig:
    return parse_arguments(["--config", str(CONFIGS / f"{name}.yaml"), "--ds_config", str(DS_CONFIG)])[0]


@pytest.mark.parametrize(("name", "preset"), [("grt_1b", "grt-1b"), ("grt_1b_isoflop", "grt-1b-isoflop")])
def test_the_model_is_the_preset_with_gpt2s_vocabulary(name: str, preset: str) -> None:
    config = load(name)
    assert config.model == replace(PRESETS[preset], vocab_size=50257)
    assert config.model.padded_vocab_size == PRESETS[preset].padded_vocab_size


@pytest.mark.parametrize("name", ["grt_1b", "grt_1b_isoflop"])
def test_a_step_is_2_to_the_20_tokens_and_warm_up_2000_steps(name: str) -> None:
    config = load(name)
    assert config.tokens_per_step == 2**20
    assert config.schedule.warmup_tokens == 2000 * 2**20


@pytest.mark.parametrize("name", ["grt_1b", "grt_1b_isoflop"])
def test_32_ranks_share_a_step(name: str) -> None:
    ds_config = load_ds_config(DS_CONFIG, load(name), data_parallel=32)
    assert ds_config["train_batch_size"] == 512
    assert ds_config["train_micro_batch_size_per_gpu"] * ds_config["gradient_accumulation_steps"] * 32 == 512


@pytest.mark.parametrize(
    ("name", "at_64"),
    [
        ("grt_1b", (8, ComputeConfig(checkpointing="recurrence", keep_last=3))),
        ("grt_1b_isoflop", (8, ComputeConfig())),
    ],
)
def test_the_layout_is_what_the_plan_recommends(name: str, at_64: tuple[int, ComputeConfig]) -> None:
    config = load(name)
    for gpus, expected in ((8, (config.parallel.micro_batch_size, config.compute)), (64, at_64)):
        best = search(config, gpus, Machine(), DS_CONFIG)
        assert best is not None
        assert (best.config.parallel.micro_batch_size, best.config.compute) == expected
        assert (best.config.parallel.tensor_parallel, best.config.parallel.core_residency) == (1, "step")
