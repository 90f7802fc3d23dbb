"""The same run in any layout: initial weights and losses do not depend on how it is spread over ranks."""

import hashlib
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from model.grt import GRT
from model.parallel import ParallelGroups, layer_config
from tests.distributed.runs import MODEL, run_steps, small_run, start
from tests.ranks import run_ranks

STEPS = 20


def layout_results(dataset: Path, variants: list[dict[str, Any]]) -> list[tuple[dict[str, str], list[float]]]:
    """Digests of the initial full weights and the losses of 20 steps, for each variant of the run."""
    results = []
    for variant in variants:
        config = small_run(dataset, **variant)
        engine = start(config)
        results.append((full_weight_digests(engine.module), run_steps(engine, config, STEPS)))
    return results


def full_weight_digests(model: torch.nn.Module) -> dict[str, str]:
    """sha256 of each parameter, merged over data- and tensor-parallel ranks."""
    groups = ParallelGroups()
    digests = {}
    parameters: dict[str, Any] = dict(model.named_parameters())  # with Megatron's attributes
    for name, parameter in parameters.items():
        with deepspeed.zero.GatheredParameters(parameter):
            own = parameter.detach().clone()
        shards: list[Any] = [None] * groups.get_model_parallel_world_size()
        torch.distributed.all_gather_object(shards, own, group=groups.get_model_parallel_group())
        whole = torch.cat(shards, dim=parameter.partition_dim) if getattr(parameter, "tensor_model_parallel", False) else own
        digests[name] = digest(whole)
    return digests


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def unpartitioned_weight_digests() -> dict[str, str]:
    """Those of the model built without DeepSpeed, in a world of one."""
    from model.parallel import initialize_model_parallel

    torch.distributed.init_process_group("gloo")
    initialize_model_parallel(1)
    model = GRT(MODEL, layer_config(1, torch.float32), seed=1234)
    return {name: digest(parameter) for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def one_rank(dataset: Path) -> list[tuple[dict[str, str], list[float]]]:
    variants = [{}, {"micro_batch_size": 1}, {"micro_batch_size": 4}, {"workers": 1}, {"workers": 3}]
    return run_ranks(layout_results, 1, dataset, variants)[0]


def test_micro_batch_and_workers_do_not_change_the_losses(one_rank: list[tuple[dict[str, str], list[float]]]) -> None:
    expected = one_rank[0][1]
    assert expected[-1] < expected[0] - 0.5  # it learns
    for _, losses in one_rank[1:]:
        assert losses == pytest.approx(expected, rel=1e-5)
    assert one_rank[3][1] == expected  # workers change nothing at all
    assert one_rank[4][1] == expected


@pytest.mark.parametrize(("tensor_parallel", "data_parallel"), [(2, 1), (1, 2), (2, 2)])
def test_layout_does_not_change_weights_or_losses(
    tensor_parallel: int, data_parallel: int, dataset: Path, one_rank: list[tuple[dict[str, str], list[float]]]
) -> None:
    ranks = run_ranks(layout_results, tensor_parallel * data_parallel, dataset, [{"tensor_parallel": tensor_parallel}], timeout=240)
    for ((digests, losses),) in ranks:
        assert digests == one_rank[0][0]
        assert losses == pytest.approx(one_rank[0][1], rel=1e-5)


def test_partitioned_construction_gives_the_plain_models_weights(one_rank: list[tuple[dict[str, str], list[float]]]) -> None:
    assert run_ranks(unpartitioned_weight_digests, 1)[0] == one_rank[0][0]


def partition_dtypes(dataset: Path) -> set[str]:
    engine = start(small_run(dataset, precision="fp32"))
    parameters: list[Any] = list(engine.module.parameters())  # with DeepSpeed's attributes
    return {str(parameter.ds_tensor.dtype) for parameter in parameters}


def test_fp32_is_fp32_on_a_cpu_without_half_precision_instructions(dataset: Path) -> None:
    assert run_ranks(partition_dtypes, 1, dataset, env={"ONEDNN_MAX_CPU_ISA": "AVX2"}) == [{"torch.float32"}]
