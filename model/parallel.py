"""Megatron's process groups and layer settings, and the adapter through which DeepSpeed sees them.

Order matters (measured on deepspeed 0.19.8 and megatron-core 0.16.1): initialise torch.distributed, then Megatron's
groups, then build the model, then `deepspeed.initialize(..., mpu=ParallelGroups())`.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.distributed import ProcessGroup


def initialize_model_parallel(tensor_parallel: int) -> None:
    """Splits the initialised world into tensor-parallel groups of neighbouring ranks, and data-parallel groups across them."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    if not torch.cuda.is_available():
        # Megatron's sequence-parallel primitives allocate on torch.cuda.current_device(), also where there is no CUDA (0.16.1).
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]


def layer_config(tensor_parallel: int, dtype: torch.dtype, sequence_parallel: bool = False) -> ModelParallelConfig:
    """Settings of Megatron's layers.

    Weights are drawn whole on the CPU and sliced, so that they do not depend on the layout. `perform_initialization` stays on:
    megatron-core 0.16.1 marks shards as such only there. Gradient-accumulation fusion needs `main_grad`, which ZeRO-3 has not.
    `deterministic_mode` has the embedding read its rows by an index, whose backward pass torch can sum in a fixed order.
    """
    return ModelParallelConfig(
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=True,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        gradient_accumulation_fusion=False,
    )


def enter_tensor_parallel(x: Tensor, parallel: ModelParallelConfig) -> Tensor:
    """This rank's tokens [S, B, D] -> the tokens of the whole group, as input of column-parallel layers.

    Under sequence parallelism S is this rank's part of the sequence and the result's S the whole; else nothing changes. In the
    backward pass the group's partial gradients are summed (and split again). Once for all the layers that read x, where Megatron's
    own linears would communicate once each.
    """
    if parallel.tensor_model_parallel_size == 1:
        return x
    group = parallel_state.get_tensor_model_parallel_group()
    if parallel.sequence_parallel:
        return gather_from_sequence_parallel_region(x, group=group)
    return copy_to_tensor_model_parallel_region(x, group=group)


def own_tokens(x: Tensor, parallel: ModelParallelConfig) -> Tensor:
    """[S, ...] of the whole sequence -> this rank's part of it under sequence parallelism, else x. No gradient flows back."""
    if not parallel.sequence_parallel:
        return x
    return x.chunk(parallel.tensor_model_parallel_size)[parallel_state.get_tensor_model_parallel_rank()]


def sum_replicated_gradients(model: nn.Module) -> None:
    """Registers the sum over the tensor-parallel group of the gradients of replicated parameters, which under sequence
    parallelism each rank has for its own tokens only. After `deepspeed.initialize`, once."""
    group = parallel_state.get_tensor_model_parallel_group()

    def summed(gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        torch.distributed.all_reduce(gradient, group=group)
        return gradient

    parameters: list[Any] = list(model.parameters())  # with Megatron's attributes
    for parameter in parameters:
        if not getattr(parameter, "tensor_model_parallel", False):
            parameter.register_hook(summed)


class ParallelGroups:
    """This rank's groups under the names that DeepSpeed asks its `mpu` for; Megatron has others for the model-parallel ones.

    It must not define `initialize_sequence_parallel`: DeepSpeed would take it for Ulysses and ignore the tensor-parallel group.
    """

    def get_model_parallel_group(self) -> ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()

    def get_model_parallel_rank(self) -> int:
        return parallel_state.get_tensor_model_parallel_rank()

    def get_model_parallel_world_size(self) -> int:
        return parallel_state.get_tensor_model_parallel_world_size()

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> ProcessGroup:
        return parallel_state.get_data_parallel_group()

    def get_data_parallel_rank(self) -> int:
        return parallel_state.get_data_parallel_rank()

    def get_data_parallel_world_size(self) -> int:
        return parallel_state.get_data_parallel_world_size()
