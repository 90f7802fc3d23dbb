"""The sampling command, on a small exported model with random weights."""

import sys
from pathlib import Path

import pytest
import torch

from tests.reference import random_parameters
from tests.tools.exported import small_config, train_small_tokenizer, write_checkpoint
from tools import generate
from tools.convert_to_hf import convert

PROMPT = "def main("


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    tokenizer = train_small_tokenizer(folder / "tokenizer", vocab_size=400)
    config = small_config(vocab_size=400)
    parameters = random_parameters(config, 0, torch.float32)
    parameters["embedding.tokens.weight"] *= 0.1  # else the last token, through the tied head, is always the likeliest next one
    checkpoint = write_checkpoint(folder / "step_00000007", config, parameters, tokenizer)
    convert(checkpoint, folder / "exported", torch.float32, tokenizer)
    return folder / "exported"


@pytest.fixture
def command(exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> "Command":
    return Command(exported, monkeypatch, capsys)


class Command:
    def __init__(self, exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.exported, self.monkeypatch, self.capsys = exported, monkeypatch, capsys

    def text(self, *arguments: str) -> str:
        """What the command prints."""
        status, out, err = self.run(*arguments)
        assert status == 0, err
        return out

    def run(self, *arguments: str, directory: Path | None = None) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["generate.py", str(directory or self.exported), "--max-new-tokens", "12", *arguments])
        self.capsys.readouterr()
        return (generate.main(), *self.capsys.readouterr())


def test_the_prompt_is_continued(command: Command) -> None:
    text = command.text("--prompt", PROMPT)
    assert text.startswith(PROMPT) and len(text) > len(PROMPT) + 1


def test_a_seed_gives_the_same_text_again_and_another_one_another(command: Command) -> None:
    first, again, other = (command.text("--prompt", PROMPT, "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again != other


def test_greedy_ignores_the_seed_and_equals_top_1(command: Command) -> None:
    greedy = command.text("--prompt", PROMPT, "--greedy", "--seed", "1")
    assert greedy == command.text("--prompt", PROMPT, "--greedy", "--seed", "2") == command.text("--prompt", PROMPT, "--top-k", "1")


def test_a_low_temperature_is_greedy(command: Command) -> None:
    assert command.text("--prompt", PROMPT, "--temperature", "0.001") == command.text("--prompt", PROMPT, "--greedy")


def test_num_steps_changes_the_text(command: Command) -> None:
    full, default, early = (
        command.text("--prompt", PROMPT, "--greedy", *steps) for steps in (["--num-steps", "3"], [], ["--num-steps", "0"])
    )
    assert full == default != early


def test_an_empty_prompt_starts_a_document(command: Command) -> None:
    assert command.text().strip()


def test_more_tokens_than_the_model_takes_is_an_error_that_says_how_many_fit(command: Command) -> None:
    status, _, err = command.run("--max-new-tokens", "48")
    assert status == 1 and "lower --max-new-tokens to at most 47" in err
    status, _, err = command.run("--prompt", "x " * 60)
    assert status == 1 and "shorten the prompt" in err


def test_a_directory_without_a_model_is_named(command: Command, tmp_path: Path) -> None:
    status, _, err = command.run(directory=tmp_path)
    assert status == 1 and f"{tmp_path} is not an exported model" in err


@pytest.mark.parametrize("arguments", [["--num-steps", "-1"], ["--temperature", "0.0"], ["--top-k", "-2"], ["--max-new-tokens", "0"]])
def test_impossible_settings_end_with_usage(command: Command, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.run(*arguments)
    assert stopped.value.code == 2
    assert f"{arguments[0]} is {arguments[1]}" in command.capsys.readouterr().err
