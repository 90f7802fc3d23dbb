"""A small ZeRO engine of Megatron layers, for tests of what surrounds the model.

It has a parameter of each kind (column, row and vocabulary shards, replicated ones), sizes that no data-parallel size divides,
one tensor larger than a file's write buffer, two optimizer groups, small parameters that DeepSpeed keeps gathered, and one more
kept gathered as the trainer keeps the core.
"""

from typing import Any

import deepspeed
import torch
from deepspeed.ops import __compatible_ops__
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from torch import nn

from model.parallel import ParallelGroups, initialize_model_parallel, layer_config

VOCABULARY, WIDTH, HIDDEN, OUTPUTS = 20022, 5, 6, 3
GLOBAL_BATCH = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Toy(nn.Module):
    """Token ids [B, S] to [B, S, OUTPUTS]."""

    def __init__(self, tensor_parallel: int, dtype: torch.dtype) -> None:
        super().__init__()
        config = layer_config(tensor_parallel, dtype)
        shared: dict[str, Any] = {"config": config, "init_method": nn.init.xavier_normal_}
        self.embedding = VocabParallelEmbedding(VOCABULARY, WIDTH, **shared)
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = ColumnParallelLinear(WIDTH, HIDDEN, bias=True, gather_output=False, **shared)
        self.down = RowParallelLinear(HIDDEN, WIDTH, bias=True, input_is_parallel=True, skip_bias_add=False, **shared)
        self.head = nn.Linear(WIDTH, OUTPUTS, dtype=dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.down(torch.tanh(self.up(self.norm(hidden))[0]))[0]
        return self.head(hidden)


def start(tensor_parallel: int) -> None:
    """Joins the process group, or splits it anew for another engine in the same process."""
    __compatible_ops__["deepspeed_shm_comm"] = False
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
    else:
        deepspeed.init_distributed("gloo", verbose=False)
    initialize_model_parallel(tensor_parallel)


def build(tensor_parallel: int, precision: str = "fp32", seed: int = 0, outputs: int = OUTPUTS, stage: int = 3) -> Any:
    """An engine after `start`; its full weights depend on the seed alone."""
    torch.manual_seed(seed)
    model = Toy(tensor_parallel, DTYPES[precision])
    if outputs != OUTPUTS:
        model.head = nn.Linear(WIDTH, outputs, dtype=DTYPES[precision])
    config: dict[str, Any] = {
        "train_batch_size": GLOBAL_BATCH,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 4},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=ParallelGroups())
    if stage == 3:
        for parameter in engine.module.down.parameters():
            if not parameter.ds_persist:
                parameter.ds_persist = True
                engine.optimizer.persistent_parameters.append(parameter)
    return engine


def train(engine: Any, first_step: int, steps: int) -> list[float]:
    """The losses of the global batches of steps `first_step` ...: the same for every layout."""
    losses = []
    for step in range(first_step, first_step + steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH, 7), generator=generator)
        own = tokens.chunk(parallel_state.get_data_parallel_world_size())[parallel_state.get_data_parallel_rank()]
        outputs = engine(own).float()
        targets = torch.sin(own[..., None] * torch.arange(1, outputs.shape[-1] + 1))
        loss = (outputs - targets).square().mean()
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        losses.append(total.item() / parallel_state.get_data_parallel_world_size())
    return losses


def full_state(engine: Any) -> dict[str, torch.Tensor]:
    """`kind/name` to the full tensor, gathered by DeepSpeed's own accessors and merged over the tensor-parallel group."""
    state = {}
    if engine.zero_optimization_stage() < 3:
        # DeepSpeed does it after the step of the first optimizer group, when the others have no moments yet, and not again (0.19.8).
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        for kind, key in (("master", None), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            gathered = safe_get_full_optimizer_state(parameter, key) if key else safe_get_full_fp32_param(parameter)
            shard = gathered.contiguous()
            if getattr(parameter, "tensor_model_parallel", False):
                shards = [torch.empty_like(shard) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
                torch.distributed.all_gather(shards, shard, group=parallel_state.get_tensor_model_parallel_group())
                shard = torch.cat(shards, parameter.partition_dim)
            state[f"{kind}/{name}"] = shard.detach().clone()
    return state
