"""The same run in any layout: initial weights, losses and communication do not depend on how it is spread over ranks."""

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.profiler import ProfilerActivity, profile

from model.grt import GRT
from model.parallel import ParallelGroups, layer_config
from pretrain.data import Batch
from pretrain.validation import validation_losses
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


def count_collectives(engine: DeepSpeedEngine, depth: int) -> tuple[Counter[str], Counter[str]]:
    """Calls and elements of the data-parallel collectives of one optimizer step, as PyTorch's dispatcher saw them."""
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        for _ in range(engine.gradient_accumulation_steps()):
            loss, _ = engine(tokens, tokens, depth=depth, sequences_B=torch.tensor([0, 1]))
            engine.backward(loss)
            engine.step()
    calls: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for event in recorded.events():
        if event.name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allgather_", "c10d::reduce_scatter_"):
            calls[event.name] += 1
            elements[event.name] += torch.Size(event.input_shapes[0]).numel()
    return calls, elements


def gathered(engine: DeepSpeedEngine) -> list[str]:
    """Names of the parameters that lie whole on this rank."""
    parameters: dict[str, Any] = dict(engine.module.named_parameters())  # with DeepSpeed's attributes
    return [name for name, parameter in parameters.items() if parameter.ds_status == ZeroParamStatus.AVAILABLE]


def collectives_by_depth(dataset: Path, tensor_parallel: int, depths: list[int]) -> dict[str, Any]:
    """What each step communicates, with an evaluation before the last one, and what stays gathered after each of these."""
    config = small_run(dataset, tensor_parallel=tensor_parallel)
    engine = start(config)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    steps = [count_collectives(engine, depth) for depth in depths]
    after_step = gathered(engine)
    batch = Batch(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool), torch.tensor([0, 1]))
    validation_losses(engine, [batch, batch], [0, 1, 3, 8], torch.device("cpu"))
    after_evaluation = gathered(engine)
    return {
        "steps": steps,
        "step_after_evaluation": count_collectives(engine, 2),
        "gathered": (after_step, after_evaluation),
        "parameters": [name for name, _ in engine.module.named_parameters()],
    }


@pytest.fixture(scope="module", params=[(1, 2), (2, 4)], ids=["tp1-dp2", "tp2-dp2"])
def communication(request: pytest.FixtureRequest, dataset: Path) -> list[dict[str, Any]]:
    tensor_parallel, world_size = request.param
    return run_ranks(collectives_by_depth, world_size, dataset, tensor_parallel, [2, 1, 3, 2, 4, 1, 2, 4, 8], timeout=240)


def test_gathers_and_reductions_do_not_depend_on_depth(communication: list[dict[str, Any]]) -> None:
    for rank in communication:
        calls, elements = rank["steps"][1]  # the first step records the order of the modules
        assert calls.total() > 0
        for other_calls, other_elements in rank["steps"][2:]:
            assert other_calls == calls
            assert other_elements == elements


def test_an_evaluation_leaves_gathered_what_a_step_does_and_changes_no_later_step(communication: list[dict[str, Any]]) -> None:
    for rank in communication:
        after_step, after_evaluation = rank["gathered"]
        assert after_evaluation == after_step
        assert {name for name in rank["parameters"] if name.startswith("core.")} <= set(after_step)  # the core is resident
        assert "prelude.0.mlp.up.weight" not in after_step
        assert rank["step_after_evaluation"] == rank["steps"][1]


def partition_dtypes(dataset: Path) -> set[str]:
    engine = start(small_run(dataset, precision="fp32"))
    parameters: list[Any] = list(engine.module.parameters())  # with DeepSpeed's attributes
    return {str(parameter.ds_tensor.dtype) for parameter in parameters}


def test_fp32_is_fp32_on_a_cpu_without_half_precision_instructions(dataset: Path) -> None:
    assert run_ranks(partition_dtypes, 1, dataset, env={"ONEDNN_MAX_CPU_ISA": "AVX2"}) == [{"torch.float32"}]
