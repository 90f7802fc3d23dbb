"""Batches of token sequences for training and validation.

Responsible for the way from positions of the stream to tensors; not for which source a position reads (`mixture.py`), nor for a source's
sequences (`sequences.py`). The one fact to know: the stream is a function of (datasets, mixture, seed, sequence length, window, position).
Ranks, micro-batches and workers only decide who evaluates which position, so the state of the data is one integer, beside the mixture.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from pretrain.mixture import Mixture, Phase
from pretrain.sequences import SourceSequences
from pretrain.shards import DatasetError, Index
from pretrain.sources import DataConfig

LAST_POSITION = 2**62  # batches only grow: there they are largest


class Batch(NamedTuple):
    """B sequences of S tokens."""

    tokens: torch.Tensor  # int64 [B, S]
    targets: torch.Tensor  # int64 [B, S], the token after each of `tokens`
    loss_mask: torch.Tensor  # bool [B, S], False where the target does not count
    sequence: torch.Tensor  # int64 [B], the position of each sequence in the stream
    cu_seqlens: torch.Tensor | None = None  # int32 [documents + 1] where attention stays inside documents: see `document_offsets`

    def to(self, device: torch.device) -> "Batch":
        """On `device`; the copy to a GPU does not wait for it."""

        def copy(x: torch.Tensor) -> torch.Tensor:
            return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)

        cu_seqlens = None if self.cu_seqlens is None else copy(self.cu_seqlens)
        return Batch(copy(self.tokens), copy(self.targets), copy(self.loss_mask), copy(self.sequence), cu_seqlens)


class Sequences(NamedTuple):
    """A batch as workers send it: arrays pass through a pipe, where each tensor would open shared memory."""

    positions: np.ndarray  # int64 [B]
    tokens: np.ndarray  # the datasets' dtype [B, S + 1]


class SequenceDataset(Dataset[Sequences | DatasetError]):
    """Training sequences by position in the stream."""

    def __init__(self, config: DataConfig, sources: Mapping[str, Index], phases: Sequence[Phase], seed: int) -> None:
        indices = {index.fingerprint: index for index in sources.values()}
        self._mixture = Mixture(phases, seed)
        # None for a source that only a past phase has: what lies there was read before the resume.
        self._sources = [
            SourceSequences(config, indices[source], "train", seed) if source in indices else None for source in self._mixture.sources
        ]
        self._row_length = config.sequence_length + 1
        self._dtype = next(iter(indices.values())).dtype

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The (source, shard, sequence in the shard) at each position, all int64 [positions]; sources are numbered as in `Mixture`."""
        sources, places = self._mixture.locate(positions)
        shards, sequences = np.empty_like(sources), np.empty_like(sources)
        for source in np.unique(sources).tolist():
            chosen = sources == source
            shards[chosen], sequences[chosen] = self._source(source).locate(places[chosen])
        return sources, shards, sequences

    def read(self, positions: np.ndarray) -> Sequences:
        """The sequences at `positions`, in that order.

        Raises:
            DatasetError: from the reads.
        """
        sources, places = self._mixture.locate(positions)
        tokens = np.empty((len(positions), self._row_length), self._dtype)
        for source in set(sources.tolist()):
            chosen = np.flatnonzero(sources == source)
            self._source(source).read(places[chosen], tokens, chosen)
        return Sequences(positions, tokens)

    def __getitems__(self, positions: list[int]) -> Sequences | DatasetError:
        """What the loader calls. An error is returned, not raised: the loader would bury a worker's exception in its traceback."""
        try:
            return self.read(np.array(positions, np.int64))
        except DatasetError as error:
            return error

    def _source(self, number: int) -> SourceSequences:
        source = self._sources[number]
        assert source is not None, "read only before the resume"
        return source


