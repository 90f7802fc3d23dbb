"""The demo's promises around the real run: it overwrites nothing, and its summary claims no more than the numbers show."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launchers.demo import below_unigram, depth_verdict, entropy, main, run_part


def test_a_folder_that_exists_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(SystemExit, match=f"{tmp_path} exists"):
        main(["--output", str(tmp_path)])
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]


def test_a_command_is_printed_so_that_it_can_be_copied(capfd: pytest.CaptureFixture[str]) -> None:
    run_part(sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])", threads=3)
    command, output = capfd.readouterr().out.strip().splitlines()
    assert command.startswith("$ OMP_NUM_THREADS=3 ")
    assert subprocess.run(["bash", "-c", command[2:]], capture_output=True, text=True, check=True).stdout.strip() == output == "3"


def test_a_failed_command_stops_the_demo() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        run_part(sys.executable, "-c", "raise SystemExit(3)")


def test_the_entropy_of_equal_counts_is_the_logarithm_of_their_number() -> None:
    assert entropy(torch.tensor([5.0, 5.0, 0.0, 5.0, 5.0], dtype=torch.float64)) == pytest.approx(math.log(4))


@pytest.mark.parametrize(
    ("core_gain", "depth_gain", "verdict"),
    [
        (0.002, 0.001, "The core is of no use yet"),
        (-0.2, 0.3, "The core is of no use yet"),
        (0.4, 0.005, "does not show that recurrence pays"),
        (0.4, -0.1, "does not show that recurrence pays"),
        (0.4, 0.1, "Depth pays"),
    ],
)
def test_depth_is_said_to_pay_only_where_more_recurrences_lower_the_loss(core_gain: float, depth_gain: float, verdict: str) -> None:
    assert verdict in depth_verdict(core_gain, depth_gain, full=6)


def test_a_loss_above_the_unigram_entropy_is_no_success() -> None:
    assert "uses context" in below_unigram(3.0, 5.5)
    assert "not learned" in below_unigram(6.0, 5.5)
