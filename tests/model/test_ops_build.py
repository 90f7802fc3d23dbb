"""The build of the gate operators' library: with real compilers, on the real sources once and on one-line sources where a build must fail.

Where a build has to be caught in the middle, its source includes a named pipe: the compiler waits until the test writes to it.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from model.ops import build as ops_build
from model.ops.build import NAME, Tools, architectures, build, covers, cuda_architectures, find, library_path, main

REPOSITORY = Path(__file__).parents[2]
NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not on the PATH")


@pytest.fixture(scope="module", autouse=True)
def world() -> None:
    """No layers here, so no world for them."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """The real sources, built: folder of libraries, library, what was printed."""
    libraries = tmp_path_factory.mktemp("libraries")
    result = subprocess.run(command(ops_build.SOURCES, libraries), cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return libraries, library_path(libraries=libraries), result.stdout


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Sources that take no time."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.cpp").write_text('extern "C" int answer() { return 42; }\n')
    return folder


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    return tmp_path / "libraries"


@pytest.fixture
def pipe(tmp_path: Path, sources: Path) -> Iterator[Path]:
    """Sources that wait in the middle, until the pipe is opened for writing and closed."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (sources / "answer.cpp").write_text(f'#include "{pipe}"\nextern "C" int answer() {{ return 42; }}\n')
    yield pipe
    pipe.unlink()


def command(sources: Path, libraries: Path) -> list[str | Path]:
    """`python -m model.ops.build` with other folders."""
    main = "import sys; from pathlib import Path; from model.ops.build import main; sys.exit(main([], *map(Path, sys.argv[1:])))"
    return [sys.executable, "-c", main, sources, libraries]


def start(sources: Path, libraries: Path) -> subprocess.Popen[str]:
    # A test run in the background of a shell script has SIGINT ignored, and its children inherit that.
    hear_sigint = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        command(sources, libraries),
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_sigint,
    )


@contextmanager
def compiler_waiting(pipe: Path) -> Iterator[int]:
    """While a compiler waits for what is in the pipe; gives the end to write to."""
    deadline = time.monotonic() + 30
    while True:
        try:
            end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError as error:  # nobody reads yet
            assert error.errno == errno.ENXIO and time.monotonic() < deadline
            time.sleep(0.02)
    try:
        yield end
    finally:
        os.close(end)


def build_folders(libraries: Path) -> list[Path]:
    return list(libraries.glob(".build-*"))


def test_the_sources_build_with_a_line_for_each_and_nothing_else_is_left(built: tuple[Path, Path, str]) -> None:
    libraries, library, printed = built
    assert [path for path in libraries.rglob("*") if path.is_file()] == [library]
    assert "gate_cpu.cpp" in printed and "gate_ops.cpp" in printed
    assert printed.splitlines()[-1].startswith("Built in ") and f"{library}: CPU" in printed.splitlines()[-1]