def document_offsets(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """Where documents begin in the batch's sequences laid end to end, and the batch's end: int32 [documents + 1], filled up with the end.

    EOS begins the document that follows it, which is what a prompt after EOS sees; so does each sequence. The length is a power of two:
    compiled code sees few shapes.

    Args:
        tokens: [B, S].
    """
    begins = tokens == eos_id
    begins[:, 0] = True
    offsets = np.flatnonzero(begins)
    return np.pad(offsets, (0, (1 << len(offsets).bit_length()) - len(offsets)), constant_values=tokens.size).astype(np.int32)


def _to_batch(sequences: Sequences, config: DataConfig, eos_id: int) -> Batch:
    inputs = sequences.tokens[:, :-1]
    # NumPy converts each half in one pass; torch would copy the halves of a converted whole.
    tokens, targets = torch.from_numpy(inputs.astype(np.int64)), torch.from_numpy(sequences.tokens[:, 1:].astype(np.int64))
    loss_mask = torch.from_numpy(inputs != eos_id if config.masks_loss else np.ones(inputs.shape, np.bool_))
    cu_seqlens = torch.from_numpy(document_offsets(inputs, eos_id)) if config.resets_attention else None
    return Batch(tokens, targets, loss_mask, torch.from_numpy(sequences.positions), cu_seqlens)


class _MicroBatches:
    """Batch sampler: the positions of one rank's micro-batches, without end."""

    def __init__(self, position: int, batch_size: Callable[[int], int], micro_batch_size: int, rank: int, ranks: int) -> None:
        self._position, self._batch_size = position, batch_size
        self._micro_batch_size, self._rank, self._ranks = micro_batch_size, rank, ranks

    def __iter__(self) -> Iterator[list[int]]:
        start = self._position
        while True:
            end = start + self._batch_size(start)
            for first in range(start + self._rank * self._micro_batch_size, end, self._micro_batch_size * self._ranks):
                yield list(range(first, first + self._micro_batch_size))
            start = end


def train_batches(
    config: DataConfig,
    sources: Mapping[str, Index],
    phases: Sequence[Phase],
    *,
    seed: int,
    position: int,
    batch_size: Callable[[int], int],
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[Batch]:
    """This rank's micro-batches from `position` on, without end; they cross epochs.

    The step that starts at P covers positions [P, P + batch_size(P)), a multiple of micro-batch times ranks; its micro-batch m on rank r
    is `P + (m * data_parallel_size + r) * micro_batch_size + [0, micro_batch_size)`.

    Raises:
        DatasetError: a source has no full sequence, or a read finds damage.
    """
    dataset = SequenceDataset(config, sources, phases, seed)
    batches = _MicroBatches(position, batch_size, micro_batch_size, data_parallel_rank, data_parallel_size)
    loader: Iterable[Sequences | DatasetError]
    if config.workers:
        a_step = batch_size(LAST_POSITION) // (micro_batch_size * data_parallel_size)
        loader = DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=config.workers,
            prefetch_factor=2 + a_step // config.workers,  # a step's micro-batches are asked for together
            collate_fn=_as_it_is,
            worker_init_fn=_shield_from_signals,
            generator=torch.Generator(),  # the loader draws a seed for its workers: not from the trainer's generator
        )
    else:
        loader = map(dataset.__getitems__, batches)  # the loader would take as long as the reads
    eos_id = next(iter(sources.values())).eos_id
    for sequences in loader:
        if isinstance(sequences, DatasetError):
            raise sequences
        yield _to_batch(sequences, config, eos_id)


def _as_it_is(batch: Any) -> Any:
    return batch


def _shield_from_signals(worker: int) -> None:
    """Replaces the handlers a worker inherits from the trainer.

    Slurm and launchers signal every process of a job, some of them twice, and a terminal every process of the foreground: what follows is
    the trainer's business, and workers end with it. Python ends them by a SIGTERM from the trainer itself; nobody else's counts.
    """
    signal.set_wakeup_fd(-1)  # the pipe through which the trainer learns of its own signals
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_the_trainer, daemon=True, name="signals").start()


def _end_with_the_trainer() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(1)


def validation_batches(
    config: DataConfig,
    index: Index,
    *,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    max_sequences: int | None,
) -> Iterator[Batch]:
    """This rank's share of a source's first `max_sequences` validation sequences (None: all), unshuffled, once.

    Every rank gets the same number of batches of the same shape; rows past the end repeat the last sequence with `loss_mask` False.
    They are read in the calling process: an evaluation is too short to pay for starting workers.

    Raises:
        DatasetError: the split has no full sequence, or a read finds damage.
    """
    sequences = SourceSequences(config, index, "validation", None)
    count = sequences.epoch_length if max_sequences is None else min(sequences.epoch_length, max_sequences)
    for first in range(0, count, micro_batch_size * data_parallel_size):
        positions = first + data_parallel_rank * micro_batch_size + np.arange(micro_batch_size)
        tokens = np.empty((micro_batch_size, config.sequence_length + 1), index.dtype)
        sequences.read(np.minimum(positions, count - 1), tokens, np.arange(micro_batch_size))
        batch = _to_batch(Sequences(positions, tokens), config, index.eos_id)
        batch.loss_mask[torch.from_numpy(positions >= count)] = False
        yield batch
