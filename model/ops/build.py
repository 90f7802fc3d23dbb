"""The library of fused gate operators: where it lies, and the command that builds it.

    python -m model.ops.build           # what this machine can: CPU, and CUDA with a CUDA torch and its nvcc; no GPU needed
    python -m model.ops.build --force   # again, although it is there

Training never builds; it takes what `find` finds, or the plain operators. The file's folder names the torch, the machine and a hash of
the sources and flags, so a library is never used with other sources than its own, and one folder serves several environments. There is
no lock: a build works in a folder of its own and renames the finished file into place, so a killed build blocks nothing, and of two at
once the last wins.

For machines without a compiler: `pip wheel . --no-deps` after a build packs the library too (all of LIBRARIES; remove `build/`, which
setuptools keeps, beforehand), and is found where that wheel is installed beside the same release of torch.
"""

import argparse
import errno
import hashlib
import os
import platform
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parents[1] / "csrc"
LIBRARIES = Path(__file__).parent / "lib"
NAME = "libgrt_ops.so"
SEAL_BYTES = 32
LOG = "build.log"  # of the last build, if it failed

CPU_FLAGS = ["-O3", "-std=c++20", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
if platform.machine() == "x86_64":
    CPU_FLAGS.append("-mprefer-vector-width=512")  # else compilers use half of AVX-512
CUDA_FLAGS = ["-O3", "-std=c++20", "-Xcompiler=-fPIC", "--expt-relaxed-constexpr"]
# Compute capabilities (80 is sm_80: A100; 90: H100, H200; 100: B200) for a build that sees no GPU. Newer GPUs use the last one's PTX.
ARCHITECTURES = [80, 90, 100]

# A compiler takes up to 1 GB, and the slowest source half of the time.
JOBS = 2
# A folder of another machine's build is taken for dead after this long.
STALE_SECONDS = 24 * 3600


class BuildError(Exception):
    """Why there is no library, and what to do about it."""


def library_path(sources: Path = SOURCES, libraries: Path = LIBRARIES) -> Path:
    """Where the library for the installed torch, this machine and these sources is or would be. Takes milliseconds, imports no torch."""
    digest = hashlib.sha256(repr((CPU_FLAGS, CUDA_FLAGS)).encode())
    for path in _files(sources, ".cpp", ".cu", ".h"):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return libraries / f"torch-{_torch().version}-{platform.machine()}-{digest.hexdigest()[:12]}" / NAME


def find(sources: Path = SOURCES, libraries: Path = LIBRARIES) -> Path | None:
    """The library to use with the installed torch, or None if none was built. `import torch` comes before loading it.

    A damaged one is None too: loading a part of a library ends the process without a word.
    """
    path = library_path(sources, libraries)
    try:
        content = path.read_bytes()
    except OSError:
        return None
    return path if content == _sealed(content[:-SEAL_BYTES]) else None


def _sealed(content: bytes) -> bytes:
    """With its sha256 behind it, where loaders do not look."""
    return content + hashlib.sha256(content).digest()


def cuda_architectures(library: Path) -> list[int]:
    """The compute capabilities (90 for 9.0) that a built library has kernels for; none if it is for CPUs only."""
    recorded = re.search(rb"grt_ops CUDA architectures:([0-9 ]*);", library.read_bytes())
    return [int(number) for number in recorded[1].split()] if recorded else []


def covers(built: Iterable[int], capability: int) -> bool:
    """Whether kernels built for these run on a GPU of this capability: binaries within a major version, PTX of the last one beyond it."""
    built = list(built)
    return any(b <= capability and (b // 10 == capability // 10 or b == max(built)) for b in built)


def build(force: bool = False, sources: Path = SOURCES, libraries: Path = LIBRARIES) -> Path:
    """Builds the library unless it is there with all that this machine can add; prints what it does.

    Raises:
        BuildError: for what a person can put right: no compiler, a compiler's errors, nowhere to write.
    """
    started = time.monotonic()
    library = library_path(sources, libraries)
    there = find(sources, libraries) is not None
    built = cuda_architectures(library) if there else []
    nvcc = _find_nvcc() if _files(sources, ".cu") else None
    wanted = architectures(nvcc) if nvcc else []
    if there and not force and all(covers(built, capability) for capability in wanted):
        print(f"Already built: {library}: {_contents(built)}")
        return library

    # Nodes with different GPUs may share this folder: what the library had it keeps, if nvcc is here to make it again.
    wanted = sorted({*wanted, *built}) if nvcc else []
    tools = Tools(_find_cxx(), nvcc if wanted else None, wanted)
    print(f"Building {NAME} for torch {_torch().version}, {_contents(wanted)}, with {shlex.join(tools.cxx)} (a minute)", flush=True)
    try:
        libraries.mkdir(parents=True, exist_ok=True)
        _remove_dead_builds(libraries)
        with tempfile.TemporaryDirectory(prefix=f".build-{_process()}-", dir=libraries, ignore_cleanup_errors=True) as folder:
            finished = _build_in(Path(folder), tools, sources, library)
            finished.write_bytes(_sealed(finished.read_bytes()))
            library.parent.mkdir(exist_ok=True)
            os.replace(finished, library)
            (libraries / LOG).unlink(missing_ok=True)
    except OSError as error:
        raise BuildError(_about_writing(error, libraries)) from error
    print(f"Built in {time.monotonic() - started:.0f} s: {library}: {_contents(wanted)}")
    return library


@dataclass(frozen=True)
class Tools:
    """What the library is built with.

    Args:
        cxx: the C++ compiler's command
        nvcc: CUDA's compiler; None for a library without CUDA
        architectures: compute capabilities, 90 for 9.0
    """

    cxx: list[str]
    nvcc: Path | None
    architectures: list[int]

    def compile_command(self, source: Path, output: Path) -> list[str]:
        include = _torch().root / "include"
        # System headers, for the warnings in them are not ours.
        common = ["-isystem", f"{include}", "-isystem", f"{include}/torch/csrc/api/include", "-c", str(source), "-o", str(output)]
        if self.nvcc is None:
            return [*self.cxx, *CPU_FLAGS, *common]
        if source.suffix == ".cu":
            return [str(self.nvcc), f"-ccbin={self.cxx[-1]}", *CUDA_FLAGS, *_gencode(self.architectures), "-DGRT_CUDA", *common]
        return [*self.cxx, *CPU_FLAGS, "-DGRT_CUDA", *_cuda_paths(self.nvcc, "-I"), *common]

    def link_command(self, inputs: Sequence[Path], output: Path) -> list[str]:
        command = [*self.cxx, *CPU_FLAGS, "-shared", *map(str, inputs), "-o", str(output), f"-L{_torch().root / 'lib'}"]
        if self.nvcc is not None:
            # By its full name: NVIDIA's pip packages hold no libcudart.so.
            runtime = f"-l:libcudart.so.{_major(_release(self.nvcc))}"
            command += [*_cuda_paths(self.nvcc, "-L"), "-lc10_cuda", "-ltorch_cuda", runtime]
        return [*command, "-lc10", "-ltorch_cpu", "-ltorch"]


def architectures(nvcc: Path) -> list[int]:
    """Compute capabilities to build for: TORCH_CUDA_ARCH_LIST, else those of the GPUs here, else the usual; each as near as nvcc has it."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if listed:
        entries = re.split(r"[;,\s]+", listed.strip("; "))
        numbers = [re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", entry) for entry in entries]
        wanted = [int(number[1] + number[2]) for number in numbers if number]
        if len(wanted) < len(entries):
            raise BuildError(f"TORCH_CUDA_ARCH_LIST is '{listed}'. Give compute capabilities as numbers, as in '8.0;9.0'.")
    else:
        import torch

        capabilities = {torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())}
        wanted = [10 * major + minor for major, minor in capabilities] or ARCHITECTURES
    known = [int(number) for number in re.findall(r"sm_(\d+)\b", _output([str(nvcc), "--list-gpu-code"]))]
    older = [capability for capability in wanted if capability < min(known)]
    if older:
        print(f"Left out, because {nvcc} builds only for sm_{min(known)} and later: {_sm(older)}", file=sys.stderr)
    # A GPU that nvcc does not know runs the PTX of the newest that it knows.
    return sorted({max(k for k in known if k <= capability) for capability in wanted if capability not in older})


def _build_in(folder: Path, tools: Tools, sources: Path, library: Path) -> Path:
    """Compiles, links and tries the library in the folder. Returns it, by a name that no wheel packs."""
    libraries = library.parents[1]
    units = _files(sources, ".cu", ".cpp") if tools.nvcc else _files(sources, ".cpp")
    if not units:
        raise BuildError(f"There are no sources in {sources}. Install the package again, from a checkout or a complete wheel.")
    objects = {source: folder / f"{source.name}.o" for source in units}
    _run({source.name: tools.compile_command(source, output) for source, output in objects.items()}, folder, libraries)
    if library_path(sources, libraries) != library:
        raise BuildError(f"The files in {sources} changed while they were compiled. Build again.")

    record = folder / "contents.cpp"
    listed = " ".join(map(str, tools.architectures))
    record.write_text(f'extern "C" __attribute__((used)) const char grt_ops_contents[] = "grt_ops CUDA architectures:{listed};";\n')
    linked = folder / "linked.so"
    _run({"link": tools.link_command([*objects.values(), record], linked)}, folder, libraries)
    # In another process, so that a library that crashes when it is loaded is an error like others.
    load = "import sys, torch; torch.ops.load_library(sys.argv[1])"
    _run({"trial load": [sys.executable, "-c", load, str(linked)]}, folder, libraries)
    return linked


def _run(commands: dict[str, list[str]], folder: Path, libraries: Path) -> None:
    """Runs the commands, JOBS at a time, with a line for each that ends. The first that fails ends the others."""
    # Compilers' intermediate files lie in the folder too, and go with it if the build is killed. English, for `_first_errors`.
    environment = os.environ | {"TMPDIR": str(folder), "LC_ALL": "C"}
    waiting = list(commands)
    running: dict[str, subprocess.Popen[bytes]] = {}
    started = {}
    # Their output is kept in memory: it has to tell of a full disk.
    outputs = {name: os.fdopen(os.memfd_create(name), "w+b") for name in commands}
    try:
        while waiting or running:
            while waiting and len(running) < JOBS:
                name = waiting.pop(0)
                started[name] = time.monotonic()
                running[name] = subprocess.Popen(
                    commands[name],
                    stdin=subprocess.DEVNULL,
                    stdout=outputs[name],
                    stderr=subprocess.STDOUT,
                    env=environment,
                    process_group=0,  # killed as one, with the programs that a compiler starts
                )
            for name in [name for name, process in running.items() if process.poll() is not None]:
                if status := running.pop(name).returncode:
                    outputs[name].seek(0)
                    output = outputs[name].read().decode(errors="replace")
                    raise BuildError(_about_failure(name, status, commands[name], output, folder, libraries))
                print(f"  {name:<16} {time.monotonic() - started[name]:5.1f} s", flush=True)
            time.sleep(0.02)
    finally:
        for process in running.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in outputs.values():
            file.close()


def _about_failure(name: str, status: int, command: list[str], output: str, folder: Path, libraries: Path) -> str:
    if os.strerror(errno.ENOSPC) in output or os.strerror(errno.EDQUOT) in output:
        return _about_writing(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), libraries)
    whole = folder / "whole.log"
    whole.write_text(f"$ {shlex.join(command)}\n{output}")
    log = libraries / LOG
    os.replace(whole, log)
    return f"{name} failed with status {status}:\n\n{_first_errors(output)}\n\nThe command and all of its output: {log}"


def _first_errors(output: str) -> str:
    lines = output.splitlines()
    first = next((i for i, line in enumerate(lines) if re.search(r"error|undefined", line, re.IGNORECASE)), max(0, len(lines) - 12))
    return "\n".join(f"    {line[:300]}" for line in lines[first : first + 12])


def _about_writing(error: OSError, libraries: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"The disk or quota of {libraries} is full; a build takes about 100 MB there. Nothing was built."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"Cannot write in {libraries}: {error.strerror}. Run this as the user who installed the package, or build in a checkout, "
            f"make a wheel there (`pip wheel . --no-deps`) and install that. Training works without it, with the plain operators."
        )
    return f"Cannot build in {libraries}: {error}"


def _remove_dead_builds(libraries: Path) -> None:
    """Removes the folders of builds that were killed: of processes of this machine that are gone, and any that is a day old."""
    here = _process().rpartition("-")[0]
    for folder in libraries.glob(".build-*"):
        owner = re.fullmatch(r"\.build-(.+)-(\d+)-[^-]+", folder.name)
        try:
            old = time.time() - folder.stat().st_mtime > STALE_SECONDS
            dead = owner is not None and owner[1] == here and not _alive(int(owner[2]))
        except FileNotFoundError:  # its build ended meanwhile
            continue
        if old or dead:
            shutil.rmtree(folder, ignore_errors=True)


def _process() -> str:
    """This process among those of all machines and containers that may share the folder: host, namespace of process ids, process id."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{platform.node()}-{namespace}-{os.getpid()}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _find_cxx() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise BuildError(f"CXX is '{os.environ['CXX']}', and there is no such program. Correct it, or unset it to use g++.")
        return chosen
    for name in ("g++", "c++"):
        if shutil.which(name):
            return [name]
    raise BuildError(
        "There is no C++ compiler: neither g++ nor c++ is on the PATH, and CXX is not set. Install g++ 11 or later (Debian and Ubuntu: "
        "apt install g++; Fedora and RHEL: dnf install gcc-c++; conda: conda install gxx_linux-64), or install a wheel that was made "
        "after a build. Training works without it, with the plain operators."
    )


def _find_nvcc() -> Path | None:
    """nvcc of torch's major version of CUDA; None, after saying so, if there is none, and silently if torch has no CUDA."""
    cuda = _torch().cuda
    if cuda is None:
        return None
    homes = [Path(home) / "bin" for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home]
    places = [shutil.which("nvcc", path=home) for home in homes] + [shutil.which("nvcc"), shutil.which("nvcc", path="/usr/local/cuda/bin")]
    found = {nvcc: _release(Path(nvcc)) for nvcc in places if nvcc}
    for nvcc, release in found.items():
        if _major(release) == _major(cuda):
            return Path(nvcc)
    others = ", ".join(f"{nvcc} is of CUDA {release}" for nvcc, release in found.items())
    print(
        f"WARNING: no CUDA kernels: this torch is built with CUDA {cuda}, and there is no nvcc of CUDA {_major(cuda)}: "
        f"{others or 'none in CUDA_HOME, on the PATH or in /usr/local/cuda'}.\n"
        f"         On GPUs the plain operators will be used. To have the fused ones, install or load the CUDA {_major(cuda)} toolkit, set "
        f"CUDA_HOME to it, and build again.",
        file=sys.stderr,
        flush=True,
    )
    return None


def _release(nvcc: Path) -> str:
    found = re.search(r"release (\d+\.\d+)", _output([str(nvcc), "--version"]))
    return found[1] if found else "unknown"


def _major(release: str) -> str:
    return release.partition(".")[0]


def _cuda_paths(nvcc: Path, flag: str) -> list[str]:
    """What nvcc itself would pass as -I or -L. It may be a wrapper far from its toolkit, so its own place says little."""
    plan = _output([str(nvcc), "--dryrun", "-c", "-x", "cu", "/dev/null"])
    named = [word for line in re.findall(r"^#\$ (?:INCLUDES|LIBRARIES)=(.*)$", plan, re.MULTILINE) for word in shlex.split(line)]
    paths = [word for word in named if word.startswith(flag)]
    top = re.search(r"^#\$ TOP=(.*)$", plan, re.MULTILINE)
    # NVIDIA's pip packages have these instead of what nvcc names.
    return paths + ([f"{flag}{top[1]}/{'include' if flag == '-I' else 'lib'}"] if top else [])


def _gencode(capabilities: list[int]) -> list[str]:
    flags = [f"-gencode=arch=compute_{capability},code=sm_{capability}" for capability in capabilities]
    return [*flags, f"-gencode=arch=compute_{capabilities[-1]},code=compute_{capabilities[-1]}"]


class _Torch(NamedTuple):
    root: Path
    version: str  # with its build, as in 2.13.0+cu130
    cuda: str | None  # of CUDA that it is built with


def _torch() -> _Torch:
    """The installed torch, which is not imported: that takes seconds, and its module for extensions reports what it thinks of CUDA_HOME."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        raise BuildError("torch is not installed in this environment.")
    root = Path(found.origin).parent
    version = runpy.run_path(str(root / "version.py"))
    return _Torch(root, version["__version__"], version["cuda"])


def _files(folder: Path, *suffixes: str) -> list[Path]:
    """Those with the first suffix come first, each in the order of their names: what takes longest starts first."""
    return [path for suffix in suffixes for path in sorted(folder.glob(f"*{suffix}"))]


def _output(command: list[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout


def _contents(capabilities: list[int]) -> str:
    return f"CPU and CUDA for {_sm(capabilities)}" if capabilities else "CPU"


def _sm(capabilities: list[int]) -> str:
    return ", ".join(f"sm_{capability}" for capability in capabilities)


def main(arguments: Sequence[str] | None = None, sources: Path = SOURCES, libraries: Path = LIBRARIES) -> int:
    parser = argparse.ArgumentParser(prog="python -m model.ops.build", description="Builds the library of fused gate operators.")
    parser.add_argument("--force", action="store_true", help="build although it is there; not under runs that use it from a shared disk")
    force = parser.parse_args(arguments).force
    try:
        build(force, sources, libraries)
    except BuildError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted. Nothing was built, and nothing is left to remove.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
