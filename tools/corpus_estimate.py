"""What a dataset will hold and how long it takes, from a sample: the dry run of `prepare_data.py`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from tokenizer.corpus import CorpusFile
from tokenizer.documents import read_chunks
from tokenizer.tokenizer import Tokenizer
from tools.document_work import DocumentOptions, DocumentWorker
from tools.duplicates import RUN_DOCUMENTS
from tools.progress import duration
from tools.shard_writer import token_dtype
from tools.tasks import corpus_bytes

SAMPLE_FILES = 16  # spread evenly over the corpus
SAMPLE_CHUNKS = 4  # from the start of each


@dataclass(frozen=True)
class Sample:
    """What was measured, in one process."""

    stored_bytes: int
    text_bytes: int
    documents: int
    tokens: int
    read_seconds: float
    encode_seconds: float


def take_sample(files: Sequence[CorpusFile], tokenizer: Tokenizer, options: DocumentOptions) -> Sample:
    worker = DocumentWorker(tokenizer, options)
    stored = text_bytes = documents = tokens = 0
    read_seconds = encode_seconds = 0.0
    for number in range(min(SAMPLE_FILES, len(files))):
        file = files[number * len(files) // min(SAMPLE_FILES, len(files))]
        start = time.perf_counter()
        chunks = list(islice(read_chunks(file, options.read), SAMPLE_CHUNKS))
        middle = time.perf_counter()
        batch = worker.encode(chunks, None)
        read_seconds += middle - start
        encode_seconds += time.perf_counter() - middle
        stored += chunks[-1].bytes_read if chunks else 0
        text_bytes += int(batch.text_bytes.sum())
        documents += len(batch.ends)
        tokens += len(batch.tokens)
    return Sample(stored, text_bytes, documents, tokens, read_seconds, encode_seconds)


def estimate_lines(files: Sequence[CorpusFile], sample: Sample, tokenizer: Tokenizer, *, processes: int, deduplicate: bool) -> list[str]:
    """For a person."""
    total = corpus_bytes(files)
    unknown = sum(file.size < 0 for file in files)
    lines = [f"{len(files)} files, {total / 1e9:.3f} GB as stored" + (f" and {unknown} of unknown size" if unknown else "")]
    if not sample.tokens:
        return [*lines, "the sample holds no document that is kept: nothing can be estimated"]
    factor = total / max(1, sample.stored_bytes)
    share = f"{sample.text_bytes / 1e6:.1f} MB of text in {min(SAMPLE_FILES, len(files))} files"
    tokens, documents = sample.tokens * factor, sample.documents * factor
    # One process reads for all; the others decode and encode.
    seconds = max(sample.read_seconds * factor, (sample.encode_seconds + sample.read_seconds * (processes == 1)) * factor / processes)
    if deduplicate:
        seconds += sample.read_seconds * factor
    width = token_dtype(tokenizer.vocab_size).itemsize
    lines += [
        f"about {documents:,.0f} documents, {tokens / 1e6:,.1f} M tokens, {sample.text_bytes / sample.tokens:.3f} bytes a token",
        f"dataset: about {tokens * width / 1e9:.3f} GB; time: about {duration(seconds)} with {processes} processes "
        f"({sample.text_bytes / 1e6 / max(sample.encode_seconds, 1e-9):.1f} MB/s of text a process)",
        f"estimated from {share}, before duplicates; nothing was written",
    ]
    if deduplicate:
        lines.insert(
            -1,
            f"to find duplicates: about {documents * 24 / 1e9:.3f} GB of disk in the output folder while at work, "
            f"memory for {RUN_DOCUMENTS:,} hashes, and the corpus is read twice",
        )
    return lines
