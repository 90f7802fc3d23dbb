"""Masters and Adam moments of a ZeRO engine, read and set alike at stages 1, 2 and 3: what depends on where deepspeed 0.19.8 has them.

Not here: files and layouts (checkpoint.py). The one fact to know: stage 3 cuts each parameter over the data-parallel ranks; stages 1 and 2
cut what an optimizer group's parameters make end to end, so that a rank has all of some parameters, a piece of others, and nothing of the
rest. A "part" here is always a rank's share as stage 3 cuts it; at stages 1 and 2 it is made from the pieces of all ranks.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor
from torch.nn.functional import pad


def shard_shape(parameter: Any) -> torch.Size:
    """Of the tensor-parallel shard. At stage 3 the parameter itself may be empty."""
    return getattr(parameter, "ds_shape", parameter.shape)


def part_size(parameter: Any, ranks: int) -> int:
    """Elements of a part, padding included."""
    return math.ceil(shard_shape(parameter).numel() / ranks)


def read_part(engine: DeepSpeedEngine, parameter: Any, kind: str) -> Tensor:
    """This rank's part, fp32 [part_size], not to be changed. Called by every rank: below stage 3 it is reduce-scattered."""
    if is_partitioned(engine):
        return engine.optimizer.get_local_fp32_param(parameter, _state_key(kind)).detach()
    group, ranks = _data_parallel(engine)
    piece, start = _piece(engine, parameter, kind)
    part = piece.new_empty(part_size(parameter, ranks))
    whole = piece.new_zeros(len(part) * ranks)
    whole[start : start + len(piece)] = piece
    # Each element is one rank's, and 0 elsewhere. Summed as integers, for -0.0 + 0.0 is 0.0.
    dist.reduce_scatter_tensor(part.view(torch.int32), whole.view(torch.int32), group=group)
    return part


def set_part(engine: DeepSpeedEngine, parameter: Any, kind: str, part: Tensor) -> None:
    """Puts this rank's part, fp32 [n] without its padding, where it belongs. Called by every rank: below stage 3 it is all-gathered.

    `begin_setting` comes before the first part, `end_setting` after the last. DeepSpeed's safe_set_full_* functions will not do: they leave
    the low-precision weights stale until the next step, and read past the end where the data-parallel size does not divide a parameter.
    """
    group, ranks = _data_parallel(engine)
    part = pad(part, (0, part_size(parameter, ranks) - len(part)))
    if is_partitioned(engine):
        engine.optimizer.set_local_hp_param(part, parameter, _state_key(kind))
        return
    piece, start = _piece(engine, parameter, kind)
    whole = piece.new_empty(len(part) * ranks)
    dist.all_gather_into_tensor(whole, part.to(piece.device), group=group)
    piece.copy_(whole[start : start + len(piece)])


def begin_setting(engine: DeepSpeedEngine) -> None:
    if is_partitioned(engine):
        engine.optimizer.checkpoint_event_prologue()  # lets go of gathered weights: they hold the old values


def end_setting(engine: DeepSpeedEngine) -> None:
    """Makes the low-precision weights from the masters, as after a step."""
    optimizer = engine.optimizer
    if not is_partitioned(engine):
        optimizer.update_lp_params()
        return
    for sub_group in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(sub_group)
    optimizer.checkpoint_event_epilogue()  # gathers again what is kept resident


def own_master(engine: DeepSpeedEngine, parameter: Any) -> Tensor:
    """What this rank has of a parameter's fp32 master, flat; may be empty below stage 3. Not to be changed."""
    return read_part(engine, parameter, "master") if is_partitioned(engine) else _piece(engine, parameter, "master")[0]


def adam_states(engine: DeepSpeedEngine) -> list[dict[str, Tensor]]:
    """Adam's state of each flat partition; made as Adam would make it where there has been no step yet."""
    optimizer = engine.optimizer.optimizer
    on_device = optimizer.defaults["fused"] or optimizer.defaults["capturable"]
    states = []
    for flat in _flat_masters(engine):
        state = optimizer.state[flat]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device if on_device else "cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(flat), torch.zeros_like(flat)
        states.append(state)
    return states


def refuse_step(engine: DeepSpeedEngine) -> None:
    """Has DeepSpeed leave out the step that comes next, as it does when gradients are not finite. After the step's last backward pass, by
    every rank."""
    optimizer = engine.optimizer
    if is_partitioned(engine):
        gradients = optimizer.grad_partitions_flat_buffer[:1]
    elif isinstance(optimizer, BF16_Optimizer):
        gradients = optimizer.fp32_groups_gradients_flat[0][:1]
    else:
        gradients = optimizer.averaged_gradients[0][0]
    gradients.fill_(float("inf"))


def is_partitioned(engine: DeepSpeedEngine) -> bool:
    """Whether the weights are partitioned too, as at stage 3, or masters, moments (and gradients) only."""
    return engine.zero_optimization_stage() == 3


def _flat_masters(engine: DeepSpeedEngine) -> list[Tensor]:
    """What Adam updates on this rank: fp32, flat, padded at the end."""
    if is_partitioned(engine):
        return engine.optimizer.fp32_partitioned_groups_flat
    return [group["params"][0] for group in engine.optimizer.optimizer.param_groups]


def _piece(engine: DeepSpeedEngine, parameter: Any, kind: str) -> tuple[Tensor, int]:
    """What this rank has of a parameter below stage 3, a view of fp32 [n], and where in the parameter it begins.

    Not DeepSpeed's `get_hp_fragment`: of several optimizer groups it finds the moments of the first only, whose step comes first.
    """
    fragment = parameter._hp_mapping
    if fragment is None:
        return torch.empty(0, device=parameter.device), 0
    flat = _flat_masters(engine)[fragment.param_group_index]
    values = flat if kind == "master" else engine.optimizer.optimizer.state[flat][kind]
    address = fragment.hp_fragment_address
    return values.detach().narrow(0, address.start, address.numel), fragment.lp_fragment_address.start


def _data_parallel(engine: DeepSpeedEngine) -> tuple[dist.ProcessGroup, int]:
    group = engine.mpu.get_data_parallel_group()
    return group, dist.get_world_size(group)


def _state_key(kind: str) -> str | None:
    """What DeepSpeed calls it in the optimizer's state; the master is no part of that."""
    return None if kind == "master" else kind
