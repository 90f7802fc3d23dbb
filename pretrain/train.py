"""Pretrains a GRT: `deepspeed pretrain/train.py --config configs/X.yaml --ds_config configs/Y.json [--section.key value]`.

The same file runs under torchrun, srun, mpirun, and as one plain process. `train` reads top to bottom: a depth, micro-steps,
an optimizer step, then logging, validation and checkpoints when they are due.
"""

import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor

from model.apex import nvidia_apex_available
from model.depth import sample_depth
from model.ops import fused
from model.parallel import ParallelGroups, initialize_model_parallel
from pretrain.agreement import DisagreementError, require_same_run
from pretrain.checkpoint import Keep, load_first_whole, take_snapshot
from pretrain.checkpoint_reader import CheckpointError, passed_over
from pretrain.config import RunConfig, parse_arguments
from pretrain.data import Batch, train_batches, validation_batches
from pretrain.description import about_run, describe_run
from pretrain.determinism import make_deterministic
from pretrain.digest import global_batch_digest, weights_digest
from pretrain.ds_config import load_ds_config
from pretrain.engine import average_over_ranks, build_engine, initialize_distributed
from pretrain.evidence import CannotGoOnError, stop_with_evidence
from pretrain.memory import settle
from pretrain.metrics import MetricsLog, Speedometer
from pretrain.resume import Progress, find_checkpoint, identity, resume_candidates, rollback_candidates, stream_phases
from pretrain.run_directory import hold_run_dir, make_run_dir
from pretrain.saving import CheckpointSaver
from pretrain.schedule import learning_rate
from pretrain.shards import DamageError, DatasetError, Index
from pretrain.sources import open_sources, require_epochs, sequences_per_shard
from pretrain.spikes import Patience, SpikeDetector
from pretrain.stopping import REQUEUE, Reason, StopRequest, agreed, parse_duration
from pretrain.stragglers import Stragglers
from pretrain.topology import Topology
from pretrain.validation import validation_losses
from pretrain.watchdog import Watchdog
from pretrain.zero_state import refuse_step

BAD_INPUT = 2  # exit code of everything that starting again would not mend


