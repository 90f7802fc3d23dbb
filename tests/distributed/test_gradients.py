"""Gradients of single parameters in a layout: equal to plain autograd's, and the replicated parameters that follow them equal."""

import hashlib
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor

from model.config import ComputeConfig, GRTConfig
from model.grt import GRT
from model.parallel import ParallelGroups, layer_config
from pretrain.train import train_step
from tests.distributed.runs import small_run, start
from tests.distributed.test_equality import GLOBAL_BATCH, batches
from tests.ranks import run_ranks
from tests.reference import parameter_shapes

SEED = 1234
LEARNED = GRTConfig(vocab_size=120, hidden_size=32, num_heads=4, core_blocks=2, max_depth=3, max_positions=32)
ROTARY = replace(LEARNED, num_kv_heads=2, position="rope", norm="rmsnorm", mlp="swiglu", gate_noise_per="element")
MODELS = {"learned": LEARNED, "rotary": ROTARY}
LAYOUTS = {"tp2-dp2-sp": (2, 2), "tp1-dp2": (1, 2)}  # tensor, data parallel
WAYS: dict[str, dict[str, Any]] = {"plain": {"hoist": False}, "hoisted-recurrence": {"hoist": True, "checkpointing": "recurrence"}}
DEPTHS = [(3, None), (3, 2), (1, 2)]  # depth, and how many recurrences gradients go through


PRECISIONS = ("fp32", "bf16")
SPLIT = ("tokens", ".q.", ".k.", ".v.", ".out.", ".up.", ".down.", "mlp.gate.")  # names of parameters that have these are shards


class Case(NamedTuple):
    model: str
    way: str
    depth: int
    backprop_depth: int | None


CASES = [Case(model, way, *depths) for model in MODELS for way in WAYS for depths in DEPTHS]


def accumulated_gradients(tensor_parallel: int, data_parallel: int, cases: list[Case]) -> list[dict[str, Tensor]]:
    """Gradients of two micro-steps under ZeRO-3 for each case, merged over all ranks, by name."""
    results = []
    for case in cases:
        config = small_run(
            Path("unused"),
            model=replace(MODELS[case.model], backprop_depth=case.backprop_depth),
            compute=WAYS[case.way],
            tensor_parallel=tensor_parallel,
            micro_batch_size=GLOBAL_BATCH // data_parallel // 2,
        )
        engine = start(config)
        own = batches(config.parallel.micro_batch_size, ParallelGroups().get_data_parallel_rank(), data_parallel)
        for last in (False, True):
            batch = next(own)
            loss, _ = engine(batch.tokens, batch.targets, depth=case.depth, sequences_B=batch.sequence)
            engine.backward(loss)
            if not last:
                engine.step()
        results.append({name: merged(parameter, safe_get_full_grad(parameter)) for name, parameter in engine.module.named_parameters()})
        engine.destroy()
    return results


def merged(parameter: Any, own: Tensor) -> Tensor:
    """`own`, which belongs to the parameter, over the tensor-parallel ranks."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return own
    groups = ParallelGroups()
    shards: list[Any] = [None] * groups.get_model_parallel_world_size()
    torch.distributed.all_gather_object(shards, own, group=groups.get_model_parallel_group())
    return torch.cat(shards, dim=parameter.partition_dim)


def plain_gradients(case: Case) -> dict[str, Tensor]:
    """By autograd over the whole batch, nothing hoisted or checkpointed."""
    config = replace(MODELS[case.model], backprop_depth=case.backprop_depth)
    model = GRT(config, layer_config(1, torch.float32), SEED, ComputeConfig(hoist=False))
    batch = next(batches(GLOBAL_BATCH, 0, 1))
    loss, _ = model(batch.tokens, batch.targets, depth=case.depth, sequences_B=batch.sequence)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_of_every_parameter_are_autograds(layout: tuple[int, int], world_of_one: None) -> None:
    tensor_parallel, data_parallel = layout
    ranks = run_ranks(accumulated_gradients, tensor_parallel * data_parallel, tensor_parallel, data_parallel, CASES, timeout=300)
    worst = 0.0
    for rank in ranks:
        for case, found in zip(CASES, rank, strict=True):
            expected = plain_gradients(case)
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():
                error = float((found[name] - gradient).norm() / gradient.norm())
                worst = max(worst, error)
                assert error < 1e-5, (case, name)
    print(f"largest relative error of a parameter's gradient: {worst:.1e}")


class Copy(NamedTuple):
    """What a rank holds of a parameter, data-parallel shards put together."""

    partition_dim: int | None  # None: replicated over the tensor-parallel ranks
    shape: tuple[int, ...]
    digests: tuple[str, str]  # of the weight in the model and of its fp32 original in the optimizer


def copies_after_training(precision: str) -> dict[str, Copy]:
    """After 5 steps of two tensor-parallel ranks with sequence parallelism."""
    config = small_run(Path("unused"), precision=precision, model=LEARNED, tensor_parallel=2, sequence_parallel=True)
    engine = start(config)
    groups = ParallelGroups()
    own = batches(config.parallel.micro_batch_size, groups.get_data_parallel_rank(), groups.get_data_parallel_world_size())
    for step in range(5):
        train_step(
            engine,
            list(islice(own, engine.gradient_accumulation_steps())),
            1 + step % LEARNED.max_depth,
            1e-3,
            torch.device("cpu"),
            measure=False,
        )
    copies = {}
    parameters: dict[str, Any] = dict(engine.module.named_parameters())  # with Megatron's attributes
    for name, parameter in parameters.items():
        split = getattr(parameter, "tensor_model_parallel", False)
        with deepspeed.zero.GatheredParameters(parameter):
            weight = parameter.detach().float().clone()
        digests = digest(weight), digest(safe_get_full_fp32_param(parameter))
        copies[name] = Copy(parameter.partition_dim if split else None, tuple(weight.shape), digests)
    engine.destroy()
    return copies


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def copies_by_precision() -> dict[str, dict[str, Copy]]:
    return {precision: copies_after_training(precision) for precision in PRECISIONS}


def test_replicated_parameters_stay_bitwise_equal_and_all_others_are_shards() -> None:
    """The split dimension is where the shape is half of the whole; ranks 0 and 1, and 2 and 3, are tensor-parallel."""
    ranks = run_ranks(copies_by_precision, 4)
    for precision, (name, whole) in product(PRECISIONS, parameter_shapes(LEARNED).items()):
        copies = [rank[precision].pop(name) for rank in ranks]
        dimension = copies[0].partition_dim
        assert (dimension is None) == (not any(part in name for part in SPLIT)), name
        if dimension is None:
            assert copies == [copies[0]] * 4, name
            assert copies[0].shape == whole
        else:
            assert copies[0] == copies[2] != copies[1] == copies[3], name
            for copy in copies:
                assert copy.partition_dim == dimension
                assert copy.shape == tuple(size // (1 + (i == dimension)) for i, size in enumerate(whole))
    assert not any(rest for rank in ranks for rest in rank.values())
