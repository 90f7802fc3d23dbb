"""Counts the collectives of this process, by process group, as PyTorch's dispatcher sees them."""

from collections import Counter
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    "c10d._allgather_base_": "all-gather",
    "c10d.allgather_": "all-gather",
    "c10d._reduce_scatter_base_": "reduce-scatter",
    "c10d.reduce_scatter_": "reduce-scatter",
    "c10d.allreduce_": "all-reduce",
}


class CollectiveCounter(TorchDispatchMode):
    """While it is entered, counts the collectives of one process group by kind.

    Attributes:
        calls: by kind ("all-gather", "reduce-scatter", "all-reduce"); any other collective under its operator's name.
        elements: of the whole tensor, as if no rank had a part of it yet.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.name = group.group_name
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Any = None) -> Any:
        if function.namespace == "c10d" and any(self._is_group(argument) for argument in arguments):
            kind = KINDS.get(f"c10d.{function._opname}", function._opname)
            self.calls[kind] += 1
            self.elements[kind] += max(_elements(argument) for argument in arguments)
        return function(*arguments, **(options or {}))

    def _is_group(self, argument: Any) -> bool:
        return (
            isinstance(argument, torch.ScriptObject)
            and "ProcessGroup" in str(argument._type())
            and self.name == (ProcessGroup.unbox(argument).group_name)
        )


def _elements(argument: Any) -> int:
    if isinstance(argument, list | tuple):
        return sum(_elements(part) for part in argument)
    return argument.numel() if isinstance(argument, torch.Tensor) else 0
