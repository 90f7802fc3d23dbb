"""What a process holds in memory. Linux only."""

from pathlib import Path


def _bytes(*names: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[name].split()[0]) * 1024 for name in names)


def private_bytes() -> int:
    """Resident anonymous and shared memory: not mapped files, whose pages are the page cache's."""
    return _bytes("RssAnon", "RssShmem")


def resident_bytes() -> int:
    return _bytes("VmRSS")


def peak_bytes() -> int:
    """The most that was resident since `forget_peak`."""
    return _bytes("VmHWM")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
