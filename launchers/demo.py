"""The newcomer's path, as `make demo` runs it: text, tokenizer, shards, training, export, a generated sample, and a summary.

Every part is an ordinary command of this repository, printed before it runs, so that it can be copied. Nothing that exists is
overwritten. The corpus is the source code of the running Python's standard library, which needs no download.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from torch import Tensor

from pretrain.checkpoint_reader import find_newest
from pretrain.config import RunConfig, parse_arguments
from pretrain.data import validation_batches
from pretrain.shards import Index
from pretrain.sources import open_sources

ROOT = Path(__file__).resolve().parent.parent
CONFIG, DS_CONFIG = "configs/demo.yaml", "configs/ds_zero3.json"
NOTICEABLE = 0.01  # nats; a smaller gain is not called one


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Trains, exports and samples a small GRT. Example: python launchers/demo.py")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder to make (default: %(default)s)")
    output: Path = parser.parse_args(arguments).output
    os.chdir(ROOT)
    if output.exists():
        sys.exit(
            f"{output} exists, from an earlier demo, and was left as it is. Remove it (rm -r {output}), or choose another folder: "
            f"{python()} launchers/demo.py --output runs/demo2"
        )
    try:
        summarize(output, make(output))
    except subprocess.CalledProcessError as error:
        sys.exit(f"The demo stopped: the command above ended with exit status {error.returncode}. What it made so far is in {output}.")
    except KeyboardInterrupt:
        sys.exit(f"\nStopped. What the demo made so far is in {output}.")


def make(output: Path) -> dict[str, float]:
    """Runs the parts one after the other; the seconds that each took."""
    tokenizer, data, run, exported = (output / name for name in ("tokenizer", "data", "train", "hf"))
    corpus = ["--input", sysconfig.get_path("stdlib"), "--pattern", "*.py", "--invalid-utf8", "skip"]
    corpus += ["--exclude", "site-packages", "dist-packages", "test", "tests"]
    vocab_size = yaml.safe_load(Path(CONFIG).read_text())["model"]["vocab_size"]
    ranks = min(2, torch.cuda.device_count() or 2)
    deepspeed = [Path(python()).with_name("deepspeed"), "--quiet", "--num_gpus", ranks]
    split = ["--validation-fraction", 0.05]
    settings = ["--config", CONFIG, "--ds_config", DS_CONFIG, "--run_dir", run, "--data.path", data]
    settings += ["--optim.precision", "bf16" if bf16_is_fast() else "fp32"]
    seconds = {
        "tokenizer": run_part(python(), "tokenizer/train.py", *corpus, "--output", tokenizer, "--vocab-size", vocab_size),
        "shards": run_part(python(), "tools/prepare_data.py", *corpus, *split, "--tokenizer", tokenizer, "--output", data),
        "training": run_part(*deepspeed, "pretrain/train.py", *settings, threads=max(1, (os.cpu_count() or 1) // ranks)),
    }
    checkpoint = find_newest(run / "checkpoints")
    seconds["export"] = run_part(python(), "tools/convert_to_hf.py", checkpoint, "--output", exported)
    seconds["sample"] = run_part(python(), "tools/generate.py", exported, "--prompt", "def main(")
    return seconds


def bf16_is_fast() -> bool:
    """A GPU, or a CPU with bf16 matrix units (AMX): there bf16 trains about twice as fast as fp32; on other CPUs it may be slower."""
    cpu = Path("/proc/cpuinfo")
    return torch.cuda.is_available() or (cpu.exists() and "amx_bf16" in cpu.read_text())


def python() -> str:
    """This interpreter as one would type it in the repository: `.venv/bin/python`."""
    return os.path.relpath(sys.executable) if Path(sys.executable).is_relative_to(ROOT) else sys.executable


def run_part(*command: Any, threads: int | None = None) -> float:
    """Prints a command, runs it to its end, and returns the seconds. `threads`: of each process, where several share the cores.

    Raises:
        subprocess.CalledProcessError: it failed; its own message is on the screen.
    """
    words = [str(word) for word in command]
    setting = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    print("\n$", *(f"{name}={value}" for name, value in setting.items()), shlex.join(words), flush=True)
    start = time.monotonic()
    subprocess.run(words, check=True, env=os.environ | setting)
    return time.monotonic() - start


def summarize(output: Path, seconds: dict[str, float]) -> None:
    """What was made, what was learned, and what depth had to do with it."""
    config, _ = parse_arguments(["--config", str(output / "train" / "config.yaml"), "--ds_config", DS_CONFIG])
    (index,) = open_sources(config.data).values()
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    validations = [row for row in rows if "core_gain" in row]
    speed = median(row["tokens_per_second"] for row in rows if "loss" in row)
    first, last = validations[0], validations[-1]
    tokens, entropy = unigram_entropy(config, index)
    full = config.model.max_depth

    print(f"\nMade in {output}:")
    print(f"  tokenizer/  SentencePiece, {index.vocab_size:,} pieces")
    train_tokens, held_out = index.token_count("train"), index.token_count("validation")
    print(f"  data/       WebDataset tars: {train_tokens:,} tokens for training, {held_out:,} for validation")
    print(f"  train/      {last['step']:,} steps of {config.tokens_per_step:,} tokens: metrics.jsonl, tensorboard/, checkpoints/")
    print(f"  hf/         the model for transformers, {config.model.parameter_count:,} parameters")
    print(f"\nValidation loss on {tokens:,} tokens, in nats a token (their unigram entropy is {entropy:.3f}):")
    print("  depth    first     last")
    for depth in config.evaluation_depths:
        key = f"validation_loss/depth_{depth}"
        print(f"  {depth:5}  {first[key]:7.3f}  {last[key]:7.3f}{'  <- R, the depth trained for' if depth == full else ''}")
    print(f"  {below_unigram(last[f'validation_loss/depth_{full}'], entropy)}")
    print(f"  {depth_verdict(last['core_gain'], last['depth_gain'], full)}")
    parts = ", ".join(f"{part} {took:.0f} s" for part, took in seconds.items())
    print(f"\nTraining ran at {speed:,.0f} tokens/s. Time: {parts}; {sum(seconds.values()) / 60:.1f} minutes together.")


def unigram_entropy(config: RunConfig, index: Index) -> tuple[int, float]:
    """Number of validation targets, and the entropy (nats) of their frequencies: the loss of the best model that ignores context."""
    batches = validation_batches(
        config.data, index, micro_batch_size=1, data_parallel_rank=0, data_parallel_size=1, max_sequences=config.eval.max_sequences
    )
    counts = torch.zeros(index.vocab_size, dtype=torch.float64)
    for batch in batches:
        counts += torch.bincount(batch.targets[batch.loss_mask], minlength=index.vocab_size)
    return int(counts.sum()), entropy(counts)


def entropy(counts: Tensor) -> float:
    """Entropy in nats of the distribution that `counts` (float64) are in proportion to."""
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * frequencies.log()).sum())


def below_unigram(loss: float, entropy: float) -> str:
    if loss < entropy:
        return f"The model uses context: its loss is {entropy - loss:.3f} below what the frequencies of the tokens alone allow."
    return f"The model has not learned to use context yet: its loss is {loss - entropy:.3f} above the unigram entropy. Train longer."


def depth_verdict(core_gain: float, depth_gain: float, full: int) -> str:
    """What the recurrent core (loss at depth 0 minus loss at R) and its repetition (loss at depth 1 minus loss at R) were worth."""
    measured = f"core gain {core_gain:+.3f}, depth gain {depth_gain:+.3f} nats"
    if core_gain < NOTICEABLE:
        return f"The core is of no use yet ({measured}): prelude and coda did the work, as is usual early in training."
    if depth_gain < NOTICEABLE:
        return (
            f"The core helps, but one pass of it gives nearly all that {full} give ({measured}): "
            f"this short run does not show that recurrence pays."
        )
    return f"Depth pays: {full} recurrences are better than one ({measured})."


if __name__ == "__main__":
    main()
