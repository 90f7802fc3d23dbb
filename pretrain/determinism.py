"""Runs whose losses and weights are the same bit for bit each time: `compute.deterministic`. On CPUs they are anyway.

torch then takes operators that sum in a fixed order, flash attention's backward pass among them (fixed documents or not), and raises
where it has none. cuBLAS and NCCL are told so in the environment, before they are loaded. Ours do so always.
"""

from collections.abc import MutableMapping

import torch

# What torch admits, the first being the faster.
CUBLAS_WORKSPACES = (":4096:8", ":16:8")
# NVLink SHARP sums in the switch, in the order of arrival. Megatron admits Tree and Collnet, too, but NCCL has these for no all-gather,
# which ZeRO-3 needs.
NCCL_ALGORITHMS = ("Ring", "^NVLS")


def make_deterministic(environment: MutableMapping[str, str]) -> None:
    """Before CUDA is used.

    Raises:
        ValueError: the environment asks for what is not.
    """
    for name, allowed in ("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACES), ("NCCL_ALGO", NCCL_ALGORITHMS):
        value = environment.setdefault(name, allowed[0])
        if value.lower() not in [one.lower() for one in allowed]:
            raise ValueError(f"compute.deterministic is true, but {name} is {value!r}. Unset it, or set it to {' or '.join(allowed)}.")
    torch.use_deterministic_algorithms(True)
    # No result depends on it. A property of the module, which mypy does not see.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
