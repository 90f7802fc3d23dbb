"""Memory that the CPU allocator hands out while a function runs, exactly: every allocation and release, temporaries included."""

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile


def allocations(function: Callable[[], Any]) -> tuple[int, int]:
    """Runs it. Returns the most bytes it had allocated at once on top of what was there, and those that it left allocated while its
    result was alive."""
    gc.collect()  # what earlier graphs left must not be released meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    levels = list(accumulate((event.nbytes() for event in changes), initial=0))
    del result
    return max(levels), levels[-1]
