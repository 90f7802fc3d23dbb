"""One interface over the two tokenizers: SentencePiece BPE (`tokenizer.model`) and GPT-2's BPE (`encoder.json`, `vocab.bpe`).

Responsible for loading from a local directory, encoding and decoding; not for training (`train.py`). The one fact to know: special
pieces never come out of `encode`. Text that spells `<|endoftext|>` is encoded as ordinary characters; only code that puts documents
together adds `eos_id`.
"""

import io
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from tokenizer.fingerprint import files_sha256

SENTENCEPIECE_FILES = ("tokenizer.model",)
GPT2_FILES = ("encoder.json", "vocab.bpe")
END_OF_TEXT = "<|endoftext|>"


class TokenizerError(Exception):
    """A tokenizer directory that cannot be used; the message is for a person."""


class Tokenizer(ABC):
    """Text to ids and back.

    Attributes:
        files: what the tokenizer was loaded from, in the order in which they are hashed.
        vocab_size: number of ids, without padding for the hardware.
        eos_id: ends every document in training; an empty prompt starts with it.
        pad_id: fills up batches; equal to `eos_id` where the vocabulary has no padding piece.
    """

    files: list[Path]
    vocab_size: int
    eos_id: int
    pad_id: int

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without any special id."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""

    @property
    def fingerprint(self) -> str:
        return files_sha256(self.files)


class SentencePieceTokenizer(Tokenizer):
    """A `tokenizer.model` as `tokenizer/train.py` writes it. decode(encode(x)) == x but for a literal U+2581, its mark for a space."""

    def __init__(self, directory: Path) -> None:
        self.files = [directory / name for name in SENTENCEPIECE_FILES]
        try:
            self._processor = SentencePieceProcessor(model_proto=self.files[0].read_bytes())
        except RuntimeError as error:
            raise TokenizerError(f"{self.files[0]} is not a SentencePiece model ({error}); restore or train it again") from error
        self.vocab_size = self._processor.get_piece_size()
        self.eos_id = self._processor.eos_id()
        if self.eos_id < 0:
            raise TokenizerError(f"{self.files[0]} has no end-of-sentence piece, which must end each document: train it with one")
        self.pad_id = self._processor.pad_id() if self._processor.pad_id() >= 0 else self.eos_id
        self._lines_are_independent = self._check_lines_are_independent()

    def encode(self, text: str) -> list[int]:
        if not self._lines_are_independent:
            return self._processor.encode(text)
        lines = list(io.StringIO(text, newline="\n"))  # ends lines at "\n" only, where str.splitlines knows ten other characters
        return [token for ids in self._processor.encode(lines, num_threads=1) for token in ids]

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode(list(ids))

    def _check_lines_are_independent(self) -> bool:
        """Whether a text's ids are those of its lines put together, as for our settings: encoding by line is twice as fast."""
        probe = [" a\n", "\n", "  b  c\n", "d "]
        by_line = [token for ids in self._processor.encode(probe) for token in ids]
        newline_pieces = any("\n" in self._processor.id_to_piece(token) for token in range(self.vocab_size))
        return by_line == self._processor.encode("".join(probe)) and not newline_pieces


class GPT2Tokenizer(Tokenizer):
    """OpenAI's byte-level BPE from its two files. decode(encode(x)) == x for any text."""

    def __init__(self, directory: Path) -> None:
        self.files = [directory / name for name in GPT2_FILES]
        vocabulary, merges = map(str, self.files)
        try:
            self._tokenizer = FastTokenizer(models.BPE.from_file(vocabulary, merges))
        except Exception as error:  # the class that `tokenizers` raises is Exception itself
            raise TokenizerError(f"{vocabulary} and {merges} are not a BPE vocabulary ({error}); copy them again") from error
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        self.vocab_size = self._tokenizer.get_vocab_size()
        eos_id = self._tokenizer.token_to_id(END_OF_TEXT)
        if eos_id is None:
            raise TokenizerError(f"{vocabulary} has no {END_OF_TEXT}, which must end each document")
        self.eos_id = self.pad_id = eos_id

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer whose files lie in `directory`.

    Raises:
        TokenizerError: the directory holds neither kind, or damaged files.
    """
    directory = Path(directory)
    kinds: list[tuple[tuple[str, ...], type[SentencePieceTokenizer] | type[GPT2Tokenizer]]] = [
        (SENTENCEPIECE_FILES, SentencePieceTokenizer),
        (GPT2_FILES, GPT2Tokenizer),
    ]
    for names, kind in kinds:
        if all((directory / name).is_file() for name in names):
            return kind(directory)
    raise TokenizerError(
        f"no tokenizer in {directory}: expected {' and '.join(SENTENCEPIECE_FILES)} (made by tokenizer/train.py) or "
        f"{' and '.join(GPT2_FILES)} (GPT-2's)"
    )
