"""The streams that `benchmarks/data.py` compares: this project's and the peers', each over its own copy of the same tokens.

Responsible for writing a copy with each library's own writer, and for reading it the fastest way that its users would. Each delivers
int64 tensors [BATCH, LENGTH + 1] but those that say otherwise, shuffled, in one process. The one fact to know: no peer checks what it
reads; this stream compares the crc32 of all that it touches.
"""

import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pretrain.data import SequenceDataset, train_batches
from pretrain.shards import FORMAT, SPLITS, VERSION, index_json
from pretrain.sources import DataConfig, configured_phases, open_sources
from tokenizer.fingerprint import files_sha256
from tools.shard_writer import SplitWriter

LENGTH = 2048
BATCH = 8
SEED = 1
SHARD_TOKENS = 1 << 22  # 8 MiB a file, for all
SHARD_SEQUENCES = SHARD_TOKENS // (LENGTH + 1)


class Corpus(NamedTuple):
    """Documents end to end."""

    tokens: np.ndarray  # uint16 [tokens]
    ends: np.ndarray  # int64 [documents], of each document in `tokens`

    @property
    def documents(self) -> Iterator[np.ndarray]:
        begin = 0
        for end in self.ends.tolist():
            yield self.tokens[begin:end]
            begin = end

    @property
    def sequences(self) -> np.ndarray:
        """The tokens cut into rows, for formats that store those: uint16 [sequences, LENGTH + 1]."""
        rows = len(self.tokens) // (LENGTH + 1)
        return self.tokens[: rows * (LENGTH + 1)].reshape(rows, LENGTH + 1)


