"""A small run inside a rank started by `tests.ranks`: the trainer's own parts, without its loop."""

import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from megatron.core import parallel_state

from model.config import ComputeConfig, GRTConfig
from model.depth import sample_depth
from model.parallel import ParallelGroups, initialize_model_parallel
from pretrain.config import CheckpointConfig, OptimConfig, ParallelConfig, RunConfig
from pretrain.data import Batch, train_batches
from pretrain.ds_config import load_ds_config
from pretrain.engine import average_over_ranks, build_engine, initialize_distributed
from pretrain.schedule import ScheduleConfig, learning_rate
from pretrain.sources import DataConfig, configured_phases, open_sources
from pretrain.topology import Topology
from pretrain.train import train_step
from tests.ranks import REPOSITORY

MODEL = GRTConfig(vocab_size=512, hidden_size=64, num_heads=4, core_blocks=2, max_depth=4, max_positions=32)


def small_run(
    dataset: Path,
    *,
    workers: int = 0,
    precision: Any = "fp32",
    model: GRTConfig = MODEL,
    compute: dict[str, Any] | None = None,
    **parallel: Any,
) -> RunConfig:
    """A run of steps of 8 sequences of 32 tokens at random depth, learning rate 1e-3, with fields of ComputeConfig and ParallelConfig."""
    return RunConfig(
        run_dir=Path("unused"),
        model=model,
        data=DataConfig(32, str(dataset), workers=workers, window_shards=4),
        schedule=ScheduleConfig(total_tokens=20 * 8 * 32, learning_rate=1e-3, min_learning_rate=1e-4, warmup_tokens=4 * 8 * 32),
        optim=OptimConfig(global_batch_size=8, precision=precision),
        parallel=ParallelConfig(**{"micro_batch_size": 2, "core_residency": "step", **parallel}),
        compute=ComputeConfig(**(compute or {})),
        checkpoint=CheckpointConfig(),
    )


def start(config: RunConfig, stage: int = 3) -> DeepSpeedEngine:
    """Joins the groups, split anew for another tensor-parallel size, and builds the engine."""
    topology = Topology.from_environment(os.environ)
    if not torch.distributed.is_initialized():
        initialize_distributed(topology, config.parallel.tensor_parallel)
        initialize_model_parallel(config.parallel.tensor_parallel)
    elif ParallelGroups().get_model_parallel_world_size() != config.parallel.tensor_parallel:
        parallel_state.destroy_model_parallel()
        initialize_model_parallel(config.parallel.tensor_parallel)
    ds_config = load_ds_config(REPOSITORY / "configs" / "ds_zero3.json", config, config.data_parallel_size(topology.world_size))
    ds_config["zero_optimization"]["stage"] = stage
    return build_engine(config, ds_config)


def stream(config: RunConfig, position: int = 0) -> Iterator[Batch]:
    """This rank's micro-batches from `position` on."""
    groups = ParallelGroups()
    sources = open_sources(config.data)
    return train_batches(
        config.data,
        sources,
        configured_phases(config.data, sources),
        seed=config.seed,
        position=position,
        batch_size=config.batch_size,
        micro_batch_size=config.parallel.micro_batch_size,
        data_parallel_rank=groups.get_data_parallel_rank(),
        data_parallel_size=groups.get_data_parallel_world_size(),
    )


def run_steps(
    engine: DeepSpeedEngine,
    config: RunConfig,
    steps: int,
    first_step: int = 0,
    refuses: Callable[[torch.Tensor], bool] | None = None,
) -> list[float]:
    """Losses over the global batch of so many steps after `first_step` others."""
    batches = stream(config, first_step * config.optim.global_batch_size)
    losses = []
    for step in range(first_step, first_step + steps):
        micro_batches = list(islice(batches, engine.gradient_accumulation_steps()))
        rate = learning_rate(config.schedule, (step + 1) * config.tokens_per_step)
        depth = sample_depth(config.model, config.seed, step)
        loss, _ = train_step(engine, micro_batches, depth, rate, torch.device("cpu"), refuses=refuses, measure=False)
        losses.append(float(average_over_ranks(loss)))
    return losses
