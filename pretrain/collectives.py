"""The last collectives of this process, as torch's flight recorder has them: it keeps the newest 2,000 by default (TORCH_FR_BUFFER_SIZE).

Recording one takes about 2 us. Which have ended, gloo says at once, and NCCL's own thread a moment later.
"""

import pickle
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

OURS = tuple(str(Path(__file__).parents[1] / package) for package in ("pretrain", "model"))
TORCH = str(Path(torch.__file__).parent)
SHOWN = 8  # of each process group


def begun() -> int:
    """How many this process has begun, in all process groups: ranks that wait for another have begun more than it."""
    return sum(
        group["last_enqueued_collective"] for recorder in _recorders(includeCollectives=False) for group in recorder["pg_status"].values()
    )


def last_collectives() -> tuple[list[str], str]:
    """Lines about the last ones of each process group; and of those that have not ended the oldest of each, "" if all have."""
    entries = [entry for recorder in _recorders() for entry in recorder["entries"]]
    return describe(entries, _ranks(), time.time_ns()), waiting(entries)


def describe(entries: Sequence[dict[str, Any]], ranks: dict[str, list[int]], now: int) -> list[str]:
    """Of each process group, the last ones.

    Args:
        ranks: of each group, by its name.
        now: ns since 1970.
    """
    lines = []
    for (name, description), of_group in _by_group(entries).items():
        what = "" if description == "undefined" else f" ({description})"
        lines.append(f"process group {name}{what} of ranks {ranks.get(name, 'unknown')}:")
        for entry in of_group[-SHOWN:]:
            ago = (now - entry["time_created_ns"]) / 1e9
            lines.append(f"  {ago:.1f} s ago: {_what(entry)}, {'ended' if _ended(entry) else 'NOT ENDED'}")
    return lines or ["none is recorded: is TORCH_FR_BUFFER_SIZE 0?"]


def waiting(entries: Sequence[dict[str, Any]]) -> str:
    """Of those that have not ended, the oldest of each process group."""
    oldest = _by_group(entry for entry in entries if not _ended(entry))
    return "; ".join(_what(of_group[0]) for of_group in oldest.values())


def _by_group(entries: Iterable[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(entry["process_group"], []).append(entry)
    return groups


def _recorders(**options: bool) -> list[dict[str, Any]]:
    """gloo's, and NCCL's where torch has one."""
    functions = (getattr(torch._C._distributed_c10d, name, None) for name in ("_dump_fr_trace", "_dump_nccl_trace"))
    return [pickle.loads(function(**options)) for function in functions if function is not None]


def _ended(entry: dict[str, Any]) -> bool:
    return bool(entry["retired"] or entry["state"] == "completed")


def _what(entry: dict[str, Any]) -> str:
    tensors = ", ".join(f"{dtype} {size}" for dtype, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False))
    return f"{entry['profiling_name']} {entry['collective_seq_id']} of {tensors or 'nothing'}, begun in {_where(entry['frames'])}"


def _where(frames: Sequence[dict[str, Any]]) -> str:
    """The innermost line of ours, or, as in a thread of the backward pass, of another that is not torch's."""
    own = [frame for frame in frames if frame["filename"].startswith(OURS)]
    others = [frame for frame in frames if not frame["filename"].startswith(TORCH)]
    for frame in own or others or frames:
        path = "/".join(Path(frame["filename"]).parts[-2:])
        return f"{path}:{frame['line']} ({frame['name']})"
    return "an unknown line"


def _ranks() -> dict[str, list[int]]:
    world = distributed_c10d._world
    return {name: sorted(world.pg_group_ranks.get(group, {})) for group, name in world.pg_names.items()}
