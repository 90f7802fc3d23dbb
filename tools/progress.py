"""How far a long command is: a bar on a terminal, a line now and then elsewhere."""

import sys
import time

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0


def duration(seconds: float) -> str:
    """For people: 45 s, 12 min, 3 h 05 min, 2 d 3 h."""
    minutes, hours = round(seconds / 60), int(seconds / 3600)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{hours // 24} d {hours % 24} h"


class Progress:
    """Of bytes that are read.

    Args:
        label: what is done.
        done: bytes that an earlier command did.
        unit: B for bytes, or what is counted instead of them.
    """

    def __init__(self, total: int, label: str = "", done: int = 0, unit: str = "B") -> None:
        self._total, self._done, self._first, self._label, self._unit = total, done, done, label, unit
        self._start = self._last_line = time.monotonic()
        self._bar = tqdm(total=total, initial=done, unit=unit, unit_scale=True, desc=label or None, disable=not sys.stderr.isatty())

    def advance(self, done: int, note: str) -> None:
        """`done` in all."""
        self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._done)
        self._done = done
        now = time.monotonic()
        if self._bar.disable and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            rate = (self._done - self._first) / (now - self._start)
            left = f", {duration((self._total - done) / rate)} left" if rate and self._total > done else ""
            share = f"{done / self._total:.0%}" if self._total else f"{done / 1e6:.0f} MB"
            label = f"{self._label}: " if self._label else ""
            speed = f"{rate / 1e6:.1f} MB/s" if self._unit == "B" else f"{rate:.0f} {self._unit}s/s"
            print(f"{label}{share}, {note}{left}, {speed}", flush=True)

    def close(self) -> None:
        self._bar.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
