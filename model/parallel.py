"""Megatron's process groups and layer settings, and the adapter through which DeepSpeed sees them.

Order matters (measured on deepspeed 0.19.8 and megatron-core 0.16.1): initialise torch.distributed, then Megatron's
groups, then build the model, then `deepspeed.initialize(..., mpu=ParallelGroups())`.
"""

import torch
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from torch.distributed import ProcessGroup


def initialize_model_parallel(tensor_parallel: int) -> None:
    """Splits the initialised world into tensor-parallel groups of neighbouring ranks, and data-parallel groups across them."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)


def layer_config(tensor_parallel: int, dtype: torch.dtype) -> ModelParallelConfig:
    """Settings of Megatron's layers.

    Weights are drawn whole on the CPU and sliced, so that they do not depend on the layout. `perform_initialization` stays on:
    megatron-core 0.16.1 marks shards as such only there. Gradient-accumulation fusion needs `main_grad`, which ZeRO-3 has not.
    """
    return ModelParallelConfig(
        tensor_model_parallel_size=tensor_parallel,
        params_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=True,
        gradient_accumulation_fusion=False,
    )


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
