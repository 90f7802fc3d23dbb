"""Refuses a run whose ranks were started with different settings or code.

Ranks that disagree on a depth, a layout or a DeepSpeed setting issue collectives that do not match, and wait for one another for
ever. So all settings are compared once, before anything is split into groups.
"""

from importlib.metadata import version
from typing import Any

import torch

from model.depth import sample_depth
from pretrain.config import RunConfig

COMPARED_DEPTHS = 64  # steps: enough to show that two samplers differ
PACKAGES = ("torch", "deepspeed", "megatron-core")


class DisagreementError(RuntimeError):
    """Ranks differ; raised on all of them, with the same message."""


def require_same_run(config: RunConfig, ds_config: dict[str, Any], fingerprints: dict[str, str]) -> None:
    """Compares with the other ranks. Called by all of them.

    Raises:
        DisagreementError: a setting, the dataset (behind a URL it may change meanwhile), the sampled depths or a package version differs.
    """
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    datasets = {f"the fingerprint of the dataset {name}": fingerprint for name, fingerprint in fingerprints.items()}
    versions = {f"the version of {name}": version(name) for name in PACKAGES}
    torch.distributed.all_gather_object(everyone, settings(config, ds_config) | versions | datasets)
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for name in first | other:  # in order: settings before what follows from them
            if first.get(name) != other.get(name):
                if name == "compute.gate_ops":
                    raise DisagreementError(
                        f"the fused gate operators are there for some ranks only (rank 0: {first[name]}, rank {rank}: {other[name]}). "
                        "Build them where all nodes see them (python -m model.ops.build), or set compute.gate_ops to ref."
                    )
                raise DisagreementError(
                    f"ranks were started with different settings: {name} is {first.get(name)!r} on rank 0 and {other.get(name)!r} on rank "
                    f"{rank}. Start all ranks with the same command, config files and checkout."
                )


def settings(config: RunConfig, ds_config: dict[str, Any]) -> dict[str, Any]:
    """All settings of a run, by dotted name, and the depths that it samples first."""
    depths = [sample_depth(config.model, config.seed, step) for step in range(COMPARED_DEPTHS)]
    flat = _flat("", config.as_dict()) | _flat("ds_config.", ds_config)
    first = {"compute.gate_ops": config.compute.gate_ops}  # it decides what is planned, and so other settings
    return first | flat | {f"depth of the first {COMPARED_DEPTHS} steps": depths}


def _flat(prefix: str, tree: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(f"{prefix}{name}.", value) if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
