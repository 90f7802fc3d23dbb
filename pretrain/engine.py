"""The DeepSpeed engine of a run: process groups, model under ZeRO, AdamW.

One fact to know: at stage 3 the recurrent core is a leaf, gathered as a whole, so that its communication does not depend on the
depth. How long it then stays gathered is `parallel.core_residency`.
"""

import os
from typing import Any

import deepspeed
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.ops import __compatible_ops__
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn

from model.core import RecurrentCore
from model.grt import GRT, PositionEmbedding
from model.layers import Block
from model.parallel import ParallelGroups, layer_config, sum_replicated_gradients
from pretrain.config import RunConfig
from pretrain.topology import Topology
from pretrain.zero_state import is_partitioned, shard_shape


def initialize_distributed(topology: Topology, tensor_parallel: int) -> torch.device:
    """Joins the process group; the device of this rank."""
    topology.export()
    cuda = torch.cuda.is_available()
    if tensor_parallel > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # keeps its communication in order with the kernels
    if cuda:
        torch.cuda.set_device(topology.local_rank)
    # DeepSpeed would compile this shared-memory op at start: minutes on a fresh machine, and of no use in training.
    __compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", verbose=False)
    return torch.device("cuda", topology.local_rank) if cuda else torch.device("cpu")


def build_engine(config: RunConfig, ds_config: dict[str, Any]) -> DeepSpeedEngine:
    """The model, at ZeRO stage 3 partitioned as it is built, and its optimizer."""
    dtype = torch.bfloat16 if config.optim.precision == "bf16" else torch.float32
    groups = ParallelGroups()
    parallel = config.parallel
    partitioned = ds_config["zero_optimization"]["stage"] == 3
    # Without its dtype argument: deepspeed 0.19.8 then takes bf16 on a CPU without fp16 instructions, whatever was passed.
    with deepspeed.zero.Init(
        data_parallel_group=groups.get_data_parallel_group(), config_dict_or_path=ds_config, mpu=groups, enabled=partitioned
    ):
        layers = layer_config(parallel.tensor_parallel, dtype, parallel.splits_sequence)
        model = GRT(config.model, layers, config.seed, config.compute)
    if partitioned and parallel.core_residency != "every_use":
        # The blocks of prelude and coda too: one gather each, and no hooks in what a checkpoint computes again, where they would free
        # weights that the backward pass is about to use. Those of the core lie inside a leaf already.
        set_z3_leaf_modules(model, [Block] if model.core is None else [Block, RecurrentCore])
    optimizer = torch.optim.AdamW(
        parameter_groups(model, config.optim.weight_decay),
        lr=config.schedule.learning_rate,
        betas=(config.optim.beta1, config.optim.beta2),
        eps=config.optim.eps,
        fused=True,
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config, mpu=groups)
    if parallel.splits_sequence:
        sum_replicated_gradients(model)
    if partitioned and model.core is not None and parallel.core_residency == "step":
        kept: list[Any] = [*model.core.parameters(), model.embedding.tokens.weight]  # with DeepSpeed's attributes
        for parameter in kept:
            # Gathered at its first use and not freed before the optimizer step. Not in `optimizer.persistent_parameters`, too: DeepSpeed
            # gathers those right after the step, one by one, where the first use gathers the core at once.
            parameter.ds_persist = True
    return engine


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices and the token embedding decay; norms, biases and learned positions do not."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            shape = shard_shape(parameter)  # under zero.Init every parameter has one dimension
            (decayed if len(shape) == 2 and not isinstance(module, PositionEmbedding) else others).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def release_after_evaluation(engine: DeepSpeedEngine) -> None:
    """Frees the parameters that forward passes without a backward leave gathered; those that DeepSpeed keeps are gathered again."""
    if not is_partitioned(engine):
        return
    engine.empty_partition_cache()
    resident = engine.optimizer.persistent_parameters
    if resident:
        resident[0].all_gather(resident)


def average_over_ranks(values: Tensor) -> Tensor:
    """Over data-parallel ranks, and those that share a sequence; tensor-parallel ranks that do not have equal values."""
    torch.distributed.all_reduce(values)
    return values / torch.distributed.get_world_size()
