"""The CUDA kernels of the gate operators without a GPU: what nvcc makes of them, and what they compute when they run on a CPU.

nvcc compiles for each architecture, warnings as errors, and reports registers and spills. Then the same file, as plain C++ with
cuda_on_host.cpp, becomes a library of operators in which a fiber plays each thread; its results are compared with those of the CPU
kernels, which test_gate_ops.py measures against float64. On a GPU, tools/gpu_check.py measures the kernels themselves.
"""

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from model.ops.build import ARCHITECTURES, SOURCES, Tools
from tests.model.test_noise import KNOWN_ANSWERS

NVCC = shutil.which("nvcc")
pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc is not on the PATH")

TYPES = {"double": "Id", "float": "If", "bfloat16": "IN3c108BFloat16E", "half": "IN3c104HalfE"}  # as C++ mangles them


class Kernel(NamedTuple):
    name: str
    type: str
    variant: str  # how it reads: scalars, vectors, or vectors of rows that a block covers at once


# The most registers of a thread on any architecture, in steps of 8, as GPUs hand them out: with 32 a multiprocessor is full of threads,
# with 40 three quarters full, with 64 half. For double, there for gradient checks, only one kernel is built.
BUDGET = {
    Kernel(name, type_, variant): registers
    for name, type_, variants in [
        ("head", "float", {"scalars": 56, "vectors": 56, "rows": 32}),
        ("head", "bfloat16", {"scalars": 64, "vectors": 56, "rows": 32}),
        ("head", "half", {"scalars": 64, "vectors": 56, "rows": 32}),
        ("head", "double", {"scalars": 56}),
        ("head_backward", "float", {"scalars": 64, "vectors": 56, "rows": 56}),
        ("head_backward", "bfloat16", {"scalars": 64, "vectors": 56, "rows": 64}),
        ("head_backward", "half", {"scalars": 56, "vectors": 56, "rows": 64}),
        ("head_backward", "double", {"scalars": 64}),
        ("tail", "float", {"scalars": 48, "vectors": 56, "rows": 32}),
        ("tail", "bfloat16", {"scalars": 56, "vectors": 56, "rows": 40}),
        ("tail", "half", {"scalars": 56, "vectors": 56, "rows": 40}),
        ("tail", "double", {"scalars": 64}),
        ("tail_backward", "float", {"scalars": 56, "vectors": 56}),
        ("tail_backward", "bfloat16", {"scalars": 80, "vectors": 64}),
        ("tail_backward", "half", {"scalars": 80, "vectors": 64}),
        ("tail_backward", "double", {"scalars": 80}),
        ("philox", "", {"": 16}),
    ]
    for variant, registers in variants.items()
}


@pytest.fixture(scope="module", autouse=True)
def world() -> None:
    """No layers here, so no world for them."""


class Use(NamedTuple):
    """What a kernel takes on one architecture: registers of a thread; bytes of stack and of spilled registers."""

    registers: int
    stack: int
    spilled: int


@pytest.fixture(scope="module")
def uses(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, Kernel], Use]:
    """Of each kernel on each architecture, as nvcc reports it."""
    command = tools(cuda=True).compile_command(SOURCES / "gate_cuda.cu", tmp_path_factory.mktemp("nvcc") / "gate_cuda.o")
    strict = ["-Werror", "all-warnings", "-Xcompiler", "-Wall", "-Xptxas", "-v", "--threads", "2"]
    report = run([*command, *strict])
    found = re.findall(
        r"Compiling entry function '(\S+)' for 'sm_(\d+)'\n.*\n"
        r" +(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r".*Used (\d+) registers",
        report,
    )
    return {
        (int(architecture), kernel(mangled)): Use(int(registers), int(stack), int(stores) + int(loads))
        for mangled, architecture, stack, stores, loads, registers in found
    }


