"""Trains a SentencePiece BPE vocabulary on a corpus and writes `DIR/tokenizer.model`.

The settings keep decode(encode(x)) == x for any text (but a literal U+2581): identity normalisation, no dummy prefix, bytes for what
the vocabulary lacks. There is no beginning-of-sentence piece: training never emits one. SentencePiece holds the corpus in memory;
a sample of a few hundred MB is enough for any vocabulary. Example:

    python tokenizer/train.py --input corpus/ --output data/tokenizer --vocab-size 32000
"""

import argparse
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceTrainer

# As a script this file's folder comes first on the path, where tokenizer.py hides the package of that name.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tokenizer.corpus import CorpusFile, add_corpus_arguments, find_files, read_options
from tokenizer.decoding import CorpusError, ReadOptions
from tokenizer.documents import read_documents
from tokenizer.tokenizer import END_OF_TEXT, SENTENCEPIECE_FILES, TokenizerError

SETTINGS: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "split_digits": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "allow_whitespace_only_pieces": True,
    "max_sentence_length": 16384,  # bytes; longer lines are left out of training
    # Special pieces, spelled as no text spells them. SentencePiece never matches them in text.
    "unk_id": 0,
    "unk_piece": "<|unk|>",
    "eos_id": 1,
    "eos_piece": END_OF_TEXT,
    "pad_id": 2,
    "pad_piece": "<|pad|>",
    "bos_id": -1,
    "minloglevel": 2,
}


def train_tokenizer(files: Sequence[CorpusFile], vocab_size: int, options: ReadOptions) -> bytes:
    """The model file's bytes; a function of the arguments and the files' text.

    Raises:
        CorpusError: the corpus has no text, or cannot be read.
        TokenizerError: the corpus does not allow a vocabulary of this size.
    """
    lines = _Lines(files, options)
    first = next(lines.read(), None)
    if first is None:
        raise CorpusError(f"no text in {', '.join(file.name for file in files[:3])}{' ...' if len(files) > 3 else ''}: nothing to train on")
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(sentence_iterator=lines.read(), model_writer=model, vocab_size=vocab_size, **SETTINGS)
    except RuntimeError as error:
        if lines.error is not None:
            raise lines.error from None
        reason = str(error).rpartition("] ")[2] or str(error)
        raise TokenizerError(f"SentencePiece cannot make {vocab_size} pieces from this corpus: {reason}") from error
    return model.getvalue()


class _Lines:
    """The corpus by line; keeps the error that ended it, which SentencePiece turns into a RuntimeError of its own."""

    def __init__(self, files: Sequence[CorpusFile], options: ReadOptions) -> None:
        self.files, self.options = files, options
        self.error: CorpusError | None = None

    def read(self) -> Iterator[str]:
        try:
            for file in self.files:
                for document in read_documents(file, self.options):
                    yield from filter(None, document.text.split("\n"))
        except CorpusError as error:
            self.error = error
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_corpus_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="gets tokenizer.model")
    parser.add_argument("--vocab-size", type=int, default=32000, metavar="N", help="pieces, with the special ones (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace a tokenizer that is already there")
    args = parser.parse_args(arguments)

    path = args.output / SENTENCEPIECE_FILES[0]
    try:
        if path.exists() and not args.overwrite:
            raise TokenizerError(f"{path} exists; pass --overwrite to replace it, or another --output")
        files = find_files(args.input, args.pattern, args.exclude)
        megabytes = sum(file.size for file in files if file.size > 0) / 1e6
        print(f"training {args.vocab_size} pieces on {len(files)} files, {megabytes:.1f} MB", flush=True)
        model = train_tokenizer(files, args.vocab_size, read_options(args))
        args.output.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".partial")
        unfinished.write_bytes(model)
        os.replace(unfinished, path)
    except (CorpusError, TokenizerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
