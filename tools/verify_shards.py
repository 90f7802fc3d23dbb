"""Checks a dataset against its index, and names each damaged thing on a line.

Every mode checks the index, its arrays, the tokenizer's copy and each shard's size. `quick` stops there, as training does at its start.
`block` reads what training reads: each block's name, counts, tokens and document ends, against the index and their crc32. `full` (the
default) checks every byte: also the tar headers and each shard's sha256. A shard behind a URL is not read in part: in both `block` and
`full` it is downloaded to this machine's temporary folder, as many at a time as there are processes, and compared with its sha256; if
that differs, the damaged blocks are named.

Exit code 0: nothing found; 1: damage; 2: nothing found, but not everything could be checked (no dataset, a file that cannot be read,
no answer from the server, a worker that died, wrong arguments); 130: interrupted. Examples:

    python tools/verify_shards.py data/mine
    python tools/verify_shards.py data/mine --mode block --processes 8 --report damage.json
    python tools/verify_shards.py s3://bucket/mine --mode quick
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pretrain.remote import ContentError, is_url
from pretrain.shard_cache import open_remote_dataset
from pretrain.shards import Damage, DamageError, DatasetError, Index, load_index, tokenizer_damage
from tools.progress import Progress
from tools.restart import write_synced
from tools.shard_checks import check_shard, shard_check
from tools.workers import in_order

REPORT_FORMAT = "grt-verification"
REPORT_VERSION = 1
PROCESS_BYTES = 1 << 27  # a process is started for as many: less is read sooner than it starts
DOWNLOADS = 8  # at a time, however few the CPUs
GIVE_UP_AFTER = 10  # shards in a row that could not be read: the server or disk is away, and each shard's retries take long


class Report:
    """What was found so far; prints each damage as it comes."""

    def __init__(self, dataset: str, mode: str) -> None:
        self.dataset, self.mode = dataset, mode
        self.fingerprint: str | None = None
        self.states: dict[str, str] = {}  # by shard: ok, damaged, missing or unchecked
        self.damage: list[Damage] = []
        self.error: str | None = None  # why not everything was checked
        self.bytes_read = 0
        self._start = time.monotonic()

    def add(self, damage: Sequence[Damage]) -> None:
        self.damage += damage
        for found in damage:
            with tqdm.external_write_mode():  # not into a bar
                print(found, flush=True)

    @property
    def exit_code(self) -> int:
        if any(damage.kind != "unreadable" for damage in self.damage):
            return 1
        return 2 if self.damage or self.error else 0

    def content(self) -> dict[str, Any]:
        """What the JSON report holds."""
        return {
            "format": REPORT_FORMAT,
            "version": REPORT_VERSION,
            "dataset": self.dataset,
            "fingerprint": self.fingerprint,
            "mode": self.mode,
            "exit_code": self.exit_code,
            "error": self.error,
            "shards": self.states,
            "damage": [damage._asdict() for damage in self.damage],
            "bytes_read": self.bytes_read,
            "seconds": round(time.monotonic() - self._start, 3),
        }


@contextmanager
def opened(dataset: str) -> Iterator[Index]:
    """The index of a directory or URL; what is downloaded is removed at the end."""
    if not is_url(dataset):
        yield load_index(Path(dataset))
        return
    with tempfile.TemporaryDirectory() as folder:
        yield open_remote_dataset(dataset, Path(folder), max_bytes=0)


def check_shards(index: Index, report: Report, processes: int | None) -> None:
    """Fills the report, shard by shard in their order.

    Raises:
        DatasetError: too many shards in a row could not be read.
    """
    shards = [(split, number) for split in index.splits.values() for number in range(len(split.shards))]
    names = [split.shards[number].name for split, number in shards]
    sizes = [split.shards[number].bytes for split, number in shards]
    report.states = dict.fromkeys(names, "unchecked")
    is_quick = report.mode == "quick"
    if is_quick and not index.cache:
        processes = 1  # sizes of files here are known at once
    processes = min(processes or default_processes(sum(sizes), is_remote=index.cache is not None), max(1, len(shards)))
    jobs = (shard_check(index, split, number, report.mode) for split, number in shards)
    done = bad = unreadable = 0
    with (
        Progress(len(shards), unit="shard") if is_quick else Progress(sum(sizes)) as progress,
        in_order(check_shard, jobs, processes) as results,
    ):
        for number, (name, size, checked) in enumerate(zip(names, sizes, results, strict=True), 1):
            report.add(checked.damage)
            report.bytes_read += checked.bytes_read
            report.states[name] = state(checked.damage)
            bad += report.states[name] != "ok"
            unreadable = unreadable + 1 if report.states[name] == "unchecked" else 0
            if unreadable == GIVE_UP_AFTER:
                raise DatasetError(f"gave up after {unreadable} shards in a row that could not be read; the later ones are not checked")
            done += 1 if is_quick else size
            progress.advance(done, f"{number} of {len(shards)} shards, {bad} not ok")


def default_processes(size: int, *, is_remote: bool) -> int:
    return min(max(DOWNLOADS if is_remote else 1, os.cpu_count() or 1), 1 + size // PROCESS_BYTES)


def state(damage: Sequence[Damage]) -> str:
    kinds = {found.kind for found in damage}
    if not kinds:
        return "ok"
    return "missing" if "missing" in kinds else "unchecked" if "unreadable" in kinds else "damaged"


def verify(report: Report, processes: int | None) -> None:
    """Fills the report."""
    try:
        with opened(report.dataset) as index:
            report.fingerprint = index.fingerprint
            report.add(tokenizer_damage(index))
            check_shards(index, report, processes)
    except (DatasetError, OSError) as error:
        if is_damage(error):
            report.add([Damage(None, str(error), "index")])
        else:
            report.error = str(error)
    except BrokenProcessPool:
        report.error = "a worker process died, most often because memory ran out; use fewer --processes"


def is_damage(error: Exception) -> bool:
    """Of an error in reading the index and what belongs to it, except that there is no index."""
    reason = error.__cause__
    missing = isinstance(reason, FileNotFoundError) and "index.json cannot be read" not in str(error)
    return missing or isinstance(error, DamageError) or isinstance(reason, DamageError | ContentError)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="a directory that prepare_data.py wrote, or its URL")
    parser.add_argument("--mode", choices=["quick", "block", "full"], default="full", help="default: %(default)s")
    parser.add_argument(
        "--processes", type=int, metavar="N", help=f"default: the CPUs (behind a URL at least {DOWNLOADS}), fewer for a small dataset"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what was found as JSON (see docs/formats.md)")
    args = parser.parse_args(arguments)
    if args.processes is not None and args.processes < 1:
        parser.error(f"--processes must be at least 1, not {args.processes}")
    if args.report and not args.report.parent.is_dir():
        parser.error(f"--report {args.report}: there is no folder {args.report.parent}")
    report = Report(args.dataset, args.mode)
    try:
        if args.report:
            args.report.unlink(missing_ok=True)  # an older report is never taken for this one's
        verify(report, args.processes)
        if args.report:
            partial = args.report.with_name(f"{args.report.name}.partial")
            write_synced(partial, json.dumps(report.content(), indent=1).encode() + b"\n")
            partial.replace(args.report)
    except OSError as error:
        report.error = f"the report cannot be written: {error}"
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    if report.error:
        print(f"error: {report.error}", file=sys.stderr)
    elif not report.damage:
        print(f"{args.dataset}: no damage found in {len(report.states)} shards ({args.mode})")
    return report.exit_code


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)  # ends as with Ctrl-C: workers stopped, downloads removed
    sys.exit(main())