def kernel(mangled: str) -> Kernel:
    name = re.search(r"(head_backward|head|tail_backward|tail|philox)_kernel", mangled)
    assert name, mangled
    type_ = next((type_ for type_, code in TYPES.items() if f"kernel{code}" in mangled), "")
    flags = "".join(re.findall(r"Lb([01])E", mangled))
    return Kernel(name[1], type_, {"": "", "0": "scalars", "00": "scalars", "1": "vectors", "10": "vectors", "11": "rows"}[flags])


def tools(cuda: bool) -> Tools:
    assert NVCC
    return Tools(["g++"], Path(NVCC) if cuda else None, ARCHITECTURES)


def run(command: list[str]) -> str:
    """Its output, or a failed test that shows it."""
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_kernels_compile_without_warnings_and_spill_nothing(uses: dict[tuple[int, Kernel], Use]) -> None:
    assert {architecture for architecture, _ in uses} == set(ARCHITECTURES)
    assert {key: use for key, use in uses.items() if use.stack or use.spilled} == {}


def test_registers_are_within_budget(uses: dict[tuple[int, Kernel], Use]) -> None:
    most = {kernel: max(use.registers for (_, other), use in uses.items() if other == kernel) for _, kernel in uses}
    assert most.keys() == BUDGET.keys()
    assert {kernel: registers for kernel, registers in most.items() if registers > BUDGET[kernel]} == {}


# On a CPU


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of operators whose kernels are those of gate_cuda.cu."""
    folder = tmp_path_factory.mktemp("on_host")
    kernels = (SOURCES / "gate_cuda.cu").read_text().replace("__shared__", "static")  # blocks run one after another
    kernels = re.sub(r"(\w+(?:<[\w, ]+>)?)<<<(.+), 0, stream>>>\(", r"host::launch(\1, \2, ", kernels)
    assert "<<<" not in kernels
    (folder / "kernels.inc").write_text(kernels)
    kernels_object, operators_object, library = folder / "kernels.o", folder / "operators.o", folder / "library.so"
    compile_kernels = tools(cuda=True).compile_command(Path(__file__).with_name("cuda_on_host.cpp"), kernels_object)
    run([*compile_kernels, "-O1", f"-I{folder}", f"-I{SOURCES}"])
    run([*tools(cuda=False).compile_command(SOURCES / "gate_ops.cpp", operators_object), "-O0"])
    run(tools(cuda=False).link_command([kernels_object, operators_object], library))
    return library


# Rows, channels, whether data begin at an odd address, dtypes.
ALL = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CASES = [
    (1, 2048, False, ALL),  # decoding
    (3, 7, False, ALL),
    (1, 1, False, ALL),
    (0, 64, False, ALL),
    (37, 264, False, ALL),  # two chunks of rows, and a block whose last threads have no channels
    (70, 20, False, ALL),  # whole vectors of float, not of bfloat16
    (35, 512, True, [torch.float32, torch.bfloat16]),
    (300, 96, False, [torch.bfloat16]),  # a chunk has more rows than a block takes at once
    (2, 16384, False, [torch.float32, torch.bfloat16]),  # wider than a block
    (2, 9001, False, [torch.float32, torch.bfloat16]),
]


def results(cases: list[tuple[int, int, bool, list[torch.dtype]]]) -> dict[str, Tensor]:
    """Of the operators that are loaded."""
    operators = torch.ops.grt
    out: dict[str, Tensor] = {}
    for rows, channels, odd, dtypes in cases:
        for dtype in dtypes:
            generator = torch.Generator().manual_seed(rows + channels)

            def draw(*shape: int, dtype: torch.dtype = dtype, odd: bool = odd, generator: torch.Generator = generator) -> Tensor:
                count = torch.Size(shape).numel()
                return torch.randn(count + odd, generator=generator, dtype=torch.float64).to(dtype)[int(odd) :].view(shape)

            logits, hidden, candidate, grad, grad_noisy = (draw(rows, channels) for _ in range(5))
            bias, weight = draw(channels), draw(channels)
            logits[:1], logits[1:2] = 50, -50
            if rows > 2:
                logits[2, 0], logits[2, -1] = torch.nan, torch.inf
            positions, counters = torch.arange(rows) + 2**33 - 1, torch.tensor([2**40 + 3, 4095])
            grad_total, grad_square = draw(2, rows, dtype=torch.promote_types(dtype, torch.float32))
            for rms in (False, True):
                for noise in ((None, None), (positions, counters)):
                    head = operators.gate_head(hidden, weight, *noise, 0.3, 1e-5, rms)
                    out |= {f"{rows} x {channels} {dtype} head {rms=} noise={noise[0] is not None} {i}": x for i, x in enumerate(head)}
                _, _, mean, rstd, _, _ = head
                for grads in ((grad, grad_noisy, grad_total, grad_square), (grad, None, None, None), (None, grad_noisy, grad_total, None)):
                    given = "".join(str(int(x is not None)) for x in grads)
                    back = operators.gate_head_backward(*grads, hidden, weight, mean, rstd, rms)
                    out |= {f"{rows} x {channels} {dtype} head backward {rms=} of {given} {i}": x for i, x in enumerate(back)}
            for noise, per_token in (((None, None), False), ((positions, counters), True), ((positions, counters), False)):
                arguments = (logits, bias, hidden, candidate, *noise, 1.5, 0.8, 0.4, per_token)
                tail = (*operators.gate_tail(*arguments), *operators.gate_tail_backward(grad, *arguments))
                out |= {f"{rows} x {channels} {dtype} tail {noise[0] is not None} {per_token=} {i}": x for i, x in enumerate(tail)}
    return out


# The operators have the names of those that this process has loaded.
ANOTHER_PROCESS = """
import ctypes, sys, torch
from tests.model.test_cuda_kernels import CASES, known_answers, results
torch.set_num_threads(1)
torch.ops.load_library(sys.argv[1])
torch.save([known_answers(ctypes.CDLL(sys.argv[1]).philox_on_host), results(CASES), results(CASES[3:7])], sys.argv[2])
"""


def known_answers(philox: Callable[..., None]) -> list[Tensor]:
    """What the Philox kernel makes of more than a block of each of the KNOWN_ANSWERS' counters."""
    out = []
    for counter, key, _ in KNOWN_ANSWERS:
        counters = torch.tensor(counter).repeat(300, 1)
        out.append(torch.zeros_like(counters))
        philox(ctypes.c_void_p(counters.data_ptr()), ctypes.c_uint64(key), ctypes.c_int64(300), ctypes.c_void_p(out[-1].data_ptr()))
    return out


