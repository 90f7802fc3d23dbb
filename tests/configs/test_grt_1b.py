"""The shipped GRT-1B run is the preset and the recipe it claims to be."""

from dataclasses import replace
from pathlib import Path

import pytest

from model.config import PRESETS
from pretrain.config import RunConfig, parse_arguments
from pretrain.ds_config import load_ds_config

CONFIGS = Path(__file__).parents[2] / "configs"
DS_CONFIG = CONFIGS / "ds_zero3.json"


@pytest.fixture
def config() -> RunConfig:
    return parse_arguments(["--config", str(CONFIGS / "grt_1b.yaml"), "--ds_config", str(DS_CONFIG)])[0]


def test_the_model_is_the_preset_with_gpt2s_vocabulary(config: RunConfig) -> None:
    assert config.model == replace(PRESETS["grt-1b"], vocab_size=50257)
    assert config.model.padded_vocab_size == PRESETS["grt-1b"].padded_vocab_size


def test_a_step_is_2_to_the_20_tokens_and_warm_up_2000_steps(config: RunConfig) -> None:
    assert config.tokens_per_step == 2**20
    assert config.schedule.warmup_tokens == 2000 * 2**20


def test_32_ranks_share_a_step(config: RunConfig) -> None:
    ds_config = load_ds_config(DS_CONFIG, config, data_parallel=32)
    assert ds_config["train_batch_size"] == 512
    assert ds_config["train_micro_batch_size_per_gpu"] * ds_config["gradient_accumulation_steps"] * 32 == 512
