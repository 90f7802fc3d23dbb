"""Looks into the data of a run and into datasets: what lies at a position or was in a step's batch, shares of sources, document lengths.

    python tools/inspect_data.py at 12345 --config runs/mine/config.yaml
    python tools/inspect_data.py step 41230 --config runs/mine/config.yaml | less
    python tools/inspect_data.py shares --config runs/mine/config.yaml --from 0 --to 100000
    python tools/inspect_data.py lengths data/mine --sequence-length 2048 --plot lengths.png

A position counts sequences of the training stream, from 0. Where the run has checkpoints, beside its config.yaml or in its run_dir, past
positions are shown as they were read, even if the mixture was changed at a resume. Settings of the run follow as in train.py:
--section.key value.
"""

import argparse
import os
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pretrain.checkpoint_reader import CheckpointError
from pretrain.config import RunConfig, parse_run_config
from pretrain.remote import is_url
from pretrain.shard_cache import open_remote_dataset
from pretrain.shards import SPLITS, TOKENIZER_FOLDER, DatasetError, Index, open_dataset
from tokenizer.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from tools.document_lengths import count_lengths, describe, plot, require_plot
from tools.run_stream import Place, ReadBy, RunStream
from tools.shard_writer import block_key

EOS = "<EOS>"
# As an escape sequence would be written: the text of a corpus must not command the terminal.
VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def show_sequences(stream: RunStream, positions: range, tokens_only: bool) -> None:
    tokenizers: dict[str, Tokenizer] = {}  # all sources have the same
    for position in positions:
        place = stream.locate(position)
        if place.source not in tokenizers:
            tokenizers[place.source] = load_tokenizer(place.index.directory / TOKENIZER_FOLDER)
        print("\n".join(_describe_place(position, place, stream.step_at(position))))
        if tokens_only:
            print(textwrap.fill(" ".join(map(str, place.tokens.tolist())), 120))
        else:
            print(decode(tokenizers[place.source], place.tokens))
        print()


def _describe_place(position: int, place: Place, read_by: ReadBy | None) -> list[str]:
    split = place.index.splits["train"]
    first_block = int(split.first_block[place.shard])
    end = place.begin + len(place.tokens)
    blocks = ", ".join(f"{block} ({block_key(first_block + block)})" for block in place.blocks)
    rows = {
        "source": f"{place.source}: {place.index.directory if place.index.cache is None else place.index.cache.url}",
        "epoch": f"{place.epoch + 1} of the source; sequence {place.source_position:,} of its own stream",
        "shard": f"{split.shards[place.shard].name}, block {blocks}, tokens {place.begin:,} to {end - 1:,} of the shard",
    }
    if read_by is not None:
        rows["step"] = f"{read_by.step:,}, whose batch is positions {read_by.start:,} to {read_by.end - 1:,}"
    lines = [f"position {position:,}", *(f"  {name:10}{value}" for name, value in rows.items())]
    lines.append(f"  {'document':>14}{'its tokens':>12}   in this sequence")
    for document in place.documents:
        here = f"{max(document.begin, place.begin) - place.begin:,} to {min(document.end, end) - place.begin - 1:,}"
        cut = [part for part, is_cut in (("begins before", document.begin < place.begin), ("goes on after", document.end > end)) if is_cut]
        lines.append(f"  {document.number:14,}{document.end - document.begin:12,}   {', '.join([here, *cut])}")
    lines.append(f"  {len(place.tokens):,} tokens, the last of them a target only:")
    return lines


def decode(tokenizer: Tokenizer, tokens: np.ndarray) -> str:
    """The text of a sequence, with EOS spelt out and a new line after it."""
    documents = np.split(tokens, np.flatnonzero(tokens == tokenizer.eos_id) + 1)
    texts = []
    for document in documents:
        ended = len(document) > 0 and document[-1] == tokenizer.eos_id
        text = tokenizer.decode((document[:-1] if ended else document).tolist()).translate(VISIBLE)
        texts.append(f"{text}{EOS}\n" if ended else text)
    return "".join(texts)


def show_shares(stream: RunStream, start: int, end: int) -> None:
    length = stream.config.data.sequence_length
    found = stream.shares(start, end)
    print(f"positions {start:,} to {end - 1:,}: {(end - start) * length:,} tokens")
    for line in _describe_phases(stream, start, end):
        print(f"  {line}")
    width = max(map(len, [*found, "source"]))
    print(f"\n  {'source':{width}} {'sequences':>15} {'share':>8} {'tokens':>20} {'epochs':>9}")
    for name, share in found.items():
        epochs = "" if np.isnan(share.epochs) else f"{share.epochs:9.3f}"
        print(f"  {name:{width}} {share.sequences:15,} {share.share:8.2%} {share.sequences * length:20,} {epochs}".rstrip())
    print(f"  {'all':{width}} {end - start:15,} {1:8.2%} {(end - start) * length:20,}")


def _describe_phases(stream: RunStream, start: int, end: int) -> list[str]:
    lines = []
    ends = [phase.first_position for phase in stream.phases[1:]] + [end]
    for phase, phase_end in zip(stream.phases, ends, strict=True):
        if phase_end > start and phase.first_position < end:
            total = sum(phase.weights.values())
            weights = ", ".join(f"{stream.name_of(source)} {weight / total:.2%}" for source, weight in phase.weights.items())
            lines.append(f"weights from position {phase.first_position:,} on: {weights}")
    if stream.checkpoint is not None:
        lines.append(f"past weights as {stream.checkpoint} has them")
    return lines


