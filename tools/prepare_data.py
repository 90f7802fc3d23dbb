"""Turns text into a dataset: WebDataset tars of token blocks, split into train and validation, with an index.

Input: text, .jsonl (also .gz, .zst) and .parquet files, by name, folder or glob. A document goes to the validation split by a hash of
its text, so copies of one text stay on one side. The same input gives the same bytes, whatever the number of processes. Examples:

    python tools/prepare_data.py --input corpus/ --tokenizer data/tokenizer --output data/mine
    python tools/prepare_data.py --input 'dump/*.jsonl.zst' --text-field content --tokenizer data/gpt2 --output data/dump --processes 8
"""

import argparse
import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from pretrain.shards import DatasetError
from tokenizer.documents import CorpusError, ReadOptions, add_corpus_arguments, find_files, read_documents, read_options
from tokenizer.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from tools.shard_writer import DatasetWriter, token_dtype

BATCH_CHARACTERS = 1 << 20  # of text sent to a worker at a time
SECONDS_BETWEEN_LINES = 10.0


class TextBatch(NamedTuple):
    texts: list[str]
    bytes_read: int  # of the corpus so far


class TokenBatch(NamedTuple):
    """Encoded documents, one after the other, each with its EOS."""

    tokens: np.ndarray  # of the dataset's dtype
    ends: np.ndarray  # int64 [documents]
    is_validation: list[bool]
    bytes_read: int


class Encoder:
    """Encodes batches of documents. Made once in each worker process."""

    def __init__(self, tokenizer: Tokenizer, validation_fraction: float) -> None:
        self._tokenizer = tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._validation_below = int(validation_fraction * 2**64)

    def encode(self, batch: TextBatch) -> TokenBatch:
        documents = [np.array([*self._tokenizer.encode(text), self._tokenizer.eos_id], self._dtype) for text in batch.texts]
        ends = np.cumsum([len(document) for document in documents])
        return TokenBatch(np.concatenate(documents), ends, [self._is_validation(text) for text in batch.texts], batch.bytes_read)

    def _is_validation(self, text: str) -> bool:
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < self._validation_below


def read_batches(files: Iterable[Path], options: ReadOptions) -> Iterator[TextBatch]:
    """Batches of about BATCH_CHARACTERS of text, whose limits depend on the corpus alone."""
    texts: list[str] = []
    characters = bytes_before = bytes_read = 0
    for file in files:
        for document in read_documents(file, options):
            texts.append(document.text)
            characters += len(document.text)
            bytes_read = bytes_before + document.bytes_read
            if characters >= BATCH_CHARACTERS:
                yield TextBatch(texts, bytes_read)
                texts, characters = [], 0
        bytes_before += file.stat().st_size
    if texts:
        yield TextBatch(texts, bytes_read)


def encode_in_order(batches: Iterator[TextBatch], tokenizer: Tokenizer, validation_fraction: float, processes: int) -> Iterator[TokenBatch]:
    """Encodes with `processes` workers (1: in this process), a few batches ahead, and yields in the order of `batches`."""
    if processes == 1:
        yield from map(Encoder(tokenizer, validation_fraction).encode, batches)
        return
    with ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer.files[0].parent, validation_fraction),
    ) as pool:
        waiting: deque[Future[TokenBatch]] = deque()
        try:
            for batch in batches:
                waiting.append(pool.submit(_encode_in_worker, batch))
                if len(waiting) > 2 * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


_encoder: Encoder  # of a worker process, which has no other place for it


def _start_worker(tokenizer_directory: Path, validation_fraction: float) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(load_tokenizer(tokenizer_directory), validation_fraction)


