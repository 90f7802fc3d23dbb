"""Turns text into a dataset: WebDataset tars of token blocks, split into train and validation, with an index.

Input: text, .jsonl (also .gz, .zst), .parquet, WebDataset tars of .txt or .json members, and datasets that Hugging Face saved on disk;
by name, folder, glob or URL (any that fsspec opens). A document goes to the validation split by a hash of its text, so copies of
one text stay on one side. The same input gives the same bytes, whatever the number of processes. Killed, and started again with the same
arguments, it goes on from the last finished shard, to the same bytes. Examples:

    python tools/prepare_data.py --input corpus/ --tokenizer data/tokenizer --output data/mine
    python tools/prepare_data.py --input 'dump/*.jsonl.zst' --text-field content --tokenizer data/gpt2 --output data/dump --processes 8
    python tools/prepare_data.py --input 's3://bucket/web/*.parquet' --deduplicate --min-characters 200 --tokenizer data/tokenizer \\
        --output data/web --dry-run
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.shards import DatasetError
from tokenizer.corpus import CorpusFile, add_corpus_arguments, find_files, read_options
from tokenizer.decoding import CorpusError
from tokenizer.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from tools.corpus_estimate import estimate_lines, take_sample
from tools.dataset_writer import DatasetWriter
from tools.document_work import DocumentOptions, TokenBatch, WorkerPool
from tools.duplicates import Duplicates, HashRuns, discard_runs, find_duplicates
from tools.progress import Progress
from tools.tasks import Position, Task, corpus_bytes, read_tasks

HASHING = "hashing.state"
LEFT_OUT = ("too_short", "too_long", "duplicates")


def compare_documents(writer: DatasetWriter, pool: WorkerPool, files: Sequence[CorpusFile], options: DocumentOptions) -> Path:
    """Finds the duplicates in the corpus, before anything is encoded; returns the folder of the result."""
    directory = writer.work.path / "hashes"
    saved = writer.work.load(HASHING)
    state: dict[str, Any] = saved[0] if saved else {"complete": False, "position": Position(), "runs": 0, "tasks": 0, "documents": 0}
    if state["complete"]:
        return directory
    end = Position(*state["position"])
    runs = HashRuns(directory, state["runs"], state["tasks"], state["documents"])

    def save(complete: bool) -> None:
        written = {"runs": runs.runs, "tasks": runs.tasks, "documents": runs.documents}
        writer.work.save(HASHING, {"complete": complete, "position": end, **written})

    with Progress(corpus_bytes(files), "comparing documents", corpus_bytes(files[: end.file])) as progress:
        documents = runs.documents
        for done in pool.hashes(read_tasks(files, options.read, end)):
            documents += len(done.result)
            end = done.end
            if runs.add(done.result):
                save(complete=False)
            progress.advance(done.bytes_read, f"{documents:,} documents")
        runs.write_run()
    with Progress(runs.documents * 24, "comparing hashes") as progress:
        for share in find_duplicates(directory, runs.runs, runs.documents):
            progress.advance(int(share * runs.documents * 24), f"{runs.runs} runs")
    save(complete=True)
    discard_runs(directory)
    return directory


def encode_documents(
    writer: DatasetWriter,
    pool: WorkerPool,
    files: Sequence[CorpusFile],
    options: DocumentOptions,
    hashes: Path | None,
    state: dict[str, Any] | None,
) -> dict[str, int]:
    """Writes the encoded corpus into the writer's splits; returns how many documents were left out, and why.

    Args:
        hashes: folder of `compare_documents`; None: duplicates stay.
        state: of the last checkpoint of a command that was stopped.

    Raises:
        CorpusError: no document, or none for the train split.
    """
    start = Position(*state["position"]) if state else Position()
    left_out = state["left_out"] if state else dict.fromkeys(LEFT_OUT, 0)
    train, validation = writer.splits["train"], writer.splits["validation"]
    duplicates = Duplicates(hashes, start.tasks) if hashes else None

    def tasks() -> Iterator[tuple[Task, np.ndarray | None]]:
        for task in read_tasks(files, options.read, start):
            yield task, duplicates.next_task() if duplicates else None

    with Progress(corpus_bytes(files), "encoding" if hashes else "", corpus_bytes(files[: start.file])) as progress:
        for done in pool.encode(tasks()):
            batch: TokenBatch = done.result
            shards = len(train.shards) + len(validation.shards)
            for document, is_validation, text_bytes in zip(
                np.split(batch.tokens, batch.ends[:-1]), batch.is_validation.tolist(), batch.text_bytes.tolist(), strict=False
            ):
                (validation if is_validation else train).add(document, text_bytes)
            left_out = {reason: left_out[reason] + getattr(batch, reason) for reason in LEFT_OUT}
            if len(train.shards) + len(validation.shards) > shards:
                writer.checkpoint({"position": done.end, "left_out": left_out})
            progress.advance(done.bytes_read, f"{(train.tokens + validation.tokens) / 1e6:.1f} M tokens")
    if not train.documents:
        reason = "it holds no text"
        if validation.documents:
            reason = "every document fell to the validation split; lower --validation-fraction"
        elif any(left_out.values()):
            reason = f"every document was left out ({', '.join(f'{count} {reason}' for reason, count in left_out.items() if count)})"
        raise CorpusError(f"nothing to train on in the corpus of {len(files)} files: {reason.replace('_', ' ')}")
    return left_out


def summarize(writer: DatasetWriter, left_out: dict[str, int]) -> dict[str, Any]:
    """What `summary.json` holds."""
    splits = {
        name: {
            "documents": split.documents,
            "tokens": split.tokens,
            "text_bytes": split.text_bytes,
            "bytes_per_token": round(split.text_bytes / max(1, split.tokens), 4),
            "longest_document_tokens": split.longest,
        }
        for name, split in writer.splits.items()
    }
    return {"left_out": left_out, "splits": splits}


def print_summary(writer: DatasetWriter, summary: dict[str, Any]) -> None:
    for name, split in summary["splits"].items():
        more = f"{split['bytes_per_token']:.3f} bytes a token, longest document {split['longest_document_tokens']} tokens"
        shards = len(writer.splits[name].shards)
        print(f"{name}: {split['documents']} documents, {split['tokens']} tokens, {shards} shards" + (f", {more}" if shards else ""))
    left_out = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in summary["left_out"].items() if count)
    if left_out:
        print(f"left out: {left_out}")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_corpus_arguments(parser)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="SentencePiece's or GPT-2's files")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the dataset's directory, new or empty")
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset that is already there")
    parser.add_argument("--dry-run", action="store_true", help="estimate size and time from a sample, and write nothing")
    parser.add_argument("--source", default="text", metavar="NAME", help="the corpus' name, kept in the shards (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N", help="that tokenize (default: %(default)s)")
    parser.add_argument(
        "--deduplicate",
        action="store_true",
        help="keep the first of documents with equal text; reads the corpus twice, 24 bytes of disk each",
    )
    parser.add_argument("--min-characters", type=int, default=1, metavar="N", help="leave shorter documents out (default: %(default)s)")
    parser.add_argument("--max-characters", type=int, metavar="N", help="leave longer documents out (default: keep them)")
    parser.add_argument("--validation-fraction", type=float, default=0.01, metavar="F", help="of the documents (default: %(default)s)")
    parser.add_argument("--block-tokens", type=int, default=1 << 20, metavar="N", help="least size of a block (default: %(default)s)")
    parser.add_argument("--shard-tokens", type=int, default=1 << 26, metavar="N", help="least size of a full shard (default: %(default)s)")
    args = parser.parse_args(arguments)
    for name in ("processes", "block_tokens", "shard_tokens", "max_text_bytes", "min_characters"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")
    if args.max_characters is not None and args.max_characters < args.min_characters:
        parser.error(f"--max-characters {args.max_characters} is below --min-characters {args.min_characters}: no document would be kept")
    if not 0 <= args.validation_fraction < 1:
        parser.error(f"--validation-fraction must be at least 0 and below 1, not {args.validation_fraction}")
    return args


def document_options(args: argparse.Namespace) -> DocumentOptions:
    return DocumentOptions(read_options(args), args.min_characters, args.max_characters, args.validation_fraction)


def prepare(args: argparse.Namespace, writer: DatasetWriter, files: Sequence[CorpusFile], tokenizer: Tokenizer) -> None:
    """Makes the dataset, or what is left to make of it."""
    options = document_options(args)
    names = ("text_field", "invalid_utf8", "max_text_bytes", "min_characters", "max_characters", "validation_fraction", "deduplicate")
    settings = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
    state = writer.begin(settings, [(file.path, file.size, file.stamp) for file in files])
    if state:
        kept = sum(len(split.shards) for split in writer.splits.values())
        print(f"going on after {kept} finished shards, whose contents are as they were", flush=True)
    with WorkerPool(args.processes, tokenizer, options) as pool:
        hashes = compare_documents(writer, pool, files, options) if args.deduplicate else None
        left_out = encode_documents(writer, pool, files, options, hashes, state)
    summary = summarize(writer, left_out)
    writer.finish(summary)
    print_summary(writer, summary)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    writer = None
    try:
        files = find_files(args.input, args.pattern, args.exclude)
        tokenizer = load_tokenizer(args.tokenizer)
        if args.dry_run:
            sample = take_sample(files, tokenizer, document_options(args), deduplicate=args.deduplicate)
            print("\n".join(estimate_lines(files, sample, tokenizer, processes=args.processes, deduplicate=args.deduplicate)))
            return 0
        with DatasetWriter(
            args.output,
            tokenizer,
            source=args.source,
            block_tokens=args.block_tokens,
            shard_tokens=args.shard_tokens,
            overwrite=args.overwrite,
        ) as writer:
            prepare(args, writer, files, tokenizer)
    except (CorpusError, TokenizerError, DatasetError) as error:
        return fail(str(error) + (kept(writer) if isinstance(error, CorpusError) else ""))
    except BrokenProcessPool:
        return fail("a worker process died, most often because memory ran out; use fewer --processes" + kept(writer))
    except OSError as error:
        outcome = kept(writer) or "; no dataset was made there"
        return fail(f"cannot write {args.output}: {error}{outcome}; free space or choose another --output, and run again")
    except KeyboardInterrupt:
        return fail("interrupted" + (kept(writer) or "; no dataset was made"), 130)
    if args.validation_fraction and not writer.splits["validation"].documents:
        print("warning: no document fell to the validation split; use a larger --validation-fraction or a smaller --max-text-bytes")
    print(f"wrote {args.output}")
    return 0


def kept(writer: DatasetWriter | None) -> str:
    if writer is None or not writer.work.has_state:
        return ""
    return f"; what was finished is kept in {writer.directory}, and the same command goes on from there"


def fail(message: str, code: int = 1) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)  # ends as with Ctrl-C: workers stopped, unfinished files removed
    sys.exit(main())
