"""Everything that a user may set about a run: typed sections, filled from YAML and `--section.key value`.

An unknown key or a value out of range ends the program before anything expensive starts, with a message that names it.
DeepSpeed's own JSON is a separate file, read and completed by `pretrain/ds_config.py`.
"""

import sys
from argparse import ArgumentError
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace

from model.config import ComputeConfig, GRTConfig
from pretrain.schedule import ScheduleConfig
from pretrain.sources import DataConfig
from pretrain.stopping import parse_duration

SpikePolicy = Literal["log", "skip", "rollback"]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW; weight decay applies to matrices and the token embedding only."""

    global_batch_size: int = 480  # sequences an optimizer step
    # A ramp: from initial_batch_size in equal steps of as many sequences to global_batch_size, which is reached after ramp_tokens.
    initial_batch_size: int | None = None
    ramp_tokens: int | None = None
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    gradient_clip: float = 1.0  # of the global norm; 0 turns clipping off
    # Of a loss that is not finite, or lies spike_threshold standard deviations above the mean of the last 128: `log` says so, `skip` also
    # leaves the step out, on all ranks alike, `rollback` also puts back the weights of the last checkpoint, while data and schedule go on;
    # null: spikes are not looked for, which saves an all-reduce a step
    spike_policy: SpikePolicy | None = None
    spike_threshold: float = 6.0
    precision: Literal["bf16", "fp32"] = "bf16"  # bf16 keeps fp32 master weights and accumulates gradients in fp32

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"optim.{name}", getattr(self, name), "at least 0 and below 1")
        _require(self.eps > 0, "optim.eps", self.eps, "above 0")
        _require(self.spike_threshold > 0, "optim.spike_threshold", self.spike_threshold, "above 0")
        for name in ("weight_decay", "gradient_clip"):
            _require(getattr(self, name) >= 0, f"optim.{name}", getattr(self, name), "at least 0")
        _require(self.global_batch_size >= 1, "optim.global_batch_size", self.global_batch_size, "at least 1")
        if (self.initial_batch_size is None) != (self.ramp_tokens is None):
            raise ValueError("optim.initial_batch_size and optim.ramp_tokens make a ramp together: give both, or none.")
        if self.initial_batch_size is not None and self.ramp_tokens is not None:
            divides = self.initial_batch_size >= 1 and self.global_batch_size % self.initial_batch_size == 0
            _require(
                divides,
                "optim.initial_batch_size",
                self.initial_batch_size,
                f"a divisor of optim.global_batch_size {self.global_batch_size}",
            )
            _require(self.ramp_tokens >= 1, "optim.ramp_tokens", self.ramp_tokens, "at least 1")


@dataclass(frozen=True)
class ParallelConfig:
    """How the run is laid out over processes; free to change at a resume."""

    tensor_parallel: int = 1
    sequence_parallel: bool | None = None  # split what tensor parallelism repeats over the sequence; null: where tensor_parallel > 1
    micro_batch_size: int = 1  # sequences a forward pass of one data-parallel rank
    # How long the core's weights stay gathered at ZeRO stage 3: `step` from one optimizer step to the next, `fwd_bwd` from forward to
    # backward, `loop` inside each of them, `every_use` as ZeRO-3 by itself does (R times the communication; for comparison). `auto`: the
    # first that fits, and at stages 1 and 2, which free no weights, `step`.
    core_residency: Literal["auto", "step", "fwd_bwd", "loop", "every_use"] = "auto"

    def __post_init__(self) -> None:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("parallel.sequence_parallel is true, but parallel.tensor_parallel is 1: there is nothing to split.")
        _require(self.tensor_parallel >= 1, "parallel.tensor_parallel", self.tensor_parallel, "at least 1")
        _require(self.micro_batch_size >= 1, "parallel.micro_batch_size", self.micro_batch_size, "at least 1")

    @property
    def splits_sequence(self) -> bool:
        return self.tensor_parallel > 1 if self.sequence_parallel is None else self.sequence_parallel


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 1000  # the last step is always saved
    keep: int | None = None  # how many of the newest to keep; null keeps all
    keep_every_steps: int | None = None  # those of steps that are multiples of it are kept, too
    # auto: the newest complete one in run_dir, or a fresh start; none: a fresh start, refused where run_dir has one; or a checkpoint's
    # path: the start as long as run_dir has none of its own, then as auto
    resume: str = "auto"
    allow_change: list[str] = field(default_factory=list)  # settings that may differ from the checkpoint's, e.g. schedule.total_tokens

    def __post_init__(self) -> None:
        _require(self.every_steps >= 1, "checkpoint.every_steps", self.every_steps, "at least 1")
        _require(self.keep is None or self.keep >= 1, "checkpoint.keep", self.keep, "at least 1, or null to keep all")
        every = self.keep_every_steps
        _require(every is None or every >= 1, "checkpoint.keep_every_steps", every, "at least 1, or null")


@dataclass(frozen=True)
class EvalConfig:
    every_steps: int = 1000  # before the first step and after the last one too
    max_sequences: int | None = 512  # null: the whole validation split
    depths: list[int] | None = None  # null: 0, 1, R/2, R and 2R

    def __post_init__(self) -> None:
        _require(self.every_steps >= 1, "eval.every_steps", self.every_steps, "at least 1")
        _require(self.max_sequences is None or self.max_sequences >= 1, "eval.max_sequences", self.max_sequences, "at least 1, or null")
        _require(self.depths is None or min(self.depths, default=-1) >= 0, "eval.depths", self.depths, "numbers from 0, or null")


@dataclass(frozen=True)
class LogConfig:
    every_steps: int = 10
    digest_every_steps: int = 100  # of the batch's tokens, by which two runs are compared, and the ranks of a model-parallel group
    tensorboard: bool = True

    def __post_init__(self) -> None:
        for name in ("every_steps", "digest_every_steps"):
            _require(getattr(self, name) >= 1, f"log.{name}", getattr(self, name), "at least 1")


@dataclass(frozen=True)
class RunConfig:
    """One training run."""

    run_dir: Path
    model: GRTConfig
    data: DataConfig
    schedule: ScheduleConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    seed: int = 1234  # of weights, data order, depths and noise
    # hours:minutes:seconds (or days-hours:minutes:seconds) from the start: then the step under way is ended and saved, and the exit code is
    # that of a run to be started again. null: no limit
    stop_before: str | None = None
    # A step, a validation or the copy for a checkpoint that takes longer hangs: who is behind is said, and the run ends, to be started
    # again. The writing of a checkpoint is not watched: it may take an hour
    watchdog_seconds: float = 1800

    def __post_init__(self) -> None:
        if self.stop_before is not None:
            parse_duration(self.stop_before)
        _require(self.watchdog_seconds > 0, "watchdog_seconds", self.watchdog_seconds, "above 0")
        _require(0 <= self.seed < 2**63, "seed", self.seed, "from 0 to 2^63 - 1")
        length = self.data.sequence_length
        _require(
            length <= self.model.max_positions, "data.sequence_length", length, f"at most model.max_positions {self.model.max_positions}"
        )
        self.model.validate_tensor_parallel(self.parallel.tensor_parallel)
        if self.parallel.core_residency == "every_use" and self.model.core_blocks and self.model.min_depth == 0:
            raise ValueError(
                "parallel.core_residency every_use cannot train at depth 0, and model.min_depth is 0: ZeRO-3 would apply the core's "
                "gradients of the step before again. Set model.min_depth to 1, or choose another residency."
            )
        ranks = self.parallel.tensor_parallel if self.parallel.splits_sequence else 1
        _require(length % ranks == 0, "data.sequence_length", length, f"a multiple of the {ranks} ranks that share a sequence")

    @property
    def tokens_per_step(self) -> int:
        """After the ramp, if there is one."""
        return self.optim.global_batch_size * self.data.sequence_length

    def batch_size(self, position: int) -> int:
        """Sequences of the optimizer step that starts at `position` of the stream."""
        optim = self.optim
        if optim.initial_batch_size is None or optim.ramp_tokens is None:
            return optim.global_batch_size
        increases = optim.global_batch_size // optim.initial_batch_size - 1
        made = position * self.data.sequence_length * increases // optim.ramp_tokens
        return optim.initial_batch_size * (1 + min(made, increases))

    @property
    def evaluation_depths(self) -> list[int]:
        """Sorted; always with 0, 1 and R, which the core and depth gains compare."""
        full = self.model.max_depth
        if full == 0:
            return [0]
        chosen = [full // 2, 2 * full] if self.eval.depths is None else self.eval.depths
        return sorted({0, 1, full, *chosen})

    def data_parallel_size(self, world_size: int) -> int:
        """Data-parallel ranks of a run of `world_size` processes.

        Raises:
            ValueError: tensor parallelism does not divide the processes.
        """
        tensor_parallel = self.parallel.tensor_parallel
        if world_size % tensor_parallel:
            raise ValueError(
                f"parallel.tensor_parallel is {tensor_parallel}, which does not divide the {world_size} processes of this run. "
                f"Start a multiple of {tensor_parallel} processes, or lower it."
            )
        return world_size // tensor_parallel

    def accumulation_steps(self, data_parallel: int) -> int:
        """Micro-batches an optimizer step of each rank, after the ramp.

        Raises:
            ValueError: the global batch, or the ramp's first, is not a multiple of micro-batch times data-parallel ranks.
        """
        per_micro_step = self.parallel.micro_batch_size * data_parallel
        for name in ("initial_batch_size", "global_batch_size"):
            size = getattr(self.optim, name)
            if size is not None and size % per_micro_step:
                raise ValueError(
                    f"optim.{name} is {size}, which is not a multiple of parallel.micro_batch_size {self.parallel.micro_batch_size} times "
                    f"{data_parallel} data-parallel ranks."
                )
        return self.optim.global_batch_size // per_micro_step

    def as_dict(self) -> dict[str, Any]:
        """Plain values only, as YAML and JSON can hold them."""
        plain = asdict(self)
        plain["run_dir"] = str(self.run_dir)
        return plain


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {value!r}; it must be {allowed}.")


def parse_arguments(arguments: list[str] | None = None) -> tuple[RunConfig, Path]:
    """The run config and the path of DeepSpeed's JSON, from the command line.

    `--help` and `--print_config` print and exit.

    Raises:
        ValueError: an unknown key, a bad value, or a config file that cannot be read.
    """
    parser = _parser("Pretrains a GRT: deepspeed pretrain/train.py --config configs/demo.yaml --ds_config configs/ds_zero3.json")
    parser.add_argument(
        "--ds_config", type=Path, required=True, help="DeepSpeed's JSON config; 'auto' values are filled from the run config"
    )
    parser.add_argument("--local_rank", type=int, help="appended by the deepspeed launcher; the environment says the same")
    config, parsed = _parse(parser, arguments)
    return config, parsed.ds_config


def parse_run_config(arguments: list[str]) -> RunConfig:
    """The run config alone, from `--config FILE --section.key value`, for what reads a run without training it.

    Raises:
        ValueError: as for `parse_arguments`.
    """
    return _parse(_parser("A run of pretrain/train.py"), arguments)[0]


def _parser(description: str) -> ArgumentParser:
    parser = ArgumentParser(
        prog="train.py",
        exit_on_error=False,
        allow_abbrev=False,  # else a misspelt --model.num_head would set num_heads
        description=description,
    )
    parser.add_argument("--config", action="config", help="YAML file with the settings below")
    return parser


def _config_first(arguments: list[str]) -> list[str]:
    """The command line wins over the file wherever it stands: jsonargparse lets the later win."""
    first: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--config":
            first += [word, *islice(words, 1)]
        else:
            (first if word.startswith("--config=") else rest).append(word)
    return first + rest


def _parse(parser: ArgumentParser, arguments: list[str] | None) -> tuple[RunConfig, Namespace]:
    parser.add_class_arguments(RunConfig, nested_key=None, fail_untyped=True)
    try:
        parsed = parser.parse_args(_config_first(sys.argv[1:] if arguments is None else arguments))
    except ArgumentError as error:
        raise ValueError(f"{' '.join(str(error).split())}. `train.py --help` lists the settings.") from error
    instantiated = parser.instantiate(parsed)
    return RunConfig(**{name: instantiated[name] for name in RunConfig.__dataclass_fields__}), parsed
