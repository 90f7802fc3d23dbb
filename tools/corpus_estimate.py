"""What a dataset will hold and how long it takes, from a sample: the dry run of `prepare_data.py`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from tokenizer.corpus import CorpusFile
from tokenizer.documents import read_chunks
from tokenizer.tokenizer import Tokenizer
from tools.document_work import DocumentOptions, DocumentWorker
from tools.progress import duration
from tools.shard_writer import token_dtype
from tools.tasks import corpus_bytes

SAMPLE_CHUNKS = 32  # of a megabyte or a file, from the starts of files spread evenly over the corpus


@dataclass(frozen=True)
class Sample:
    """What was measured, in one process."""

    stored_bytes: int
    text_bytes: int
    documents: int
    tokens: int
    read_seconds: float  # by the one process that reads
    work_seconds: float  # by those that decode, compare and encode


def take_sample(files: Sequence[CorpusFile], tokenizer: Tokenizer, options: DocumentOptions, *, deduplicate: bool) -> Sample:
    worker = DocumentWorker(tokenizer, options)
    stored = text_bytes = documents = tokens = 0
    read_seconds = work_seconds = 0.0
    count = min(SAMPLE_CHUNKS, len(files))
    for number in range(count):
        file = files[number * len(files) // count]
        start = time.perf_counter()
        chunks = list(islice(read_chunks(file, options.read), SAMPLE_CHUNKS // count))
        middle = time.perf_counter()
        if deduplicate:
            worker.hashes(chunks, None)
        batch = worker.encode(chunks, None)
        read_seconds += (middle - start) * (2 if deduplicate else 1)
        work_seconds += time.perf_counter() - middle
        stored += chunks[-1].bytes_read if chunks else 0
        text_bytes += int(batch.text_bytes.sum())
        documents += len(batch.ends)
        tokens += len(batch.tokens)
    return Sample(stored, text_bytes, documents, tokens, read_seconds, work_seconds)


def estimate_lines(files: Sequence[CorpusFile], sample: Sample, tokenizer: Tokenizer, *, processes: int, deduplicate: bool) -> list[str]:
    """For a person."""
    total = corpus_bytes(files)
    unknown = sum(file.size < 0 for file in files)
    lines = [f"{len(files)} files, {total / 1e9:.3f} GB as stored" + (f" and {unknown} of unknown size" if unknown else "")]
    if not sample.tokens:
        return [*lines, "the sample holds no document that is kept: nothing can be estimated"]
    factor = total / max(1, sample.stored_bytes)
    share = f"{sample.text_bytes / 1e6:.1f} MB of text in {min(SAMPLE_CHUNKS, len(files))} files"
    tokens, documents = sample.tokens * factor, sample.documents * factor
    together = sample.read_seconds + sample.work_seconds
    seconds = factor * (together if processes == 1 else max(sample.read_seconds, sample.work_seconds / processes))
    width = token_dtype(tokenizer.vocab_size).itemsize
    lines += [
        f"about {documents:,.0f} documents, {tokens / 1e6:,.1f} M tokens, {sample.text_bytes / sample.tokens:.3f} bytes a token",
        f"dataset: about {tokens * width / 1e9:.3f} GB; time: about {duration(seconds)} with {processes} processes "
        f"({sample.text_bytes / 1e6 / max(together, 1e-9):.1f} MB/s of text a process)",
        f"estimated from {share}, before duplicates; nothing was written",
    ]
    if deduplicate:
        lines.insert(
            -1,
            f"to find duplicates: about {documents * 24 / 1e9:.3f} GB of disk in the output folder while at work, "
            "0.25 GB of memory at most, and the corpus is read twice",
        )
    return lines
