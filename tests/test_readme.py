"""The README's commands exist, and take the options that the README gives them."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def commands() -> list[str]:
    """Indented command lines, continuation lines joined."""
    text = (REPOSITORY / "README.md").read_text().replace(" \\\n", " ")
    return [line.strip() for line in text.splitlines() if re.match(r"    (make|python|deepspeed|sbatch|source) ", line)]


def python_commands() -> list[list[str]]:
    """[script, argument, ...] of the commands that run a Python file of this repository."""
    words = [shlex.split(line, comments=True) for line in commands()]
    return [line[1:] for line in words if line[0] in ("python", "deepspeed")]


def test_there_are_commands_of_each_kind() -> None:
    starts = {line.split()[0] for line in commands()}
    assert starts == {"make", "python", "deepspeed", "sbatch", "source"}


@pytest.mark.parametrize("script", sorted({words[0] for words in python_commands()}))
def test_script_takes_the_options_that_the_readme_gives(script: str) -> None:
    shown = subprocess.run([sys.executable, script, "--help"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for words in python_commands():
        if words[0] == script:
            for option in (word for word in words if word.startswith("--")):
                assert re.search(rf"{re.escape(option)}\b", shown), option


def test_files_that_the_readme_names_exist() -> None:
    text = (REPOSITORY / "README.md").read_text()
    for path in re.findall(r"\b(?:pretrain|model|tools|tokenizer|configs|slurm|launchers|tests)/[\w/]+\.(?:py|yaml|json|sh)\b", text):
        assert (REPOSITORY / path).is_file(), path


def test_no_placeholder_is_left() -> None:
    assert not re.search(r"\b[A-Z]{3,}_[A-Z]{3,}\b(?<!RUN_DIR)", (REPOSITORY / "README.md").read_text())


def test_make_targets_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for line in commands():
        if line.startswith("make "):
            assert re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE), line
