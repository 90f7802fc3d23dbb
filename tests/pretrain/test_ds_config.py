"""DeepSpeed's JSON: what "auto" becomes, and what is refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from model.config import GRTConfig
from pretrain.config import OptimConfig, ParallelConfig, RunConfig
from pretrain.ds_config import load_ds_config
from pretrain.schedule import ScheduleConfig
from pretrain.sources import DataConfig
from tests.ranks import REPOSITORY

RUN = RunConfig(
    run_dir=Path("unused"),
    model=GRTConfig(vocab_size=512, hidden_size=32, num_heads=2, max_depth=2, max_positions=32),
    data=DataConfig(path="unused", sequence_length=32),
    schedule=ScheduleConfig(total_tokens=1024),
    optim=OptimConfig(global_batch_size=24, gradient_clip=0.5, precision="bf16"),
    parallel=ParallelConfig(micro_batch_size=3),
)
ROOM = 6 * RUN.model.parameter_count
FILLED: dict[str, Any] = {
    "train_batch_size": 24,
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": False,
        "stage3_prefetch_bucket_size": 12 * 32**2 + 2 * 32 + 5 * 32**2 + 5 * 32,  # the core: its block, projection and gate
        "stage3_max_live_parameters": ROOM,
        "stage3_max_reuse_distance": ROOM,
        "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": 500_000,
    },
}


def write(folder: Path, content: Any) -> Path:
    path = folder / "ds.json"
    path.write_text(json.dumps(content))
    return path


def load(folder: Path, content: dict[str, Any], run: RunConfig = RUN) -> dict[str, Any]:
    """The completed config of 2 data-parallel ranks."""
    return load_ds_config(write(folder, {"zero_optimization": {"stage": 3}} | content), run, data_parallel=2)


def test_missing_settings_come_from_the_run_config(tmp_path: Path) -> None:
    assert load(tmp_path, {}) == FILLED


def test_auto_settings_come_from_the_run_config(tmp_path: Path) -> None:
    auto: dict[str, Any] = {name: dict.fromkeys(value, "auto") if isinstance(value, dict) else "auto" for name, value in FILLED.items()}
    assert load(tmp_path, auto | {"zero_optimization": auto["zero_optimization"] | {"stage": 3}}) == FILLED


def test_agreeing_settings_and_settings_of_deepspeeds_own_stay_as_they_are(tmp_path: Path) -> None:
    zero = FILLED["zero_optimization"] | {"reduce_bucket_size": 7, "overlap_comm": True, "offload_param": {"device": "none"}}
    own = {"wall_clock_breakdown": True, "zero_optimization": zero, "torch_autocast": {"enabled": False}}
    assert load(tmp_path, FILLED | own) == FILLED | own


@pytest.mark.parametrize(("residency", "ahead", "reuse"), [("loop", 0, 0), ("every_use", 12 * 32**2 + 2 * 32, 0)])
def test_residencies_that_free_the_core_get_settings_that_do(tmp_path: Path, residency: Any, ahead: int, reuse: int) -> None:
    zero = load(tmp_path, {}, replace(RUN, parallel=replace(RUN.parallel, core_residency=residency)))["zero_optimization"]
    assert (zero["stage3_prefetch_bucket_size"], zero["stage3_max_reuse_distance"]) == (ahead, reuse)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_configs_we_ship_are_complete_and_have_no_auto_left(precision: Literal["fp32", "bf16"]) -> None:
    run = replace(RUN, optim=replace(RUN.optim, precision=precision))
    ds_config = load_ds_config(REPOSITORY / "configs" / "ds_zero3.json", run, data_parallel=2)
    assert ds_config["bf16"]["enabled"] is (precision == "bf16")
    assert '"auto"' not in json.dumps(ds_config)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"train_batch_size": 32}, "train_batch_size = 32, but the run config makes it 24"),
        ({"train_micro_batch_size_per_gpu": 1}, "train_micro_batch_size_per_gpu = 1, but the run config makes it 3"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps = 1, but the run config makes it 4"),
        ({"gradient_clipping": 1.0}, "gradient_clipping = 1.0, but the run config makes it 0.5"),
        ({"bf16": {"enabled": False}}, "bf16.enabled = False, but the run config makes it True"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype = 'bf16', but the run config makes it 'fp32'"),
        ({"bf16": True}, "bf16 is True; it must be an object"),
        ({"bf16": "auto"}, "bf16 is 'auto'; it must be an object"),
        ({"bfloat16": {"enabled": True}}, "write 'bf16' for 'bfloat16'"),
        ({"fp16": {"enabled": True}}, "fp16 is not offered: use optim.precision"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage must be 3, 2 or 1: without ZeRO"),
        ({"zero_optimization": 3}, "zero_optimization.stage must be 3, 2 or 1"),
        ({"zero_optimization": {"stage": 2, "round_robin_gradients": True}}, "remove zero_optimization.round_robin_gradients"),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, "remove bf16.check_grad_overflow"),
        ({"optimizer": {"type": "Adam"}}, "remove 'optimizer'"),
        ({"scheduler": {"type": "WarmupLR"}}, "remove 'scheduler'"),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, "remove offload_optimizer"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "remove offload_optimizer and offload_param"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "remove zero_optimization.mics_shard_size"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "remove zero_optimization.zero_hpz_partition_size"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "remove zero_optimization.zero_quantized_weights"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "remove zero_optimization.zero_quantized_gradients"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}},
            "remove zero_optimization.zero_quantized_nontrainable_weights",
        ),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "remove torch_autocast.enabled"),
        ({"zero_optimization": {"stage": 3, "sub_group_size": "auto"}}, "no value can be derived for zero_optimization.sub_group_size"),
    ],
)
def test_contradictions_and_what_a_run_cannot_use_are_named(tmp_path: Path, content: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError) as refused:
        load(tmp_path, content)
    assert named in str(refused.value)
    assert str(tmp_path / "ds.json") in str(refused.value)


def test_a_batch_that_the_ranks_cannot_share_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="optim.global_batch_size is 24, which is not a multiple of parallel.micro_batch_size 3 times 5"):
        load_ds_config(write(tmp_path, {"zero_optimization": {"stage": 3}}), RUN, data_parallel=5)


def test_a_file_that_is_missing_or_not_a_json_object_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent.json does not exist. configs/ds_zero3.json"):
        load_ds_config(tmp_path / "absent.json", RUN, data_parallel=2)
    with pytest.raises(ValueError, match="ds.json holds a JSON list"):
        load_ds_config(write(tmp_path, []), RUN, data_parallel=2)
    (tmp_path / "ds.json").write_text('{"train_batch_size": 24,}')
    with pytest.raises(ValueError, match=r"ds.json is not valid JSON: .*line 1 column 2[0-9]"):
        load_ds_config(tmp_path / "ds.json", RUN, data_parallel=2)


@pytest.mark.parametrize(
    ("residency", "setting", "words"),
    [
        ("step", {"leaf_module": {"classes": ["Block"]}}, "remove zero_optimization.leaf_module"),
        ("step", {"stage3_module_granularity_threshold": 1000}, "remove zero_optimization.stage3_module_granularity_threshold"),
        ("fwd_bwd", {"stage3_max_reuse_distance": 0}, "core_residency is fwd_bwd: write auto, or at least"),
        ("loop", {"stage3_max_reuse_distance": 10**9}, "core_residency is loop: write auto, or 0"),
        ("loop", {"stage3_prefetch_bucket_size": 10**9}, "core_residency is loop: write auto, or 0"),
    ],
    ids=str,
)
def test_settings_against_the_residency_are_refused_by_name(tmp_path: Path, residency: Any, setting: dict[str, Any], words: str) -> None:
    run = replace(RUN, parallel=replace(RUN.parallel, core_residency=residency))
    with pytest.raises(ValueError, match=words):
        load(tmp_path, {"zero_optimization": {"stage": 3} | setting}, run)


def test_stages_1_and_2_take_the_same_settings_but_no_residency_that_frees_the_core(tmp_path: Path) -> None:
    content = {"zero_optimization": FILLED["zero_optimization"] | {"stage": 2}}
    assert load(tmp_path, {"zero_optimization": dict.fromkeys(FILLED["zero_optimization"], "auto") | {"stage": 2}}) == FILLED | content
    run = replace(RUN, parallel=replace(RUN.parallel, core_residency="loop"))
    with pytest.raises(
        ValueError, match="zero_optimization.stage = 1, which keeps all weights whole .*parallel.core_residency is loop: set it to auto"
    ):
        load(tmp_path, {"zero_optimization": {"stage": 1}}, run)


def test_deepspeeds_reentrant_checkpointing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="DeepSpeed's is reentrant.*compute.checkpointing"):
        load(tmp_path, {"activation_checkpointing": {"partition_activations": True}})
