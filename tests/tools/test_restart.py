"""`prepare_data.py` killed with SIGKILL, and started again. One process, forked for each run, so that ten moments take seconds."""

import fcntl
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tools.test_prepare_data import files
from tokenizer import documents
from tools import duplicates
from tools.prepare_data import main

SIZES = ["--block-tokens", "1500", "--shard-tokens", "4000", "--validation-fraction", "0.2", "--deduplicate", "--processes", "1"]
CHUNK_BYTES, RUN_DOCUMENTS = 5_000, 60  # several tasks and runs

# Reads lines of JSON [arguments, event]: runs the command in a child that is killed at that event (0: never), and answers how it ended and
# the number of events. An event is whatever changes the disk: a file or folder opened, renamed, removed, synced, or part of a shard.
RUNS = f"""
import json, os, signal, sys
from tokenizer import documents
from tools import duplicates, shard_writer
from tools.prepare_data import main

documents.CHUNK_BYTES, duplicates.RUN_DOCUMENTS = {CHUNK_BYTES}, {RUN_DOCUMENTS}
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")

def run(arguments, last):
    events = 0
    def count(*_):
        nonlocal events
        events += 1
        if events == last:
            os.kill(os.getpid(), signal.SIGKILL)
    def counted(function):
        def call(*arguments):
            count()
            return function(*arguments)
        return call
    os.fsync = count  # only a machine that loses its power needs more, and disks take their time
    shard_writer._ShardFile.append = counted(shard_writer._ShardFile.append)
    sys.addaudithook(lambda name, _: count() if name in EVENTS else None)
    code = main(arguments)
    return code, events

for line in sys.stdin:
    arguments, last = json.loads(line)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        sys.stdout = sys.stderr
        code, events = run(arguments, last)
        os.write(writer, str(events).encode())
        os._exit(code)
    os.close(writer)
    events = os.read(reader, 100)
    os.close(reader)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(events or last)]), flush=True)
"""

Run = Callable[..., tuple[int, int]]


@pytest.fixture
def arguments(corpus: Path, tokenizer_directory: Path, tmp_path: Path) -> list[str]:
    """Of the command on a small corpus of two files, one of which holds copies of documents of the other."""
    lines = corpus.read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(lines[:300]))
    (tmp_path / "b.jsonl").write_text("".join(lines[200:400]))
    return ["--input", str(tmp_path / "*.jsonl"), "--tokenizer", str(tokenizer_directory), *SIZES]


@pytest.fixture
def run_killed_at(arguments: list[str], tmp_path: Path) -> Iterator[Run]:
    """Runs the command into a folder of tmp_path, killed at an event; returns exit code and number of events."""
    command = [sys.executable, "-c", RUNS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdin and process.stdout

        def run(event: int, output: str) -> tuple[int, int]:
            assert process.stdin and process.stdout
            process.stdin.write(json.dumps([[*arguments, "--output", str(tmp_path / output)], event]) + "\n")
            process.stdin.flush()
            code, events = json.loads(process.stdout.readline())
            return code, events

        yield run
        process.stdin.close()


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the processes of `run_killed_at`: part of where a state can be gone on from."""
    monkeypatch.setattr(documents, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(duplicates, "RUN_DOCUMENTS", RUN_DOCUMENTS)


def test_killed_at_ten_moments_and_started_again_the_bytes_are_the_same(run_killed_at: Run, tmp_path: Path) -> None:
    code, events = run_killed_at(0, "whole")
    assert code == 0
    whole = files(tmp_path / "whole")
    gone_on = 0
    for moment in range(10):
        name, event = str(moment), 1 + (events - 1) * moment // 9
        assert run_killed_at(event, name)[0] == -signal.SIGKILL
        gone_on += (tmp_path / name / ".work" / "encoding.state").exists()
        run_killed_at(event // 3 + 1, name)  # and again, on the way
        is_complete = (tmp_path / name / "index.json").exists()
        assert run_killed_at(0, name)[0] == (1 if is_complete else 0)
        assert files(tmp_path / name) == whole, f"killed at event {event} of {events}"
    assert gone_on >= 3


@pytest.mark.usefixtures("small_steps")
def test_another_number_of_processes_may_go_on(
    run_killed_at: Run, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, events = run_killed_at(0, "whole")
    run_killed_at(events * 3 // 4, "out")
    assert main([*arguments, "--output", str(tmp_path / "out"), "--processes", "2"]) == 0
    assert "going on after" in capsys.readouterr().out
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.fixture
def stopped(run_killed_at: Run, small_steps: None, arguments: list[str], tmp_path: Path) -> list[str]:
    """The arguments of a command that was killed when most of its shards were finished."""
    _, events = run_killed_at(0, "whole")
    run_killed_at(events * 3 // 4, "out")
    return [*arguments, "--output", str(tmp_path / "out")]


def test_a_finished_shard_that_was_damaged_is_named(stopped: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = tmp_path / "out" / ".partial" / "train-00001.tar"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert main(stopped) == 1
    error = capsys.readouterr().err
    assert f"{shard} is damaged: sha256 expected" in error and "remove .work and .partial" in error


def test_shards_of_later_than_the_checkpoint_do_not_reach_the_dataset(stopped: list[str], tmp_path: Path) -> None:
    (tmp_path / "out" / ".partial" / "train-00099.tar").write_bytes(b"of a corpus that was longer")
    assert main(stopped) == 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")


CHANGES = {
    "a setting": (["--source", "other"], "with source 'text', and now it is 'other'"),
    "a filter": (["--min-characters", "20"], "with --min-characters 1, and now it is 20"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_other_settings_are_refused_by_name(stopped: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    changed, message = CHANGES[case]
    assert main([*stopped, *changed]) == 1
    assert message in capsys.readouterr().err
    assert main(stopped) == 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_corpus_that_changed_is_refused_by_the_name_of_the_file(
    stopped: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write('{"text": "more"}\n')
    assert main(stopped) == 1
    assert f"since then {tmp_path}/a.jsonl was changed or removed" in capsys.readouterr().err


def test_a_command_at_work_is_left_alone(stopped: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(tmp_path / "out")
    with open(tmp_path / "out" / ".work" / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(stopped) == 1
    assert "another command is at work" in capsys.readouterr().err
    assert files(tmp_path / "out") == before


@pytest.mark.usefixtures("small_steps")
def test_an_error_keeps_what_was_finished_and_a_mended_corpus_goes_on(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [argument for argument in arguments if argument != "--deduplicate"]
    last = tmp_path / "c.jsonl"
    last.write_text('{"text": "fine"}\n{"text": "cut')
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert f"{last}, line 2: not JSON" in error and "what was finished is kept" in error
    last.write_text('{"text": "fine"}\n{"text": "not cut"}\n')
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    assert "going on after" in capsys.readouterr().out
    assert main([*arguments, "--output", str(tmp_path / "whole")]) == 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")