def make_corpus(tokens: int) -> Corpus:
    """Random tokens in documents of log-normal length, about 1,000 tokens in the mean: that of web text."""
    generator = np.random.default_rng(SEED)
    lengths = generator.lognormal(6.3, 1.1, tokens // 100).astype(np.int64) + 16
    ends = np.cumsum(lengths)
    ends = np.append(ends[ends < tokens], tokens)
    return Corpus(generator.integers(0, 50_000, tokens, np.uint16), ends)


def in_batches(rows: Iterable[Any]) -> Iterator[Tensor]:
    """Rows of uint16, [LENGTH + 1] each -> int64 [BATCH, LENGTH + 1]."""
    iterator = (row for row in rows)  # iter(rows) would not do: litdata's begins anew when islice calls iter on it
    while len(batch := list(islice(iterator, BATCH))) == BATCH:
        yield torch.from_numpy(np.concatenate(batch).reshape(BATCH, LENGTH + 1).astype(np.int64))  # np.stack is slower


class Stream(ABC):
    """One contestant. In a process of its own: `load`, then `write`, or `open` and `batches`."""

    title: str
    package: str | None = None  # None: this project
    elastic: str  # what its documents say of a resume on another number of ranks

    @abstractmethod
    def load(self) -> None:
        """Imports what the others of these functions need.

        Raises:
            ImportError: it is not installed.
        """

    @abstractmethod
    def write(self, directory: Path, corpus: Corpus) -> None: ...

    @abstractmethod
    def open(self, directory: Path) -> None: ...

    @abstractmethod
    def batches(self) -> Iterator[Tensor]:
        """From the start, or from what `restore` was given."""

    def state(self, sequences: int) -> dict[str, Any] | None:
        """What an exact resume after so many sequences needs; None: there is none."""
        return None

    def restore(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Ours(Stream):
    """Positions through `SequenceDataset.read`."""

    title = "this stream, `SequenceDataset.read`"
    elastic = "any number, any micro-batch"

    def load(self) -> None:
        self.position = 0

    def write(self, directory: Path, corpus: Corpus) -> None:
        writers = {
            split: SplitWriter(directory, directory, split, "random", np.dtype("<u2"), 1 << 20, SHARD_TOKENS, resumed=False)
            for split in SPLITS
        }
        for document in corpus.documents:
            writers["train"].add(document, 0)
        write_index(directory, {split: writer.close() for split, writer in writers.items()})

    def open(self, directory: Path) -> None:
        self.config = DataConfig(LENGTH, str(directory), workers=0)
        self.sources = open_sources(self.config)
        self.phases = configured_phases(self.config, self.sources)

    def batches(self) -> Iterator[Tensor]:
        dataset = SequenceDataset(self.config, self.sources, self.phases, SEED)
        for position in range(self.position, sys.maxsize, BATCH):
            yield torch.from_numpy(dataset.read(np.arange(position, position + BATCH)).tokens.astype(np.int64))

    def state(self, sequences: int) -> dict[str, Any]:
        return {"position": sequences}

    def restore(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class OurBatches(Ours):
    """As the trainer reads: inputs, targets, mask and positions, through the DataLoader."""

    title = "this stream, `train_batches`: tokens, targets, mask"

    def batches(self) -> Iterator[Tensor]:
        for batch in train_batches(
            self.config,
            self.sources,
            self.phases,
            seed=SEED,
            position=self.position,
            batch_size=lambda position: BATCH,
            micro_batch_size=BATCH,
            data_parallel_rank=0,
            data_parallel_size=1,
        ):
            yield batch.tokens


def write_index(directory: Path, splits: dict[str, Any]) -> None:
    """index.json of a dataset without a tokenizer, of uint16 tokens."""
    content = {"format": FORMAT, "version": VERSION, "source": "random", "dtype": "uint16", "vocab_size": 50_000, "eos_id": 0}
    content |= {"tokenizer_files": [], "tokenizer_sha256": files_sha256([]), "splits": splits}
    (directory / "index.json").write_bytes(index_json(content))


class Webdataset(Stream):
    """A raw `.bin` member a sequence, the fastest of its decodings; shuffled shards and a shuffle buffer."""

    title = "webdataset, `.bin` members, `shuffle(1000)`"
    package = "webdataset"
    elastic = "no"

    def load(self) -> None:
        self.wds = importlib.import_module("webdataset")

    def write(self, directory: Path, corpus: Corpus) -> None:
        with self.wds.ShardWriter(str(directory / "%05d.tar"), maxcount=SHARD_SEQUENCES, verbose=0) as writer:
            for number, row in enumerate(corpus.sequences):
                writer.write({"__key__": f"{number:09d}", "bin": row.tobytes()})

    def open(self, directory: Path) -> None:
        shards = sorted(map(str, directory.glob("*.tar")))
        self.dataset = self.wds.WebDataset(shards, shardshuffle=len(shards), seed=SEED).shuffle(1000)

    def batches(self) -> Iterator[Tensor]:
        return in_batches(np.frombuffer(sample["bin"], np.uint16) for sample in self.dataset)


class MosaicStreaming(Stream):
    title = "mosaicml-streaming, MDS, `py1e`"
    package = "mosaicml-streaming"
    elastic = "if the global batch stays and divides"

    def load(self) -> None:
        spec = importlib.util.find_spec("streaming")
        if spec is None:
            raise ImportError("No module named 'streaming'")
        sys.modules["streaming"] = importlib.util.module_from_spec(spec)  # its __init__ imports torchvision, for images
        self.base = importlib.import_module("streaming.base")

    def write(self, directory: Path, corpus: Corpus) -> None:
        columns = {"tokens": f"ndarray:uint16:{LENGTH + 1}"}
        with self.base.MDSWriter(out=str(directory / "mds"), columns=columns, size_limit=2 * SHARD_TOKENS) as writer:
            for row in corpus.sequences:
                writer.write({"tokens": row})

    def open(self, directory: Path) -> None:
        self.base.util.clean_stale_shared_memory()
        self.dataset = self.base.StreamingDataset(local=str(directory / "mds"), shuffle=True, shuffle_seed=SEED, batch_size=BATCH)

    def batches(self) -> Iterator[Tensor]:
        return in_batches(sample["tokens"] for sample in self.dataset)

    def state(self, sequences: int) -> dict[str, Any]:
        return dict(self.dataset.state_dict(sequences, from_beginning=True))

    def restore(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state)


class Litdata(Stream):
    title = "litdata, `TokensLoader`"
    package = "litdata"
    elastic = "yes, from the last whole global batch"

    def load(self) -> None:
        self.streaming = importlib.import_module("litdata.streaming")
        self.loader = importlib.import_module("litdata.streaming.item_loader").TokensLoader
        self.cache = importlib.import_module("litdata.streaming.cache").Cache

    def write(self, directory: Path, corpus: Corpus) -> None:
        loader = self.loader(block_size=LENGTH + 1)
        cache = self.cache(str(directory), chunk_size=SHARD_SEQUENCES * (LENGTH + 1), item_loader=loader)
        for number, row in enumerate(corpus.sequences):
            cache[number] = row
        cache.done()
        cache.merge()

    def open(self, directory: Path) -> None:
        loader = self.loader(block_size=LENGTH + 1)
        self.dataset = self.streaming.StreamingDataset(str(directory), item_loader=loader, shuffle=True, seed=SEED, drop_last=True)

    def batches(self) -> Iterator[Tensor]:
        return in_batches(self.dataset)  # a third faster than litdata's own loader

    def state(self, sequences: int) -> dict[str, Any]:
        return dict(self.dataset.state_dict(sequences, num_workers=1, batch_size=BATCH))

    def restore(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state)


class MegatronIndexed(Stream):
    """Only the file format: rows stored as they are read, in a permutation that the benchmark draws."""

    title = "Megatron-core, `IndexedDataset.get` of whole rows"
    package = "megatron-core"
    elastic = "has no order of its own"

    def load(self) -> None:
        self.indexed = importlib.import_module("megatron.core.datasets.indexed_dataset")

    def write(self, directory: Path, corpus: Corpus) -> None:
        self._write(directory, corpus.sequences)

    def _write(self, directory: Path, rows: Iterable[np.ndarray]) -> None:
        builder = self.indexed.IndexedDatasetBuilder(str(directory / "tokens.bin"), dtype=np.uint16)
        for row in rows:
            builder.add_item(torch.from_numpy(row))
            builder.end_document()
        builder.finalize(str(directory / "tokens.idx"))

    def open(self, directory: Path) -> None:
        self.dataset = self.indexed.IndexedDataset(str(directory / "tokens"))
        self.order = np.random.default_rng(SEED).permutation(len(self.dataset))
        self.position = 0

    def batches(self) -> Iterator[Tensor]:
        return in_batches(self.dataset.get(number) for number in self.order[self.position :].tolist())

    def state(self, sequences: int) -> dict[str, Any]:
        return {"consumed_train_samples": sequences}

    def restore(self, state: dict[str, Any]) -> None:
        self.position = state["consumed_train_samples"]


class MegatronGPT(MegatronIndexed):
    """What Megatron trains on: sequences cut from shuffled documents. The index arrays are cached beside the data at the first start."""

    title = "Megatron-core, `GPTDataset`: tokens, targets, mask"
    elastic = "yes; another length reorders"

    def load(self) -> None:
        super().load()
        self.gpt = importlib.import_module("megatron.core.datasets.gpt_dataset")
        self.split = importlib.import_module("megatron.core.datasets.utils").Split.train

    def write(self, directory: Path, corpus: Corpus) -> None:
        self._write(directory, corpus.documents)

    def open(self, directory: Path) -> None:
        config = self.gpt.GPTDatasetConfig(
            random_seed=SEED,
            sequence_length=LENGTH,
            blend=([str(directory / "tokens")], None),
            split="1",
            path_to_cache=str(directory / "cache"),
            tokenizer=_NoTokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        indexed = self.indexed.IndexedDataset(str(directory / "tokens"))
        documents = np.arange(len(indexed), dtype=np.int32)
        self.dataset = self.gpt.GPTDataset(indexed, str(directory / "tokens"), documents, None, self.split, config)
        self.position = 0

    def batches(self) -> Iterator[Tensor]:
        for first in range(self.position, len(self.dataset) - BATCH, BATCH):
            rows = [self.dataset[number] for number in range(first, first + BATCH)]
            yield {name: torch.stack([row[name] for row in rows]) for name in rows[0]}["tokens"]


class _NoTokenizer:
    """What GPTDataset asks a tokenizer for."""

    unique_identifiers = {"class": "none"}
    eod, pad, vocab_size = 0, -1, 50_000


STREAMS: dict[str, Stream] = {
    stream.__class__.__name__: stream
    for stream in (Ours(), OurBatches(), Webdataset(), MosaicStreaming(), Litdata(), MegatronIndexed(), MegatronGPT())
}