def main() -> None:
    topology = None
    try:
        topology = Topology.from_environment(os.environ)
        config, ds_config_path = parse_arguments()
        stop = StopRequest(None if config.stop_before is None else parse_duration(config.stop_before))
        stop.listen()
        config, ds_config, sources, checkpoint = check_before_start(config, ds_config_path, topology)
    except (ValueError, OSError, RuntimeError, DatasetError) as error:
        if topology is not None and topology.local_rank > 0:
            time.sleep(20)  # the first rank of the node finds the same and says it; at its exit the launcher ends this one
        print(f"error: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    try:
        ended = train(config, ds_config, topology, sources, checkpoint, stop)
        torch.distributed.barrier()  # rank 0 holds the store that the others' shutdown still talks to
        torch.distributed.destroy_process_group()
        if not ended and topology.rank == 0:  # of the others, a launcher would end this one before it has said so
            sys.exit(REQUEUE)
    except (CannotGoOnError, CheckpointError, DisagreementError) as error:  # the same on every rank
        if topology.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        torch.distributed.barrier()  # the launcher ends all ranks when the first is gone: not before the message is out
        os._exit(BAD_INPUT)
    except DamageError as error:
        print(f"error: rank {topology.rank}: {error}", file=sys.stderr, flush=True)
        os._exit(BAD_INPUT)  # an ordinary exit would wait for the other ranks, which may wait for this one in a collective
    except (DatasetError, OSError) as error:  # of a disk or a network, which may be well when the run is started again
        print(f"error on rank {topology.rank}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    except Exception as error:
        if "by peer" in str(error):  # gloo's "Connection closed by peer": a traceback would bury the other rank's message
            print(f"rank {topology.rank} ends too: another rank is gone", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
        os._exit(1)


def check_before_start(
    config: RunConfig, ds_config_path: Path, topology: Topology
) -> tuple[RunConfig, dict[str, Any], dict[str, Index], Path | None]:
    """Finds what is wrong with config, data, environment and checkpoint before anything expensive starts.

    Returns:
        the config with the gate's operators, residency and recomputation settled, DeepSpeed's config, the sources' indices, and the
        checkpoint to resume from.
    """
    if config.compute.deterministic:
        make_deterministic(os.environ)
    nvidia_apex_available()  # raises on the other package of that name
    if torch.cuda.is_available() and topology.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"Local rank {topology.local_rank} has no GPU of its own: this process sees {torch.cuda.device_count()}. Start as many "
            f"processes a node as GPUs, and let each see all of them (srun: --gres=gpu:N, not --gpus-per-task; CUDA_VISIBLE_DEVICES)."
        )
    gate_ops: Literal["ref", "fused"] = "fused" if config.model.core_blocks and fused.chosen(config.compute.gate_ops) else "ref"
    config = replace(config, compute=replace(config.compute, gate_ops=gate_ops))
    data_parallel = config.data_parallel_size(topology.world_size)
    ds_config = load_ds_config(ds_config_path, config, data_parallel)
    zero = ds_config["zero_optimization"]
    config = settle(config, data_parallel, device_bytes(topology), zero["reduce_bucket_size"], zero["stage"])
    ds_config = load_ds_config(ds_config_path, config, data_parallel)  # the residency decides some of its settings
    sources = open_sources(config.data)
    for index in sources.values():
        if index.vocab_size != config.model.vocab_size:
            raise ValueError(
                f"model.vocab_size is {config.model.vocab_size}, but the tokenizer of {index.directory} has {index.vocab_size} pieces. "
                f"Set model.vocab_size to {index.vocab_size}."
            )
        for split in ("train", "validation"):
            sequences_per_shard(index, split, config.data.sequence_length)
    checkpoint = find_checkpoint(config, identity(config, sources))
    last = config.schedule.total_tokens // config.data.sequence_length
    phases = stream_phases(config, sources, checkpoint)
    require_epochs(config.data, sources, phases, last, config.seed, slack=config.optim.global_batch_size)
    topology.check_port_free()
    make_run_dir(config.run_dir)
    if topology.rank == 0:
        hold_run_dir(config.run_dir)
    return config, ds_config, sources, checkpoint


def device_bytes(topology: Topology) -> int:
    """Memory that this rank may fill: its GPU's, or its share of the host's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(topology.local_rank).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // topology.local_world_size


def train(
    config: RunConfig, ds_config: dict[str, Any], topology: Topology, sources: dict[str, Index], checkpoint: Path | None, stop: StopRequest
) -> bool:
    """The whole run on this rank, or what is left of it. Returns whether it came to its end; it may have been asked to stop before."""
    device = initialize_distributed(topology, config.parallel.tensor_parallel)
    engine, progress, checkpoint = start_engine(config, ds_config, sources, checkpoint)
    total_steps = steps_to_end(config, progress)
    if topology.rank == 0:
        describe_run(config, ds_config, topology, sources)
    batches = train_batches(
        config.data,
        sources,
        progress.mixture,
        seed=config.seed,
        position=progress.position,
        batch_size=config.batch_size,
        micro_batch_size=config.parallel.micro_batch_size,
        **data_parallel_place(),
    )
    control = torch.distributed.new_group(backend="gloo", group_desc="control")  # apart from the GPUs', which a step need not wait for
    watchdog = Watchdog(topology, config.run_dir / "hang", config.watchdog_seconds)
    spikes, patience = SpikeDetector(config.optim.spike_policy, config.optim.spike_threshold, progress.last_losses), Patience()

    def state() -> tuple[DeepSpeedEngine, dict[str, Any], dict[str, Any], dict[str, Any]]:
        return engine, progress.as_dict(), config.as_dict(), identity(config, sources)

    keep = Keep(config.checkpoint.keep, config.checkpoint.keep_every_steps)
    with (
        MetricsLog(config, topology.rank, progress.step, total_steps) as log,
        CheckpointSaver(config.run_dir / "checkpoints", keep, progress.step, log.say) as saver,
    ):
        log.say(f"{'resumed from ' + str(checkpoint) if checkpoint else 'fresh start'}: step {progress.step} of {total_steps}")
        for sentence in passed_over(config.run_dir / "checkpoints", checkpoint):
            log.say(f"warning: {sentence}")
        for line in about_run(config, sources, progress):
            log.say(line)
        if progress.step == 0:
            watchdog.at(0, "validation")
            log.validation(0, *validate(engine, config, sources, device), config.model.max_depth)
        speed = Speedometer(config, topology.world_size)
        stragglers = Stragglers(engine.module, control, log.say)
        reason = Reason.NONE
        while progress.step < total_steps and reason is Reason.NONE:
            watchdog.at(progress.step + 1, "reading its batch")
            depth = sample_depth(config.model, config.seed, progress.step)
            first_position, sequences = progress.position, config.batch_size(progress.position)
            set_batch_size(engine, sequences)
            with speed.waiting_for_data():
                micro_batches = list(islice(batches, engine.gradient_accumulation_steps()))
            progress = progress.after_step(config)
            if is_due(progress.step, config.log.digest_every_steps, total_steps):
                log.digests(progress.step, global_batch_digest(micro_batches, device), *weights_digest(engine))

            watchdog.at(progress.step, "forward, backward and optimizer")
            rate = learning_rate(config.schedule, progress.tokens)
            due_log = is_due(progress.step, config.log.every_steps, total_steps)
            weight = target_weight(micro_batches, device) if config.data.masks_loss else None
            compute = partial(train_step, engine, micro_batches, depth, rate, device, weight=weight)
            loss, core_statistics = compute(refuses=spikes.refuses, measure=due_log)
            progress = replace(progress, last_losses=spikes.losses)
            speed.step(depth, sequences)
            log.advance(progress.step, applied=engine.was_step_applied(), spike=spikes.refused)
            reason, retry = agreed(stop.reason(), saver.wants_retry(), control)

            if spikes.found is not None:
                log.spike(progress.step, spikes.found, first_position, progress.position)
            patience.after_step(engine.was_step_applied())
            if spikes.rolls_back:
                watchdog.pause()
                saver.wait()
                patience.before_rollback(saver.saved_step)
                if patience.is_over is None:
                    progress = roll_back(engine, config, checkpoint, progress, spikes, log)
            if patience.is_over is not None:
                watchdog.pause()
                facts = {"why": patience.is_over, "step": progress.step, "depth": depth, "learning_rate": rate}
                again = partial(compute, refuses=lambda _: True, measure=False)
                stop_with_evidence(config.run_dir / "evidence", facts, engine, take_snapshot(*state()).partitions, micro_batches, again)
            if due_log:
                reduced = average_over_ranks(torch.cat((loss[None], core_statistics.flatten())))
                norm = float(engine.get_global_grad_norm())
                speeds = stragglers.compare(speed.read())
                log.train_step(progress, float(reduced[0]), depth, rate, norm, speeds, reduced[1:].view(-1, 2))
            with speed.paused():
                if retry or progress.step % config.checkpoint.every_steps == 0:
                    watchdog.pause()  # a write under way is waited for
                    copying = partial(watchdog.at, progress.step, "copying the state for a checkpoint")
                    log.checkpoint(progress.step, *saver.save(*state(), copying=copying))
                if is_due(progress.step, config.eval.every_steps, total_steps) and reason is Reason.NONE:
                    watchdog.at(progress.step, "validation")
                    log.validation(progress.step, *validate(engine, config, sources, device), config.model.max_depth)
            saver.warn_of_failures()
        watchdog.pause()
        saver.save_last(*state())
        ended = progress.step == total_steps
        if not ended:
            log.say(f"stopped after step {progress.step} of {total_steps}, and saved: {reason.name}. The same command goes on from there.")
        return ended


def start_engine(
    config: RunConfig, ds_config: dict[str, Any], sources: dict[str, Index], checkpoint: Path | None
) -> tuple[DeepSpeedEngine, Progress, Path | None]:
    """The engine with the weights to start from, how far the run has come, and the checkpoint that says so: `checkpoint`, or the one
    before a damaged one."""
    require_same_run(config, ds_config, {name: index.fingerprint for name, index in sources.items()})
    initialize_model_parallel(config.parallel.tensor_parallel)
    engine = build_engine(config, ds_config)
    progress = Progress()
    loaded = load_first_whole(engine, resume_candidates(config, identity(config, sources), checkpoint))
    if loaded is not None:
        checkpoint, progress = loaded[0], Progress(**loaded[1])
    return engine, replace(progress, mixture=stream_phases(config, sources, checkpoint)), checkpoint


def roll_back(
    engine: DeepSpeedEngine, config: RunConfig, resumed_from: Path | None, progress: Progress, spikes: SpikeDetector, log: MetricsLog
) -> Progress:
    """Puts back weights and moments of a checkpoint, and the losses that the next are compared with; what was read since is not read again.

    Data, depths and learning rate go on from where they are: the steps since, run again, would end in the same spike.
    """
    loaded = load_first_whole(engine, rollback_candidates(config, resumed_from))
    if loaded is None:
        log.say("there is no checkpoint yet to roll back to: only this step is left out")
        return progress
    checkpoint, then = loaded[0], Progress(**loaded[1])
    spikes.losses = list(then.last_losses)
    log.rollback(progress.step, checkpoint.name, then.position, progress.position)
    return replace(progress, last_losses=then.last_losses)


def data_parallel_place() -> dict[str, int]:
    groups = ParallelGroups()
    return {"data_parallel_rank": groups.get_data_parallel_rank(), "data_parallel_size": groups.get_data_parallel_world_size()}


def validate(
    engine: DeepSpeedEngine, config: RunConfig, sources: dict[str, Index], device: torch.device
) -> tuple[dict[int, float], dict[str, dict[int, float]]]:
    """Losses by depth, over all sources and for each of several."""
    micro_batch_size, most = config.parallel.micro_batch_size, config.eval.max_sequences
    held_out = {
        name: validation_batches(config.data, index, micro_batch_size=micro_batch_size, max_sequences=most, **data_parallel_place())
        for name, index in sources.items()
    }
    return validation_losses(engine, held_out, config.evaluation_depths, device)


def steps_to_end(config: RunConfig, progress: Progress) -> int:
    """The number of the run's last step."""
    while progress.tokens < config.schedule.total_tokens and config.batch_size(progress.position) < config.optim.global_batch_size:
        progress = progress.after_step(config)
    return progress.step + max(0, math.ceil((config.schedule.total_tokens - progress.tokens) / config.tokens_per_step))


def set_batch_size(engine: DeepSpeedEngine, sequences: int) -> None:
    """Between two steps: the number of micro-batches of the steps that follow."""
    if engine.train_batch_size() != sequences:
        engine.set_train_batch_size(sequences)
        engine.micro_steps = 0  # a step ends where this count is a multiple of the micro-batches a step (deepspeed 0.19.8)


def train_step(
    engine: DeepSpeedEngine,
    batches: Sequence[Batch],
    depth: int,
    rate: float,
    device: torch.device,
    *,
    weight: Tensor | None = None,
    refuses: Callable[[Tensor], bool] | None = None,
    measure: bool,
) -> tuple[Tensor, Tensor]:
    """One optimizer step over this rank's micro-batches.

    Args:
        weight: from `target_weight`; None where every target counts, and so equally.
        refuses: whether to leave out the optimizer's step, given this rank's loss, fp32 scalar; the same on all ranks.
        measure: whether to take the core's statistics.

    Returns:
        this rank's part of the mean loss over the global batch's targets that count, times the number of data-parallel ranks (fp32
        scalar), and the core's statistics [depth, 2] ([0, 2] unless asked for), both detached.
    """
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
    losses, core_statistics = [], []
    for batch in (batch.to(device) for batch in batches):
        loss, measured = engine(
            batch.tokens,
            batch.targets,
            depth=depth,
            sequences_B=batch.sequence,
            cu_seqlens=batch.cu_seqlens,
            weights_BS=None if weight is None else batch.loss_mask * weight,
            measure=measure,
        )
        engine.backward(loss)
        losses.append(loss.detach())
        core_statistics.append(measured)
        if refuses is not None and len(losses) == len(batches) and refuses(torch.stack(losses).mean()):
            refuse_step(engine)
        engine.step()
    return torch.stack(losses).mean(), torch.stack(core_statistics).mean(0)


def target_weight(batches: Sequence[Batch], device: torch.device) -> Tensor:
    """What a target that counts weighs in the loss of its micro-batch, fp32 scalar: the mean over micro-batches and data-parallel ranks is
    then the mean over the global batch's targets that count."""
    counted = torch.stack([batch.loss_mask.sum() for batch in batches]).sum().to(device)
    torch.distributed.all_reduce(counted, group=ParallelGroups().get_data_parallel_group())
    return len(batches) * ParallelGroups().get_data_parallel_world_size() / counted.clamp(min=1).float()


def is_due(step: int, every: int, last: int) -> bool:
    return step % every == 0 or step == last


if __name__ == "__main__":
    main()
