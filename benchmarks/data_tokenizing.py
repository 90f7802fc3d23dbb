"""Tokenizing the same text with the same vocabulary: `tools/prepare_data.py`, Hugging Face's tokenizers, and datatrove's pipeline.

The text is Python's standard library as JSON lines. prepare_data and datatrove are whole commands, from the JSON to shards on disk;
tokenizers' `encode_batch` is given the strings, and what it returns is thrown away. Medians of interleaved rounds.
"""

import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from model.config import PRESETS
from pretrain.shards import open_dataset
from tokenizer.tokenizer import load_tokenizer
from tools.convert_to_hf import write_tokenizer

TEXT_BYTES = 12 << 20
FILES = 4  # datatrove gives a file to one process
VOCABULARY = 8000

ENCODE_BATCH = """
import json, sys, time
from pathlib import Path
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
texts = [json.loads(line)["text"] for path in Path(sys.argv[2]).iterdir() for line in path.read_text().split("\\n")[:-1]]
start, cpu_start = time.perf_counter(), time.process_time()
tokens = sum(len(encoding) + 1 for encoding in tokenizer.encode_batch(texts, add_special_tokens=False))
print(tokens, time.perf_counter() - start, time.process_time() - cpu_start)
"""
DATATROVE = """
import sys
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
tokenizer, text, output, processes = sys.argv[1:]
encode = DocumentTokenizer(output + "/tokens", tokenizer + "/tokenizer.json", eos_token="<|endoftext|>", shuffle_documents=False)
files = len(list(__import__("pathlib").Path(text).iterdir()))
pipeline = [JsonlReader(text, doc_progress=False), encode]
LocalPipelineExecutor(pipeline, tasks=files, workers=int(processes), logging_dir=output + "/logs").run()
"""


def write_text(directory: Path) -> int:
    """Writes the documents; returns their bytes of text."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in library.rglob("*.py") if not {"test", "tests", "site-packages", "dist-packages"} & set(path.parts))
    files = [open(directory / f"{number}.jsonl", "w") for number in range(FILES)]  # noqa: SIM115, closed below
    total = 0
    for number, path in enumerate(paths):
        text = path.read_bytes().decode(errors="ignore")
        if text and total + len(text.encode()) <= TEXT_BYTES:
            files[number % FILES].write(json.dumps({"text": text}) + "\n")
            total += len(text.encode())
    for file in files:
        file.close()
    return total


class Encoded(NamedTuple):
    tokens: int
    seconds: float
    cpu_seconds: float  # of all processes


def run(*command: str, threads: int = 1) -> tuple[str, float, float]:
    """What a Python command prints, its seconds, and its CPU seconds.

    Raises:
        RuntimeError: it failed.
    """
    environment = os.environ | {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().split("\n")[-1])
    return done.stdout, seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def prepare_data(folder: Path, processes: int) -> Encoded:
    output = folder / "dataset"
    files = ["--input", f"{folder}/text", "--tokenizer", f"{folder}/tokenizer", "--output", str(output), "--overwrite"]
    _, seconds, cpu_seconds = run("-m", "tools.prepare_data", *files, "--processes", str(processes))
    index = open_dataset(output)
    return Encoded(index.token_count("train") + index.token_count("validation"), seconds, cpu_seconds)


def encode_batch(folder: Path, threads: int) -> Encoded:
    tokens, seconds, cpu_seconds = run("-c", ENCODE_BATCH, f"{folder}/hf", f"{folder}/text", threads=threads)[0].split()
    return Encoded(int(tokens), float(seconds), float(cpu_seconds))


def datatrove(folder: Path, processes: int) -> Encoded:
    with tempfile.TemporaryDirectory(dir=folder) as output:
        _, seconds, cpu_seconds = run("-c", DATATROVE, f"{folder}/hf", f"{folder}/text", output, str(processes))
        return Encoded(sum(path.stat().st_size for path in Path(output).rglob("*.ds")) // 2, seconds, cpu_seconds)


TOOLS: dict[str, tuple[str, Callable[[Path, int], Encoded]]] = {
    "`tools/prepare_data.py`": ("", prepare_data),
    "tokenizers, `encode_batch` alone": ("tokenizers", encode_batch),
    "datatrove, `DocumentTokenizer`": ("datatrove", datatrove),
}


def measure(folder: Path, rounds: int) -> tuple[dict[tuple[str, int], list[Encoded]], dict[str, str]]:
    """By tool and number of processes; and why a tool could not be run."""
    measured: dict[tuple[str, int], list[Encoded]] = {}
    missing: dict[str, str] = {}
    for tool, (_, function) in list(TOOLS.items()) * rounds:
        for processes in (1, 2):
            if tool not in missing:
                try:
                    measured.setdefault((tool, processes), []).append(function(folder, processes))
                except RuntimeError as error:
                    missing[tool] = str(error)
    return measured, missing


def compare(rounds: int) -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("text", "hf"):
            (folder / part).mkdir()
        size = write_text(folder / "text")
        run("-m", "tokenizer.train", "--input", f"{folder}/text", "--output", f"{folder}/tokenizer", "--vocab-size", str(VOCABULARY))
        write_tokenizer(folder / "hf", load_tokenizer(folder / "tokenizer"), next(iter(PRESETS.values())))
        measured, missing = measure(folder, rounds)
    print(f"{size / 1e6:.1f} MB of Python in the vocabulary of {VOCABULARY} pieces that was trained on it; medians of {rounds} rounds.\n")
    print("| | tokens | MB/s a core | M tokens/s a core | MB/s, 1 process | MB/s, 2 processes |")
    print("|---|--:|--:|--:|--:|--:|")
    for tool, (package, _) in TOOLS.items():
        if tool in missing:
            print(f"| {tool} | not measured: {missing[tool]} | | | | |")
            continue
        version = f" {importlib.metadata.version(package)}" if package else ""
        tokens = measured[tool, 1][0].tokens
        cpu_seconds = median(encoded.cpu_seconds for encoded in measured[tool, 1])
        cells = [f"{tokens:,}", f"{size / cpu_seconds / 1e6:.2f}", f"{tokens / cpu_seconds / 1e6:.2f}"]
        cells += [f"{size / median(encoded.seconds for encoded in measured[tool, processes]) / 1e6:.2f}" for processes in (1, 2)]
        print(f"| {tool}{version} | {' | '.join(cells)} |")
