"""What an optimizer step communicates, by core residency and depth: `python -m benchmarks.communication`.

Counted by PyTorch's dispatcher on real CPU ranks of the trainer's own engine, in the shape of grt-1b (2+20x4+2) at a small width.
Elements are those of whole tensors: n ranks move (n - 1) / n of them each. On gloo DeepSpeed gathers one parameter at a time; NCCL
gathers all that are needed at once in one launch, so there are fewer calls on GPUs, but no fewer elements.
"""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from deepspeed import DeepSpeedEngine

from benchmarks.collectives import CollectiveCounter
from model.config import GRTConfig
from model.parallel import ParallelGroups
from tests.distributed.runs import small_run, start
from tests.ranks import run_ranks

MODEL = GRTConfig(
    vocab_size=512, hidden_size=64, num_heads=4, prelude_blocks=2, core_blocks=20, max_depth=4, coda_blocks=2, max_positions=32
)
RESIDENCIES = ("step", "fwd_bwd", "loop", "every_use")
LAYOUTS = ((1, 2), (2, 2))  # tensor-parallel, data-parallel ranks
ACCUMULATION = 4


class Communication(NamedTuple):
    """Calls and elements by kind of collective of one optimizer step, in the data-parallel and the tensor-parallel group."""

    data_calls: Counter[str]
    data_elements: Counter[str]
    tensor_calls: Counter[str]
    tensor_elements: Counter[str]


def step_communication(engine: DeepSpeedEngine, depth: int) -> Communication:
    """One optimizer step at this depth, its micro-steps of two sequences of 32 tokens."""
    groups = ParallelGroups()
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with (
        CollectiveCounter(groups.get_data_parallel_group()) as data,
        CollectiveCounter(groups.get_model_parallel_group()) as tensor,
    ):
        for _ in range(engine.gradient_accumulation_steps()):
            loss, _ = engine(tokens, tokens, depth=depth, sequences_B=torch.tensor([0, 1]))
            engine.backward(loss)
            engine.step()
    return Communication(data.calls, data.elements, tensor.calls, tensor.elements)


def residencies(tensor_parallel: int, data_parallel: int) -> dict[str, list[Communication]]:
    """In a rank: a step at each depth from 1 to R, by residency."""
    counted = {}
    for residency in RESIDENCIES:
        config = small_run(
            Path("unused"),
            model=MODEL,
            tensor_parallel=tensor_parallel,
            core_residency=residency,
            micro_batch_size=8 // data_parallel // ACCUMULATION,
        )
        engine = start(config)
        step_communication(engine, 1)  # ZeRO-3 records the order of the modules
        counted[residency] = [step_communication(engine, depth) for depth in range(1, MODEL.max_depth + 1)]
        engine.destroy()
    return counted


def main() -> None:
    print(
        f"{MODEL.prelude_blocks}+{MODEL.core_blocks}x{MODEL.max_depth}+{MODEL.coda_blocks}, {MODEL.parameter_count:,} parameters, of them "
        f"{MODEL.core_parameter_count:,} in the core; {ACCUMULATION} micro-steps an optimizer step\n"
    )
    for tensor_parallel, data_parallel in LAYOUTS:
        rank = run_ranks(residencies, tensor_parallel * data_parallel, tensor_parallel, data_parallel, timeout=600)[0]
        print(f"TP {tensor_parallel} x DP {data_parallel}, data-parallel collectives of a step at depth 1, 2, 3, 4:\n")
        print("| residency | all-gathers | million elements gathered | reduce-scatters | million elements reduced |")
        print("|---|---|---|---|---|")
        for residency, steps in rank.items():
            cells = [
                spread([step.data_calls["all-gather"] for step in steps], "{:,}"),
                spread([step.data_elements["all-gather"] / 1e6 for step in steps], "{:.2f}"),
                spread([step.data_calls["reduce-scatter"] for step in steps], "{:,}"),
                spread([step.data_elements["reduce-scatter"] / 1e6 for step in steps], "{:.2f}"),
            ]
            print(f"| `{residency}` | {' | '.join(cells)} |")
        print()


def spread(values: list[float], form: str) -> str:
    """One number where they are all equal, else each."""
    shown = [form.format(value) for value in values]
    return shown[0] if len(set(shown)) == 1 else ", ".join(shown)


if __name__ == "__main__":
    main()
