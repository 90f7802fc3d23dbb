"""Is all well on this GPU, and how fast? Builds the gate operators, checks them and a small training run against the CPU, and measures.

    python tools/gpu_check.py                   # within 5 minutes; a table, and gpu_check.json
    python tools/gpu_check.py --budget 900 --peak-flops 312T

One GPU, no data, nothing downloaded. What the libraries say meanwhile is in gpu_check.log beside the JSON. Exit code 0: every check ran
and passed; 1: not so; 2: there is no GPU, or nowhere to write.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # `benchmarks` is not installed with the package

from model.ops import fused
from tools.gpu import attention, operators, speed, training
from tools.gpu.runner import Check, Row, Setting, run
from tools.plan import number

REPOSITORY = Path(__file__).parents[1]


def about_device(setting: Setting) -> Iterator[Row]:
    if setting.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        yield Row("device", f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.total_memory / 2**30:.0f} GiB")
        yield Row("driver", driver())
    yield Row("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    fused.chosen("fused")  # raises where they are not built for this device
    library = fused.find()
    assert library is not None
    yield Row("gate operators", library.parent.name)


def driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown: there is no nvidia-smi"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return shown.stdout.strip().partition("\n")[0] or "unknown: nvidia-smi failed"


def checks(setting: Setting) -> list[Check]:
    """Right before fast, and what takes longest last."""
    return [
        Check("device", about_device, 40),  # and the start of the process
        Check("Philox", operators.philox, 10),
        Check("noise", operators.noise_field, 10),
        *(Check(f"precision, {dtype}", partial(operators.precision, dtype_name=dtype), 30) for dtype in operators.DTYPES),
        Check("determinism", operators.determinism, 10),
        *([Check("CUDA graph", operators.graph, 10)] if setting.on_gpu else []),
        Check("torch.compile", operators.compiled, 40),
        Check("documents", attention.inside_documents, 15),
        Check("training, ref", partial(training.same_losses, gate_ops="ref"), 50),
        Check("training, fused", partial(training.same_losses, gate_ops="fused"), 30),
        Check("training twice", training.same_twice, 40),
        Check("bandwidth", speed.bandwidth, 15),
        Check("gate in training", speed.training_gate, 30),
        Check("gate in decoding", speed.decoding_gate, 40),
        *(
            Check(f"step, {ops}, compile {how}", partial(training.step_speed, gate_ops=ops, compile_=how), 30 if how == "none" else 60)
            for how in ("none", "recurrence")
            for ops in ("fused", "ref")
        ),
    ]


def build(deadline: float) -> Row:
    """Its messages are shown. In a process of its own: this one stays off the GPU, which may admit one process only."""
    started = time.monotonic()
    command = [sys.executable, "-m", "model.ops.build"]
    try:
        status = subprocess.run(command, cwd=REPOSITORY, timeout=max(1.0, deadline - started), check=False).returncode
    except subprocess.TimeoutExpired:
        return Row("build", f"not ready after {time.monotonic() - started:.0f} s", ok=False)
    return Row("build", f"{time.monotonic() - started:.0f} s" if status == 0 else f"failed with status {status}, see above", ok=status == 0)


def report(rows: Iterable[Row], output: Path) -> int:
    """Prints each row as it comes, with all so far in the JSON. Returns the exit code."""
    done: list[Row] = []
    for row in rows:
        verdict = "skipped" if row.ok is None else "ok" if row.ok else "FAILED"
        if not done:
            print(f"{'check':<44} | {'value':<72} | {'expected':<9} | ok")
        print(f"{row.check:<44} | {row.value:<72} | {row.expected:<9} | {verdict}", flush=True)
        done.append(row)
        passed = all(row.ok for row in done)
        output.write_text(json.dumps({"passed": passed, "rows": [asdict(row) for row in done]}, indent=2) + "\n")
    failed, skipped = ([row.check for row in done if row.ok is verdict] for verdict in (False, None))
    print(f"\n{len(done)} rows: {len(failed)} failed, {len(skipped)} skipped. JSON: {output}")
    for what, names in ("failed", failed), ("skipped, give a larger --budget", skipped):
        if names:
            print(f"{what}: {'; '.join(dict.fromkeys(names))}")
    return 0 if not failed and not skipped else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="default: %(default)s")
    parser.add_argument("--budget", type=float, default=300, help="seconds; what no longer fits in is skipped (default: %(default)s)")
    parser.add_argument("--peak-flops", type=number, help="a second, dense, bf16, for the MFU (default: by the GPU's name)")
    args = parser.parse_args(arguments)
    deadline = time.monotonic() + args.budget
    if not torch.cuda.is_available():
        print(f"error: this needs an NVIDIA GPU and a torch built for CUDA; torch {torch.__version__} sees none.", file=sys.stderr)
        return 2
    log = args.output.with_suffix(".log")
    try:
        args.output.write_text("")
        log.write_text("")
    except OSError as error:
        print(f"error: cannot write {args.output} and {log.name} beside it: {error.strerror}. Choose another --output.", file=sys.stderr)
        return 2
    # Read at the first matrix product of a process. It is what a Hopper GPU has anyway.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    setting = Setting(peak_flops=args.peak_flops)
    code = report(chain([build(deadline)], run(checks(setting), setting, deadline, log)), args.output)
    print(f"{time.monotonic() - deadline + args.budget:.0f} s. Log: {log}")
    return code


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # an ordinary exit waits for child processes, and one that a broken GPU holds cannot be killed
