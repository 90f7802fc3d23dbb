"""A roofline of a training run: time of a step, MFU and days from FLOPs, bytes and collectives, and a search over layouts.

Memory and collectives come from `pretrain/memory.py` and `pretrain/communication.py`, which are checked against real ranks. The time is
a model with the assumptions of `Machine`, and no more than that.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from model.config import ComputeConfig, GRTConfig
from pretrain.communication import Communication, optimizer_step
from pretrain.config import RunConfig
from pretrain.ds_config import load_ds_config
from pretrain.memory import GIB, HEADROOM, Layout, Memory, Residency, fits, memory, settle
from pretrain.zero_replay import ZeroSettings

SECONDS_A_DAY = 86400
RESIDENCIES: tuple[Residency, ...] = ("step", "fwd_bwd", "loop", "every_use")


@dataclass(frozen=True)
class Machine:
    """What a cluster does; the defaults are H100s, eight a node."""

    memory: int = 80 * GIB  # bytes of a GPU
    peak_flops: float = 989e12  # dense bf16, a second
    attainable: float = 0.6  # of the peak, over matrix products and everything between them
    gpus_per_node: int = 8
    node_bandwidth: float = 450e9  # bytes a second of a GPU to the others of its node
    bandwidth: float = 50e9  # to other nodes
    latency: float = 20e-6  # seconds of a collective, besides
    hop_latency: float = 1.2e-6  # for each rank of its ring
    overlap: float = 0.0  # share of the communication that hides behind computation

    def assumptions(self) -> list[str]:
        return [
            f"{self.attainable:.0%} of {self.peak_flops / 1e12:.0f} TFLOP/s is attainable, over matrix products and all between them",
            f"{self.gpus_per_node} GPUs a node, {self.node_bandwidth / 1e9:.0f} GB/s a GPU inside it, "
            f"{self.bandwidth / 1e9:.0f} GB/s a GPU between nodes",
            f"a collective of n ranks takes {self.latency * 1e6:.0f} us + n x {self.hop_latency * 1e6:.1f} us + bytes / bandwidth, "
            f"and {self.overlap:.0%} of it hides behind computation",
            "attention computes half of the full square (causal); MFU counts all of it, at the sampled depth, without recomputation",
            "time is the mean over the sampled depths, memory that of the largest",
            f"{1 - HEADROOM:.0%} of a GPU's memory is left for CUDA's context, NCCL's buffers and fragmentation",
            "not counted: data loading, the optimizer's own arithmetic, checkpoints, validation, stragglers",
        ]


@dataclass(frozen=True)
class Estimate:
    """One layout of a run."""

    config: RunConfig  # residency and keep_last as numbers, no longer "auto" or a budget
    layout: Layout
    memory: Memory
    communication: Communication  # of an optimizer step at R
    compute_seconds: float  # of an optimizer step, mean over depths
    communication_seconds: float
    fits: bool
    machine: Machine

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.communication_seconds * (1 - self.machine.overlap)

    @property
    def mfu(self) -> float:
        return self._mfu(self.step_seconds)

    @property
    def mfu_bound(self) -> float:
        """With communication that costs nothing."""
        return self._mfu(self.compute_seconds)

    def _mfu(self, seconds: float) -> float:
        tokens = self.config.tokens_per_step
        nominal = mean(3 * self.layout.model.forward_flops_per_token(self.layout.sequence_length, r) for r in depths(self.layout.model))
        gpus = self.layout.data_parallel * self.layout.tensor_parallel
        return tokens * nominal / (gpus * self.machine.peak_flops * seconds)

    def days(self, tokens: int) -> float:
        return tokens / self.config.tokens_per_step * self.step_seconds / SECONDS_A_DAY


def depths(model: GRTConfig) -> list[int]:
    """Equally weighted depths whose means are those of the sampled ones."""
    if model.depth_sampler in ("uniform", "stratified"):
        return list(range(model.min_depth, model.max_depth + 1))
    return [model.max_depth]


def estimate(config: RunConfig, gpus: int, machine: Machine, ds_config: Path) -> Estimate:
    """Of this run on so many GPUs.

    Raises:
        ValueError: the GPUs cannot share the run, or the activation budget is too small.
    """
    data_parallel = config.data_parallel_size(gpus)
    settings = ZeroSettings.of(load_ds_config(ds_config, config, data_parallel))
    config = settle(config, data_parallel, machine.memory, settings.reduce_bucket, stage=3)
    settings = ZeroSettings.of(load_ds_config(ds_config, config, data_parallel))  # residency decides some of them
    layout = Layout.of(config, data_parallel)
    needed = memory(layout, config.model.deepest, settings.reduce_bucket)
    steps = [optimizer_step(layout, depth, settings) for depth in depths(config.model)]
    tokens_a_gpu = layout.tokens * layout.accumulation_steps / layout.tensor_parallel
    flops = mean(executed_flops(layout, depth) for depth in depths(config.model))
    return Estimate(
        config=config,
        layout=layout,
        memory=needed,
        communication=steps[-1],
        compute_seconds=tokens_a_gpu * flops / (machine.attainable * machine.peak_flops),
        communication_seconds=mean(communication_seconds(step, layout, machine) for step in steps),
        fits=fits(needed, machine.memory),
        machine=machine,
    )


def executed_flops(layout: Layout, depth: int) -> float:
    """Of one token, forward, backward and what is computed again. Without sequence parallelism each rank repeats projection and gate."""
    model, compute = layout.model, layout.compute
    d = model.hidden_size
    block = 2 * (model.block_parameter_count - 2 * d) + 2 * layout.sequence_length * d
    repeated = 1 if layout.splits_sequence else layout.tensor_parallel
    around, once = ((6 * d * d, 4 * d * d) if compute.hoist else (10 * d * d, 0)) if model.core_blocks else (0, 0)
    recurrence = model.core_blocks * block + repeated * around
    outside = (model.prelude_blocks + model.coda_blocks) * block
    with_gradient = model.recurrences_with_gradient(depth)
    checkpointed = max(0, with_gradient - (compute.keep_last if compute.checkpointing in ("recurrence", "nested") else with_gradient))
    forward = outside + depth * recurrence + repeated * once
    backward = 2 * (outside + with_gradient * recurrence + repeated * once)
    again = checkpointed * recurrence
    if compute.checkpoints_blocks:
        again += outside + with_gradient * model.core_blocks * block
    return forward + backward + again + 6 * model.vocab_size * d


def communication_seconds(communication: Communication, layout: Layout, machine: Machine) -> float:
    """Of one optimizer step, each collective by itself."""
    seconds = 0.0
    for kind, traffic in communication.items():
        tensor = kind.group == "tensor"
        ranks = layout.tensor_parallel if tensor else layout.data_parallel
        inside = tensor or layout.tensor_parallel * layout.data_parallel <= machine.gpus_per_node
        bandwidth = machine.node_bandwidth if inside else machine.bandwidth
        moved = traffic.bytes * (ranks - 1) / ranks * (2 if kind.operation == "all-reduce" else 1)
        seconds += traffic.calls * (machine.latency + ranks * machine.hop_latency) + moved / bandwidth
    return seconds


def search(config: RunConfig, gpus: int, machine: Machine, ds_config: Path) -> Estimate | None:
    """The fastest layout that fits; None if none does."""
    found = [e for candidate in candidates(config, gpus, machine) if (e := _possible(candidate, gpus, machine, ds_config)) and e.fits]
    return min(found, key=lambda e: e.step_seconds, default=None)


def _possible(config: RunConfig, gpus: int, machine: Machine, ds_config: Path) -> Estimate | None:
    try:
        return estimate(config, gpus, machine, ds_config)
    except ValueError:  # the global batch does not divide
        return None


def candidates(config: RunConfig, gpus: int, machine: Machine) -> Iterator[RunConfig]:
    """Tensor-parallel sizes inside a node, micro-batches in powers of two, residencies, checkpointing and how much of it."""
    model = config.model
    given = config.compute
    ways = [ComputeConfig(hoist=given.hoist, compile=given.compile, gate_ops=given.gate_ops)]
    if model.core_blocks:
        ways += [replace(ways[0], checkpointing="recurrence", keep_last=k) for k in range(model.deepest - 1, -1, -1)]
        ways += [replace(ways[0], checkpointing="nested", keep_last=k) for k in range(model.deepest - 1, -1, -1)]
    ways.append(replace(ways[0], checkpointing="block"))
    for tensor_parallel in _powers_of_two(min(gpus, machine.gpus_per_node)):
        try:
            model.validate_tensor_parallel(tensor_parallel)
        except ValueError:
            continue
        if gpus % tensor_parallel or config.data.sequence_length % tensor_parallel:
            continue
        for micro_batch in _powers_of_two(config.optim.global_batch_size * tensor_parallel // gpus):
            for residency in RESIDENCIES[:3] if model.core_blocks else RESIDENCIES[:1]:
                parallel = replace(
                    config.parallel,
                    tensor_parallel=tensor_parallel,
                    sequence_parallel=None,
                    micro_batch_size=micro_batch,
                    core_residency=residency,
                )
                for compute in ways:
                    yield replace(config, parallel=parallel, compute=compute)


def _powers_of_two(limit: int) -> list[int]:
    return [1 << i for i in range(limit.bit_length())]