def test_what_is_built_is_not_built_again(
    built: tuple[Path, Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    libraries, library, _ = built
    before = library.stat().st_ino
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main([], libraries=libraries) == 0
    assert capsys.readouterr().out.startswith(f"Already built: {library}: CPU")
    assert library.stat().st_ino == before


def test_a_damaged_library_is_not_found_and_is_built_again(sources: Path, libraries: Path) -> None:
    assert find(sources, libraries) is None
    assert main([], sources, libraries) == 0
    library = find(sources, libraries)
    assert library is not None
    content = library.read_bytes()
    flipped = bytes([content[1000] ^ 1])
    for damaged in (b"", b"text", content[: len(content) // 2], content[:1000] + flipped + content[1001:]):
        library.write_bytes(damaged)
        assert find(sources, libraries) is None
    assert main([], sources, libraries) == 0
    assert find(sources, libraries) == library


def test_force_builds_again(sources: Path, libraries: Path) -> None:
    library = library_path(sources, libraries)
    library.parent.mkdir(parents=True)
    library.write_text("damaged")
    (libraries / "build.log").write_text("of an earlier failure")
    assert main(["--force"], sources, libraries) == 0
    assert library.read_bytes().startswith(b"\x7fELF")
    assert list(libraries.iterdir()) == [library.parent]


def test_looking_for_the_library_imports_no_torch_and_takes_no_time() -> None:
    look = (
        "import sys, time; from model.ops.build import find; start = time.monotonic(); find(); "
        "print('torch' in sys.modules, time.monotonic() - start)"
    )
    result = subprocess.run([sys.executable, "-c", look], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    imported, seconds = result.stdout.split()
    assert imported == "False"
    assert float(seconds) < 0.5


def test_a_wheel_made_after_a_build_brings_the_library_with_its_operators(built: tuple[Path, Path, str], tmp_path: Path) -> None:
    checkout, installed = tmp_path / "checkout", tmp_path / "installed"
    checkout.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, checkout)
    shutil.copytree(REPOSITORY / "model", checkout / "model", ignore=shutil.ignore_patterns("lib", "__pycache__"))
    shutil.copytree(built[0], checkout / "model" / "ops" / "lib")
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        tmp_path,
        ".",
    ]
    subprocess.run(pip, cwd=checkout, check=True)
    shutil.rmtree(checkout)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(installed)
    use = (
        "import torch; from model.ops.build import find; print(find()); torch.ops.load_library(find()); "
        "print(torch.ops.grt.gate_head.default, torch.ops.grt.gate_tail.default)"
    )
    environment = os.environ | {"PYTHONPATH": str(installed)}
    used = subprocess.run([sys.executable, "-c", use], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    library = installed / "model" / "ops" / "lib" / built[1].relative_to(built[0])
    assert used.stdout.split() == [str(library), "grt.gate_head.default", "grt.gate_tail.default"]


def test_a_killed_build_blocks_nothing_and_the_next_removes_its_remains(
    sources: Path, libraries: Path, pipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    killed = start(sources, libraries)
    with compiler_waiting(pipe):
        killed.kill()
        killed.communicate()
        assert not library_path(sources, libraries).exists()
        assert len(build_folders(libraries)) == 1
        assert list(temporary.iterdir()) == []  # the compiler's own remains, which it would leave if it was killed too, lie in that folder
    pipe.unlink()
    pipe.touch()
    assert main([], sources, libraries) == 0
    assert library_path(sources, libraries).is_file()
    assert build_folders(libraries) == []


def test_two_builds_at_once_both_succeed(sources: Path, libraries: Path) -> None:
    builds = [start(sources, libraries) for _ in range(2)]
    for process in builds:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert output.splitlines()[-1].startswith("Built in ")
    assert build_folders(libraries) == []
    assert library_path(sources, libraries).is_file()


def test_an_interrupted_build_ends_its_compilers_and_leaves_nothing(sources: Path, libraries: Path, pipe: Path) -> None:
    interrupted = start(sources, libraries)
    with compiler_waiting(pipe) as end:
        interrupted.send_signal(signal.SIGINT)
        _, errors = interrupted.communicate(timeout=20)
        with pytest.raises(BrokenPipeError):  # nobody reads it any more
            os.write(end, b"\n")
    assert (interrupted.returncode, errors) == (130, "Interrupted. Nothing was built, and nothing is left to remove.\n")
    assert list(libraries.iterdir()) == []


def test_sources_that_change_during_the_build_give_no_library(sources: Path, libraries: Path, pipe: Path) -> None:
    process = start(sources, libraries)
    with compiler_waiting(pipe):
        (sources / "answer.h").write_text("// saved in the meantime\n")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"The files in {sources} changed while they were compiled. Build again." in errors
    assert list(libraries.iterdir()) == []


def test_a_compiler_error_is_shown_with_the_log(sources: Path, libraries: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sources / "broken.cpp").write_text("int answer() { return fourty_two; }\n")
    assert main([], sources, libraries) == 1
    shown = capsys.readouterr().err
    assert f"broken.cpp failed with status 1:\n\n    {sources}/broken.cpp:" in shown
    assert "error: 'fourty_two' was not declared in this scope" in shown
    log = libraries / "build.log"
    assert f"The command and all of its output: {log}" in shown
    assert "-std=c++20" in log.read_text() and "fourty_two" in log.read_text()
    assert list(libraries.iterdir()) == [log]


def test_a_library_that_cannot_be_loaded_is_not_put_in_place(sources: Path, libraries: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sources / "missing.cpp").write_text('extern "C" int nowhere(); int use() { return nowhere(); }\n')
    assert main([], sources, libraries) == 1
    shown = capsys.readouterr().err
    assert "trial load failed" in shown and "undefined symbol: nowhere" in shown
    assert not library_path(sources, libraries).exists()


@pytest.mark.parametrize(
    ("cxx", "message"),
    [("", "There is no C++ compiler: neither g++ nor c++ is on the PATH"), ("g+++ -m64", "CXX is 'g+++ -m64', and there is")],
)
def test_a_missing_compiler_is_named(
    cxx: str, message: str, sources: Path, libraries: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(sources))
    monkeypatch.setenv("CXX", cxx)
    assert main([], sources, libraries) == 1
    assert message in capsys.readouterr().err


def mounting(how: str, folder: Path) -> list[str | Path]:
    """The start of a command that sees `folder` so mounted, which needs no rights on most machines."""
    command: list[str | Path] = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        f'{how} && shift && exec "$@"',
        "sh",
        folder,
    ]
    if subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        pytest.skip("may not mount anything here")
    return command


def test_a_folder_that_may_not_be_written_is_named(sources: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    installed.mkdir()
    read_only = mounting('mount --bind "$1" "$1" && mount -o remount,ro,bind "$1"', installed)  # the rights of a file do not stop root
    refused = subprocess.run([*read_only, *command(sources, installed / "lib")], cwd=REPOSITORY, capture_output=True, text=True)
    assert refused.returncode == 1
    assert f"ERROR: Cannot write in {installed / 'lib'}: Read-only file system. Run this as the user who installed" in refused.stderr


@pytest.mark.parametrize("size", ["4k", "16k", "24k"])
def test_a_full_disk_is_named(size: str, sources: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    small = mounting(f'mount -t tmpfs -o size={size} none "$1"', disk)
    refused = subprocess.run([*small, *command(sources, disk / "lib")], cwd=REPOSITORY, capture_output=True, text=True)
    assert refused.returncode == 1
    assert f"ERROR: The disk or quota of {disk / 'lib'} is full" in refused.stderr


def test_remains_of_other_machines_are_removed_after_a_day(sources: Path, libraries: Path) -> None:
    old, young, alive = (libraries / name for name in (".build-node7-4026531836-12-x", ".build-node7-4026531836-13-x", ".build-"))
    alive = libraries / f".build-{ops_build._process()}-x"
    for folder in (old, young, alive):
        folder.mkdir(parents=True)
        (folder / "gate_cpu.cpp.o").touch()
    os.utime(old, times=(time.time() - 2 * 24 * 3600,) * 2)
    (sources / "broken.cpp").write_text("broken")
    assert main([], sources, libraries) == 1
    assert sorted(build_folders(libraries)) == sorted([young, alive])


def test_the_place_depends_on_sources_and_flags_alone(
    sources: Path, libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = library_path(sources, libraries)
    moved = tmp_path / "elsewhere"
    shutil.copytree(sources, moved)
    os.utime(moved / "answer.cpp", times=(0, 0))
    (moved / "notes.txt").write_text("not a source")
    assert library_path(moved, libraries) == first

    (moved / "answer.cpp").rename(moved / "question.cpp")
    (sources / "answer.h").touch()
    monkeypatch.setattr(ops_build, "CPU_FLAGS", [*ops_build.CPU_FLAGS, "-funroll-loops"])
    assert len({first, library_path(moved, libraries), library_path(sources, libraries)}) == 3
    (sources / "answer.h").unlink()
    assert library_path(sources, libraries) != first


def test_the_place_names_torch_and_machine(libraries: Path) -> None:
    import torch

    path = library_path(libraries=libraries)
    assert path.name == NAME
    assert path.parent.name.startswith(f"torch-{torch.__version__}-{os.uname().machine}-")


@pytest.mark.parametrize(
    ("built_for", "capability", "runs"),
    [
        ([80, 90], 80, True),
        ([80, 90], 86, True),  # binaries run on later minor versions
        ([86, 90], 80, False),
        ([80, 100], 90, False),  # PTX only of the last
        ([80, 90], 120, True),  # by PTX
        ([], 80, False),
    ],
)
def test_which_gpus_a_library_runs_on(built_for: list[int], capability: int, runs: bool) -> None:
    assert covers(built_for, capability) is runs


def test_a_cpu_library_has_no_cuda_architectures(built: tuple[Path, Path, str]) -> None:
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch is built with CUDA")
    assert cuda_architectures(built[1]) == []


@needs_nvcc
def test_one_library_for_cpu_and_cuda_is_compiled_by_both() -> None:
    assert NVCC is not None
    tools = Tools(["ccache", "g++"], Path(NVCC), [80, 90])
    device = tools.compile_command(Path("gate_cuda.cu"), Path("o"))
    assert device[:2] == [NVCC, "-ccbin=g++"]
    assert [flag for flag in device if flag.startswith("-gencode")] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]
    host = tools.compile_command(Path("gate_ops.cpp"), Path("o"))
    assert host[:2] == ["ccache", "g++"]
    assert "-DGRT_CUDA" in device and "-DGRT_CUDA" in host
    includes = [Path(flag[2:]) for flag in host if flag.startswith("-I")]
    assert any((folder / "cuda_runtime_api.h").is_file() for folder in includes)
    link = tools.link_command([Path("a.o")], Path("o"))
    runtime = next(flag.removeprefix("-l:") for flag in link if flag.startswith("-l:libcudart"))
    assert any((Path(flag[2:]) / runtime).is_file() for flag in link if flag.startswith("-L"))
    assert "-DGRT_CUDA" not in Tools(["g++"], None, []).compile_command(Path("gate_ops.cpp"), Path("o"))


@needs_nvcc
@pytest.mark.parametrize(
    ("listed", "chosen"),
    [
        ("8.0;9.0", [80, 90]),
        ("9.0a 8.6+PTX", [86, 90]),
        ("13.0", None),  # newer than this nvcc: PTX of its newest
        ("1.0;9.0", [90]),  # older than any nvcc of today
    ],
)
def test_architectures_follow_the_list_that_torch_reads(listed: str, chosen: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert NVCC is not None
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    found = architectures(Path(NVCC))
    assert found == chosen if chosen else 100 <= found[0] < 130


@needs_nvcc
def test_an_unreadable_list_of_architectures_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NVCC is not None
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;Hopper")
    with pytest.raises(ops_build.BuildError, match="as numbers, as in '8.0;9.0'"):
        architectures(Path(NVCC))


@needs_nvcc
@pytest.mark.parametrize("cuda", ["7.5", None])
def test_cuda_needs_nvcc_of_torchs_major_version(
    cuda: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = ops_build._torch()._replace(cuda=cuda)
    monkeypatch.setattr(ops_build, "_torch", lambda: torch)
    assert ops_build._find_nvcc() is None
    warning = capsys.readouterr().err
    if cuda is None:
        assert warning == ""
    else:
        assert "no nvcc of CUDA 7" in warning and f"{NVCC} is of CUDA" in warning


def test_there_must_be_sources(tmp_path: Path, libraries: Path) -> None:
    with pytest.raises(ops_build.BuildError, match="There are no sources in"):
        build(sources=tmp_path / "none", libraries=libraries)
