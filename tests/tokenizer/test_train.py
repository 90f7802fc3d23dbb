import subprocess
import sys
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor

from tokenizer import train
from tokenizer.corpus import local_file
from tokenizer.decoding import ReadOptions
from tokenizer.train import main, train_tokenizer


def test_special_pieces_are_spelled_as_no_text_is_and_there_is_no_bos(tokenizer_directory: Path) -> None:
    processor = SentencePieceProcessor(model_file=str(tokenizer_directory / "tokenizer.model"))
    ids = processor.unk_id(), processor.eos_id(), processor.pad_id()
    assert [processor.id_to_piece(i) for i in ids] == ["<|unk|>", "<|endoftext|>", "<|pad|>"]
    assert processor.bos_id() == -1


def test_a_corpus_full_of_special_spellings_does_not_break_training(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one <|endoftext|> two <|pad|> three <|unk|> four\n" * 500)
    model = train_tokenizer([local_file(text)], 290, ReadOptions())
    processor = SentencePieceProcessor(model_proto=model)
    assert processor.eos_id() not in processor.encode("<|endoftext|>")


def test_the_same_corpus_gives_the_same_bytes(corpus: Path) -> None:
    assert train_tokenizer([local_file(corpus)], 400, ReadOptions()) == train_tokenizer([local_file(corpus)], 400, ReadOptions())


@pytest.mark.parametrize(
    ("text", "vocab_size", "message"),
    [
        ("", "400", "nothing to train on"),
        ("\n\n", "400", "nothing to train on"),
        ("few words\n", "5000", "cannot make 5000 pieces from this corpus: Vocabulary size too high"),
        ("few words\n", "100", "cannot make 100 pieces from this corpus: Vocabulary size is smaller"),
    ],
)
def test_a_corpus_that_does_not_do_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, vocab_size: str, message: str
) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert main(["--input", str(tmp_path), "--output", str(tmp_path / "out"), "--vocab-size", vocab_size]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_bytes_that_are_not_utf8_are_named_with_their_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\nna\xefve")
    assert main(["--input", str(tmp_path), "--output", str(tmp_path / "out")]) == 1
    assert f"{tmp_path}/a.txt is not UTF-8: byte 0xef at offset 7" in capsys.readouterr().err


def test_an_existing_tokenizer_is_kept_unless_told(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "tokenizer.model"
    model.write_bytes(b"precious")
    arguments = ["--input", str(corpus), "--output", str(tmp_path), "--vocab-size", "400"]
    assert main(arguments) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert model.read_bytes() == b"precious"
    assert main([*arguments, "--overwrite"]) == 0
    assert model.read_bytes() != b"precious"


def test_the_command_runs_as_a_script(tmp_path: Path, corpus: Path) -> None:
    command = [sys.executable, train.__file__, "--input", str(corpus), "--output", str(tmp_path), "--vocab-size", "400"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tokenizer.model").exists()