Results = tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]


@pytest.fixture(scope="module")
def from_host(on_host: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """`known_answers`, `results`, and `results` of some cases with threads in another order."""
    saved = tmp_path_factory.mktemp("results") / "results.pt"
    run([sys.executable, "-c", ANOTHER_PROCESS, str(on_host), str(saved)])
    philox, once, again = torch.load(saved)
    return philox, once, again


def test_the_philox_kernel_gives_the_known_answers(from_host: Results) -> None:
    for made, (_, _, words) in zip(from_host[0], KNOWN_ANSWERS, strict=True):
        assert torch.equal(made, torch.tensor(words).expand(300, 4))


def test_results_do_not_depend_on_the_order_of_threads(from_host: Results) -> None:
    _, once, again = from_host
    assert len(again) > 500
    assert [name for name, x in again.items() if not torch.equal(x.nan_to_num(), once[name].nan_to_num())] == []


@pytest.mark.usefixtures("fused_operators")
def test_kernels_that_run_on_a_cpu_compute_what_the_cpu_kernels_do(from_host: Results) -> None:
    expected = results(CASES)
    assert from_host[1].keys() == expected.keys()
    for name, y in expected.items():
        x, tolerance = from_host[1][name], max(4e-6, *(torch.finfo(dtype).eps for dtype in ALL if f" {dtype} " in name))
        assert x.dtype == y.dtype and x.shape == y.shape
        assert torch.equal(x.isnan(), y.isnan()) and torch.equal(x.isinf(), y.isinf()), name
        x, y = (z[y.isfinite()].double() for z in (x, y))
        if y.numel():
            assert float((x - y).abs().max()) <= tolerance * max(1.0, float(y.abs().max())), name
