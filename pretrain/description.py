"""What a run says of itself: files in its directory, and the first lines of its log."""

import json
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from model.apex import nvidia_apex_available
from model.ops import fused
from pretrain.config import RunConfig
from pretrain.resume import Progress
from pretrain.shards import TOKENIZER_FOLDER, Index
from pretrain.sources import shares
from pretrain.topology import Topology


def about_run(config: RunConfig, sources: dict[str, Index], progress: Progress) -> list[str]:
    """Lines for the log: the gate's operators, and what the rest of the run reads of each of several sources."""
    lines = []
    if config.model.core_blocks:
        plain = "plain PyTorch (compute.gate_ops is ref, or no fused ones load here: python -m model.ops.build)"
        lines.append(f"gate operators: {'fused' if config.compute.gate_ops == 'fused' else plain}")
    if len(sources) > 1:
        end = max(progress.position, config.schedule.total_tokens // config.data.sequence_length)
        found = shares(config.data, sources, progress.mixture, progress.position, end, config.seed)
        lines += [f"source {name}: {share.share:.1%} of the sequences to come, {share.epochs:.2f} epochs" for name, share in found.items()]
    return lines


def describe_run(config: RunConfig, ds_config: dict[str, Any], topology: Topology, sources: dict[str, Index]) -> None:
    """Writes what was run, with what, where: config.yaml, ds_config.json, environment.json, tokenizer/."""
    (config.run_dir / "config.yaml").write_text(yaml.safe_dump(config.as_dict(), sort_keys=False))
    (config.run_dir / "ds_config.json").write_text(json.dumps(ds_config, indent=2) + "\n")
    environment = {
        "versions": {name: version(name) for name in ("torch", "deepspeed", "megatron-core", "webdataset", "sentencepiece", "numpy")},
        "python": platform.python_version(),
        "host": platform.node(),
        "nvidia_apex": nvidia_apex_available(),
        "gate_operators": library.parent.name if config.compute.gate_ops == "fused" and (library := fused.load()) else "ref",
        "git_commit": git_commit(),
        "launcher": topology.launcher,
        "world_size": topology.world_size,
        "tensor_parallel": config.parallel.tensor_parallel,
    }
    (config.run_dir / "environment.json").write_text(json.dumps(environment, indent=2) + "\n")
    directory = next(iter(sources.values())).directory  # all have the same
    shutil.copytree(directory / TOKENIZER_FOLDER, config.run_dir / "tokenizer", dirs_exist_ok=True)


def git_commit() -> str | None:
    """The commit of this checkout; None without git or outside a repository."""
    if shutil.which("git") is None:
        return None
    shown = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return shown.stdout.strip() or None
