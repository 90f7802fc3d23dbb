"""DeepSpeed's JSON config: read, "auto" filled in from the run config, contradictions between the two refused."""

import json
from pathlib import Path
from typing import Any

from pretrain.config import RunConfig

# What changes how ZeRO splits the parameters, the numbers in them, or that a step with gradients that are not finite is left out, with the
# values that do not.
OFF_VALUES: dict[str, tuple[Any, ...]] = {
    "bf16.bf16_master_weights_and_grads": (False,),
    "bf16.bf16_optimizer_states": (False,),
    "bf16.check_grad_overflow": (True,),
    "zero_optimization.compute_grad_norm": (True,),
    "zero_optimization.round_robin_gradients": (False,),  # deepspeed 0.19.8 then mistakes which master is whose, at stages 1 and 2
    "zero_optimization.zenflow": (),
    "zero_optimization.mics_shard_size": (-1, 0),
    "zero_optimization.zero_hpz_partition_size": (0, 1),
    "zero_optimization.zero_quantized_weights": (False,),
    "zero_optimization.zero_quantized_gradients": (False,),
    "zero_optimization.zero_quantized_nontrainable_weights": (False,),
    "torch_autocast.enabled": (False,),
}


def load_ds_config(path: Path, config: RunConfig, data_parallel: int) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize`.

    Args:
        path: DeepSpeed's JSON file.
        config: the run.
        data_parallel: number of data-parallel ranks.

    Raises:
        ValueError: not JSON, a value that contradicts the run config, or a feature that a GRT run cannot use; the message names the
            setting, both values and what to do.
        FileNotFoundError: no such file.
    """
    ds_config = read_ds_config(path)
    _refuse_other_residency(ds_config, config, path)
    for key, value in _run_values(config, data_parallel).items():
        _settle(ds_config, key, value, path)
    for key, value in _tuned_values(config).items():
        if _get(ds_config, key) in (None, "auto"):
            _set(ds_config, key, value)
    if _get(ds_config, "zero_optimization.overlap_comm") in (None, "auto"):
        _set(ds_config, "zero_optimization.overlap_comm", False)  # DeepSpeed's own default, True, has had races
    left = list(_autos(ds_config))
    if left:
        raise ValueError(f"{path}: no value can be derived for {', '.join(left)}; give a number instead of 'auto'.")
    return ds_config


def read_ds_config(path: Path) -> dict[str, Any]:
    """As it is in the file, after a check that a GRT run can use it.

    Raises:
        ValueError, FileNotFoundError: as `load_ds_config`.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--ds_config {path} does not exist. configs/ds_zero3.json is one to start from.")
    try:
        ds_config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--ds_config {path} is not valid JSON: {error}") from error
    if not isinstance(ds_config, dict):
        raise ValueError(f"--ds_config {path} holds a JSON {type(ds_config).__name__}; DeepSpeed's config is an object.")
    _refuse_unusable(ds_config, path)
    return ds_config


def _run_values(config: RunConfig, data_parallel: int) -> dict[str, Any]:
    """DeepSpeed settings that the run config decides."""
    return {
        "train_batch_size": config.optim.global_batch_size,
        "train_micro_batch_size_per_gpu": config.parallel.micro_batch_size,
        "gradient_accumulation_steps": config.accumulation_steps(data_parallel),
        "gradient_clipping": config.optim.gradient_clip,
        "fp16.enabled": False,
        "bf16.enabled": config.optim.precision == "bf16",
        "data_types.grad_accum_dtype": "fp32",
    }


def _tuned_values(config: RunConfig) -> dict[str, Any]:
    """ZeRO settings which, missing or "auto", are what this model and its residency need. Stages 1 and 2 heed the last only."""
    model, residency = config.model, config.parallel.core_residency
    room, block = whole_trace(config), model.block_parameter_count
    # What is fetched ahead of a use stays until then: the core, too, from its forward to its backward pass. `loop` fetches nothing ahead.
    ahead = {"loop": 0, "every_use": block}.get(residency, max(block, model.core_parameter_count))
    return {
        "zero_optimization.stage3_prefetch_bucket_size": ahead,
        "zero_optimization.stage3_max_live_parameters": 2 * block if residency == "every_use" else room,
        "zero_optimization.stage3_max_reuse_distance": 0 if residency in ("loop", "every_use") else room,
        # DeepSpeed gathers small parameters one by one after each step; with the core and the blocks they cost no launch of their own.
        "zero_optimization.stage3_param_persistence_threshold": 10 * model.hidden_size if residency == "every_use" else 0,
        "zero_optimization.reduce_bucket_size": max(16 * model.hidden_size**2, 500_000),  # 20 reductions a micro-step of grt-1b
    }


def whole_trace(config: RunConfig) -> int:
    """No fewer elements than the modules of one forward and backward pass hold, each counted at each of its visits.

    A module is visited once forward, once backward, and once more where its block is computed again; the tied embedding also as head.
    """
    return 6 * config.model.parameter_count


def _refuse_unusable(ds_config: dict[str, Any], path: Path) -> None:
    refusals = (
        (
            _get(ds_config, "zero_optimization.stage") not in (1, 2, 3),
            "zero_optimization.stage must be 3, 2 or 1: without ZeRO, DeepSpeed keeps no fp32 weights beside bf16 ones, and takes steps "
            "whose gradients are not finite",
        ),
        (_get(ds_config, "fp16.enabled") is True, "fp16 is not offered: use optim.precision bf16 or fp32"),
        (
            "activation_checkpointing" in ds_config,
            "remove 'activation_checkpointing': DeepSpeed's is reentrant, which loses gradients of a module that runs several times; set "
            "compute.checkpointing",
        ),
        ("bfloat16" in ds_config, "write 'bf16' for 'bfloat16', the name that DeepSpeed has left behind"),
        ("scheduler" in ds_config, "remove 'scheduler': the learning rate comes from the run config's schedule section"),
        ("optimizer" in ds_config, "remove 'optimizer': AdamW comes from the run config's optim section"),
        (
            any(_get(ds_config, f"zero_optimization.{key}.device") not in (None, "none") for key in ("offload_optimizer", "offload_param")),
            "remove offload_optimizer and offload_param: offloading is not offered",
        ),
        *(
            (_get(ds_config, key) not in (None, *off), f"remove {key}: it changes what checkpoints and exact resume rely on")
            for key, off in OFF_VALUES.items()
        ),
    )
    for refused, reason in refusals:
        if refused:
            raise ValueError(f"{path}: {reason}.")


def _refuse_other_residency(ds_config: dict[str, Any], config: RunConfig, path: Path) -> None:
    """Settings with which the core would be gathered more often, or kept longer, than its residency says."""
    for key in ("leaf_module", "stage3_module_granularity_threshold"):
        if _get(ds_config, f"zero_optimization.{key}"):
            raise ValueError(
                f"{path}: remove zero_optimization.{key}: the recurrent core is the only module to be gathered as a whole, and one that "
                "runs several times in a forward pass would be reduced several times."
            )
    residency, room = config.parallel.core_residency, whole_trace(config)
    stage = _get(ds_config, "zero_optimization.stage")
    if stage < 3 and residency not in ("auto", "step"):
        raise ValueError(
            f"{path} says zero_optimization.stage = {stage}, which keeps all weights whole all the time, but parallel.core_residency is "
            f"{residency}: set it to auto, or the stage to 3."
        )
    for name in ("stage3_max_reuse_distance", "stage3_prefetch_bucket_size"):
        given = _get(ds_config, f"zero_optimization.{name}")
        if residency == "loop" and given not in (None, "auto", 0):
            raise ValueError(
                f"{path} says zero_optimization.{name} = {given}, which would keep the core from its forward to its backward pass, but "
                "parallel.core_residency is loop: write auto, or 0."
            )
    given = _get(ds_config, "zero_optimization.stage3_max_reuse_distance")
    if residency == "fwd_bwd" and given not in (None, "auto") and given < room:
        raise ValueError(
            f"{path} says zero_optimization.stage3_max_reuse_distance = {given}, with which the core would be gathered again for the "
            f"backward pass, but parallel.core_residency is fwd_bwd: write auto, or at least {room}."
        )


def _settle(ds_config: dict[str, Any], key: str, value: Any, path: Path) -> None:
    """Fills a missing or "auto" setting; any other value must agree."""
    section, _, name = key.partition(".")
    given = ds_config.get(section)
    if name and given is not None and not isinstance(given, dict):
        raise ValueError(f"{path}: {section} is {given!r}; it must be an object, as in {{{section!r}: {{{name!r}: {value!r}}}}}.")
    given = _get(ds_config, key)
    if given is None or given == "auto":
        _set(ds_config, key, value)
    elif given != value:
        raise ValueError(f"{path} says {key} = {given!r}, but the run config makes it {value!r}. Change one, or write auto in the JSON.")


def _get(tree: dict[str, Any], key: str) -> Any:
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = value


def _autos(tree: dict[str, Any], prefix: str = "") -> Any:
    """Dotted names of the values that are still "auto"."""
    for key, value in tree.items():
        if value == "auto":
            yield prefix + key
        elif isinstance(value, dict):
            yield from _autos(value, f"{prefix}{key}.")
