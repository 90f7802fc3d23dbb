"""A Slurm of two nodes on this machine, and jobs of the scripts in `slurm/`."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.ranks import REPOSITORY

PACKAGES = "apt-get install --yes --no-install-recommends slurmctld slurmd slurm-client munge"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
LIMIT = 240  # seconds
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
ENDED = ("COMPLETED", "FAILED", "CANCELLED")


def installed() -> bool:
    return all(shutil.which(program, path=PATH) for program in PROGRAMS)


class LocalSlurm:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._environment = os.environ | {
            "LOCAL_SLURM_DIR": str(directory),
            "SLURM_CONF": str(directory / "slurm.conf"),
            "PATH": PATH,
            "PYTHON": sys.executable,
        }

    def __call__(self, *command: object, check: bool = True, environment: Mapping[str, object] | None = None) -> str:
        """What a command that speaks to this Slurm prints."""
        ended = subprocess.run(
            [str(word) for word in command],
            cwd=REPOSITORY,
            env=self._environment | {name: str(value) for name, value in (environment or {}).items()},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert ended.returncode == 0 or not check, f"{command} ended with {ended.returncode}: {ended.stdout}{ended.stderr}"
        return ended.stdout.strip()

    def script(self, action: str) -> str:
        return self("launchers/local_slurm.sh", action)

    def submit(self, folder: Path, arguments: Sequence[object], settings: Mapping[str, object]) -> "Job":
        """A job at work in folder/run; what it prints is in folder/out-ID.

        Args:
            arguments: of sbatch: its options, a script of `slurm/` and the script's arguments.
            settings: of the script, in the environment.
        """
        run_dir = folder / "run"
        output = f"--output={folder}/out-%j"
        number = self("sbatch", "--parsable", output, *arguments, environment={"RUN_DIR": run_dir, **settings})
        return Job(self, number, run_dir, folder / f"out-{number}")


@dataclass
class Job:
    slurm: LocalSlurm
    number: str
    run_dir: Path
    output: Path
    _hurried: set[str] = field(default_factory=set)

    def __getitem__(self, name: str) -> str:
        """JobState, Restarts, ... as Slurm shows them now."""
        found = re.search(rf"\b{name}=(\S+)", self.slurm("scontrol", "--oneliner", "show", "job", self.number))
        assert found, name
        return found[1]

    @property
    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def rank(self, rank: int = 0, start: int = 0) -> str:
        """What a rank printed in the given start of the job."""
        path = self.run_dir / "logs" / f"{self.number}.{start}.rank{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_step(self, step: int, start: int = 0) -> None:
        self.wait_until(lambda: f"step {step}/" in self.rank(0, start))

    def wait_until(self, true: Callable[[], bool]) -> None:
        """A requeued job's two minutes of waiting are cut short, as an operator can; not to nothing, or the nodes take the new start
        for the one that was revoked."""
        deadline = time.monotonic() + LIMIT
        while not true():
            assert time.monotonic() < deadline, self.text + self.rank()[-4000:]
            if self["Reason"] == "BeginTime" and self["Restarts"] not in self._hurried:
                self._hurried.add(self["Restarts"])
                self.slurm("scontrol", "update", f"JobId={self.number}", "StartTime=now+2", check=False)
            time.sleep(0.1)

    def end(self) -> str:
        """The state in which it ends."""
        self.wait_until(lambda: self["JobState"] in ENDED)
        return self["JobState"]
