"""Writes safetensors shards one tensor at a time.

The safetensors library needs all tensors of a file in memory before it writes the first. The format does not: 8 bytes of header length,
a JSON header with every name, dtype, shape and byte range, then the raw little-endian bytes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

SHARD_BYTES = 5 * 10**9

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class TensorPlan(NamedTuple):
    """What a file will hold under `name`; known before the tensor is read."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_shards(directory: Path, plan: list[TensorPlan], read: Callable[[str], Tensor], shard_bytes: int = SHARD_BYTES) -> None:
    """Writes `model.safetensors`, or `model-0000i-of-0000n.safetensors` and their index, with the file names of transformers.

    Args:
        plan: the tensors, in the order in which they are written.
        read: returns one tensor by name, of the planned shape and dtype; only one is held at a time.
        shard_bytes: the most a file may hold, unless a single tensor is larger.
    """
    shards = _split(plan, shard_bytes)
    if len(shards) == 1:
        _write_file(directory / "model.safetensors", shards[0], read)
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        file_name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        _write_file(directory / file_name, shard, read)
        weight_map |= {tensor.name: file_name for tensor in shard}
    index = {"metadata": {"total_size": sum(tensor.bytes for tensor in plan)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _split(plan: list[TensorPlan], shard_bytes: int) -> list[list[TensorPlan]]:
    shards: list[list[TensorPlan]] = [[]]
    size = 0
    for tensor in plan:
        if shards[-1] and size + tensor.bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    return shards


def _write_file(path: Path, plan: list[TensorPlan], read: Callable[[str], Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in plan:
        end = offset + tensor.bytes
        header[tensor.name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data starts at a multiple of 8
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in plan:
            file.write(_content(tensor, read(tensor.name)))


def _content(tensor: TensorPlan, value: Tensor) -> memoryview:
    """The value's bytes, without a copy."""
    assert value.shape == tensor.shape and value.dtype == tensor.dtype, f"{tensor.name} is not as planned"
    return value.contiguous().view(torch.uint8).numpy().data