def show_lengths(dataset: str, split: str, sequence_length: int | None, plot_file: Path | None) -> None:
    if sequence_length is not None and sequence_length < 1:
        raise ValueError(f"--sequence-length is {sequence_length}; it must be at least 1.")
    if plot_file is not None:
        require_plot(plot_file)
    with tempfile.TemporaryDirectory() as folder:  # for a URL: a shard at a time lies there
        index: Index = open_remote_dataset(dataset, Path(folder), max_bytes=0) if is_url(dataset) else open_dataset(Path(dataset))
        found = count_lengths(index, split)
    title = f"{dataset}, {split}"
    print(f"{title}: tokens a document, its EOS included")
    print("\n".join(describe(found, sequence_length)))
    if plot_file is not None:
        plot(found, plot_file, title, sequence_length)
        print(f"\ndrawn in {plot_file}")


def open_run(config_file: Path, settings: list[str]) -> RunStream:
    """The stream of the run whose config that is; checkpoints beside it win over those of its run_dir, which may have moved."""
    config = parse_run_config(["--config", str(config_file), *settings])
    beside = config_file.parent / "checkpoints"
    return RunStream(config, beside if beside.is_dir() else config.run_dir / "checkpoints")


def run(args: argparse.Namespace, settings: list[str]) -> None:
    if args.command == "lengths":
        if settings:
            raise ValueError(f"lengths looks at a dataset, not at a run, and takes no {settings[0]}.")
        return show_lengths(args.dataset, args.split, args.sequence_length, args.plot)
    stream = open_run(args.config, settings)
    if args.command == "shares":
        length = stream.config.data.sequence_length
        start = args.start if args.start_tokens is None else args.start_tokens // length
        end = args.end if args.end_tokens is None else -(-args.end_tokens // length)
        return show_shares(stream, start or 0, stream.end if end is None else end)
    if args.count is not None and args.count < 1:
        raise ValueError(f"--count is {args.count}; it must be at least 1.")
    if args.command == "at":
        positions = range(args.position, args.position + (args.count or 1))
    else:
        batch = stream.positions_of(args.step)
        positions = range(batch.start, batch.end)[: args.count]
    return show_sequences(stream, positions, args.tokens)


def split_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's own arguments, and settings of the run, apart: a setting's value must not be taken for a position."""
    own, settings = [], []
    left = iter(arguments)
    for argument in left:
        name, equals, _ = argument.partition("=")
        if name.startswith("--") and name[2:].split(".")[0] in RunConfig.__dataclass_fields__:
            settings += [argument] if equals else [argument, *([value] if (value := next(left, None)) is not None else [])]
        else:
            own.append(argument)
    return own, settings


def main(arguments: Sequence[str] | None = None) -> int:
    own, settings = split_settings(sys.argv[1:] if arguments is None else arguments)
    args = _parser().parse_args(own)
    try:
        run(args, settings)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain at its exit
    except (ValueError, OSError, DatasetError, CheckpointError, TokenizerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, about: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=about, description=f"Prints {about}.", allow_abbrev=False)

    at = command("at", "the sequences from a position of the training stream on, decoded, and where they lie")
    at.add_argument("position", type=int, help="of the first sequence, from 0")
    step = command("step", "the sequences that an optimizer step read, decoded, and where they lie")
    step.add_argument("step", type=int, help="its number, as logged")
    shares = command("shares", "how much of each source a stretch of the stream reads")
    first, last = shares.add_mutually_exclusive_group(), shares.add_mutually_exclusive_group()
    first.add_argument("--from", dest="start", type=int, metavar="POSITION", help="the first position (default: 0)")
    first.add_argument("--from-tokens", dest="start_tokens", type=int, metavar="TOKENS", help="the same in tokens of training")
    last.add_argument("--to", dest="end", type=int, metavar="POSITION", help="the position after the last (default: the end of the run)")
    last.add_argument("--to-tokens", dest="end_tokens", type=int, metavar="TOKENS", help="the same in tokens of training")
    for reader, count in ((at, "1"), (step, "the whole batch")):
        reader.add_argument("--count", type=int, help=f"how many sequences (default: {count})")
        reader.add_argument("--tokens", action="store_true", help="print the tokens' numbers instead of their text")
    for reader in (at, step, shares):
        reader.add_argument("--config", type=Path, required=True, help="RUN_DIR/config.yaml, or the YAML that train.py is given")
    lengths = command("lengths", "how long the documents of a dataset are")
    lengths.add_argument("dataset", help="a directory that prepare_data.py wrote, or its URL, from which every shard is then read")
    lengths.add_argument("--split", choices=SPLITS, default="train", help="default: %(default)s")
    lengths.add_argument("--sequence-length", type=int, help="also the share of the documents that are longer")
    lengths.add_argument("--plot", type=Path, metavar="FILE", help="also draw them there: .png, .pdf, .svg")
    return parser


if __name__ == "__main__":
    sys.exit(main())