def _end_with_parent() -> None:
    """A pool's idle worker does not see that its parent was killed; it would wait forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(batch: TextBatch) -> TokenBatch:
    return _encoder.encode(batch)


class Progress:
    """How far the corpus is read: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, total_bytes: int) -> None:
        self._total, self._read, self._tokens = total_bytes, 0, 0
        self._start = self._last_line = time.monotonic()
        self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, disable=not sys.stderr.isatty())

    def advance(self, bytes_read: int, tokens: int) -> None:
        self._bar.update(bytes_read - self._read)
        self._read = bytes_read
        self._tokens += tokens
        self._bar.set_postfix_str(f"{self._tokens / 1e6:.1f} M tokens", refresh=False)
        now = time.monotonic()
        if self._bar.disable and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            rate = self._read / 1e6 / (now - self._start)
            print(f"{self._read / self._total:.0%}, {self._tokens / 1e6:.1f} M tokens, {rate:.1f} MB/s", flush=True)

    def close(self) -> None:
        self._bar.close()


def prepare(writer: DatasetWriter, files: Sequence[Path], batches: Iterator[TokenBatch]) -> None:
    """Writes the encoded corpus into `writer`'s splits.

    Raises:
        CorpusError: no document, or none for the train split.
    """
    progress = Progress(sum(file.stat().st_size for file in files))
    train, validation = writer.splits["train"], writer.splits["validation"]
    try:
        for batch in batches:
            for document, is_validation in zip(np.split(batch.tokens, batch.ends[:-1]), batch.is_validation, strict=True):
                (validation if is_validation else train).add(document)
            progress.advance(batch.bytes_read, len(batch.tokens))
    finally:
        progress.close()
    if not train.documents:
        reason = "every document fell to the validation split; lower --validation-fraction" if validation.documents else "it holds no text"
        raise CorpusError(f"nothing to train on in the corpus of {len(files)} files: {reason}")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_corpus_arguments(parser)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="SentencePiece's or GPT-2's files")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the dataset's directory, new or empty")
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset that is already there")
    parser.add_argument("--source", default="text", metavar="NAME", help="the corpus' name, kept in the shards (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N", help="that tokenize (default: %(default)s)")
    parser.add_argument("--validation-fraction", type=float, default=0.01, metavar="F", help="of the documents (default: %(default)s)")
    parser.add_argument("--block-tokens", type=int, default=1 << 20, metavar="N", help="least size of a block (default: %(default)s)")
    parser.add_argument("--shard-tokens", type=int, default=1 << 26, metavar="N", help="least size of a full shard (default: %(default)s)")
    args = parser.parse_args(arguments)
    for name in ("processes", "block_tokens", "shard_tokens", "max_text_bytes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    if not 0 <= args.validation_fraction < 1:
        parser.error(f"--validation-fraction must be at least 0 and below 1, not {args.validation_fraction}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    try:
        files = find_files(args.input, args.pattern, args.exclude)
        tokenizer = load_tokenizer(args.tokenizer)
        with DatasetWriter(
            args.output,
            tokenizer,
            source=args.source,
            block_tokens=args.block_tokens,
            shard_tokens=args.shard_tokens,
            overwrite=args.overwrite,
        ) as writer:
            batches = encode_in_order(read_batches(files, read_options(args)), tokenizer, args.validation_fraction, args.processes)
            prepare(writer, files, batches)
            writer.finish()
    except (CorpusError, TokenizerError, DatasetError) as error:
        return fail(str(error))
    except BrokenProcessPool:
        return fail("a worker process died, most often because memory ran out; use fewer --processes")
    except OSError as error:
        return fail(f"cannot write {args.output}: {error}; no dataset was made there, free space or choose another --output and run again")
    except KeyboardInterrupt:
        return fail("interrupted; no dataset was made", 130)
    for split, written in writer.splits.items():
        print(f"{split}: {written.documents} documents, {written.tokens} tokens, {len(written.shards)} shards")
    if args.validation_fraction and not writer.splits["validation"].documents:
        print("warning: no document fell to the validation split; use a larger --validation-fraction or a smaller --max-text-bytes")
    print(f"wrote {args.output}")
    return 0


def fail(message: str, code: int = 1) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)  # ends as with Ctrl-C: workers stopped, unfinished files removed
    sys.exit(main())
