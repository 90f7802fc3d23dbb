import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools import duplicates
from tools.duplicates import COUNTS, Duplicates, HashRuns, discard_runs, find_duplicates, text_hashes


def find(directory: Path, tasks: list[list[str]]) -> list[list[bool]]:
    """For each document whether it repeats an earlier one."""
    runs = HashRuns(directory)
    for texts in tasks:
        runs.add(text_hashes(texts))
    runs.write_run()
    assert all(0 < share <= 1 for share in find_duplicates(directory, runs.runs, runs.documents))
    discard_runs(directory)
    found = Duplicates(directory)
    return [found.next_task().tolist() for _ in tasks]


def expected(tasks: list[list[str]]) -> list[list[bool]]:
    texts = [text for task in tasks for text in task]
    repeated = iter([text in texts[:number] for number, text in enumerate(texts)])
    return [[next(repeated) for _ in task] for task in tasks]


@settings(deadline=None, max_examples=50)
@given(
    tasks=st.lists(st.lists(st.text("abc", min_size=1, max_size=2), max_size=12), max_size=12),
    run_documents=st.integers(1, 20),
)
def test_all_but_the_first_of_equal_texts_are_found_whatever_the_runs(
    tmp_path_factory: pytest.TempPathFactory, tasks: list[list[str]], run_documents: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "RUN_DOCUMENTS", run_documents)
        assert find(tmp_path_factory.mktemp("hashes"), tasks) == expected(tasks)


def test_hashes_that_share_a_half_are_not_equal(tmp_path: Path) -> None:
    runs = HashRuns(tmp_path)
    runs.add(np.array([[1, 2], [1, 3], [4, 2], [1, 2]], np.uint64))
    runs.write_run()
    list(find_duplicates(tmp_path, runs.runs, runs.documents))
    assert Duplicates(tmp_path).next_task().tolist() == [False, False, False, True]


def test_one_can_begin_at_any_task(tmp_path: Path) -> None:
    tasks = [["a", "b"], [], ["a"], ["c", "b", "d"]]
    find(tmp_path, tasks)
    for start in range(len(tasks) + 1):
        found = Duplicates(tmp_path, start)
        assert [found.next_task().tolist() for _ in tasks[start:]] == expected(tasks)[start:]


def test_what_followed_the_last_run_is_forgotten_by_the_next_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "RUN_DOCUMENTS", 2)
    first = HashRuns(tmp_path)
    assert first.add(text_hashes(["a", "b"]))
    with open(tmp_path / COUNTS, "ab") as counts:  # of a run that was cut short
        counts.write(b"\1\0\0\0")
    second = HashRuns(tmp_path, first.runs, first.tasks, first.documents)
    assert not second.add(text_hashes(["b"]))
    second.write_run()
    list(find_duplicates(tmp_path, second.runs, second.documents))
    found = Duplicates(tmp_path)
    assert [found.next_task().tolist() for _ in range(2)] == [[False, False], [True]]


PRINT_PEAK_MEMORY = """
import sys
from pathlib import Path
import numpy as np
from tools import duplicates
duplicates.RUN_DOCUMENTS = 1 << 15
runs = duplicates.HashRuns(Path(sys.argv[1]))
for task in range(int(sys.argv[2])):
    hashes = np.random.default_rng(task).integers(0, 1 << 63, (1 << 12, 2), np.uint64)
    hashes[::2] = 7  # one text makes half of the corpus
    runs.add(hashes)
runs.write_run()
for _ in duplicates.find_duplicates(Path(sys.argv[1]), runs.runs, runs.documents):
    pass
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_memory_does_not_grow_with_the_documents(tmp_path: Path) -> None:
    peaks = []
    for tasks in (10, 300):  # 40 thousand documents and 1.2 million
        command = [sys.executable, "-c", PRINT_PEAK_MEMORY, str(tmp_path / str(tasks)), str(tasks)]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout) * 1024)
    assert peaks[1] < peaks[0] + 4_000_000
