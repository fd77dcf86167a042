"""What Salus keeps on the disk, and how much of it: the journal, the output of jobs, records, history, the log.

A service keeps its state folder within its limits (`housekeeping`), and `salus clean` does so when a person asks for
it; both at once do no harm. The oldest goes first. What is in use never goes: a
segment of the journal that is being written, the output of a job that runs.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from salus.registry import Registry, lists_in, outputs
from salus.service import segments, usage
from salus.service.history import History

HISTORY = "history.sqlite"
MIB = 2**20
SMALLEST_BYTES = MIB
"""A limit cannot be less."""
SEGMENTS_IN_LIMIT = 16
"""Of each device; so that what is left of a journal is never much less than the limit."""
LARGEST_SEGMENT_BYTES = 8 * MIB
SERVICE_LOG_BYTES = 4 * MIB


@dataclass(frozen=True)
class Limits:
    journal_bytes: int = 256 * MIB
    output_bytes: int = 256 * MIB
    """Of jobs that have ended."""
    keep_s: float | None = 90 * 86400.0
    """How long anything is kept; None: for ever."""

    def segment_bytes(self, devices: int) -> int:
        return min(LARGEST_SEGMENT_BYTES, self.journal_bytes // (SEGMENTS_IN_LIMIT * max(1, devices)))

    def oldest(self, now: float) -> float:
        """What ended before this moment is too old."""
        return float("-inf") if self.keep_s is None else now - self.keep_s


@dataclass(frozen=True)
class Item:
    path: Path
    size_bytes: int
    ended_at: float
    in_use: bool = False


@dataclass
class Tidied:
    """What was removed of one kind, or would be; and what stays."""

    kind: str
    removed: int = 0
    removed_bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0
    compressed: int = 0
    notes: list[str] = field(default_factory=list)


def too_much(items: Iterable[Item], limit_bytes: int, oldest: float) -> list[Item]:
    """What is to go: whatever is too old, and then the oldest until the rest is within the limit."""
    free = [item for item in items if not item.in_use]
    gone = [item for item in free if item.ended_at < oldest]
    rest = sorted((item for item in free if item.ended_at >= oldest), key=lambda item: (item.ended_at, item.path))
    total_bytes = sum(item.size_bytes for item in rest)
    while rest and total_bytes > limit_bytes:
        first = rest.pop(0)
        total_bytes -= first.size_bytes
        gone.append(first)
    return gone


def tidy_files(state: Path, limits: Limits, *, room_for_bytes: int = 0, dry_run: bool = False) -> list[Tidied]:
    """`room_for_bytes`: so much may be written to the journal before the next time."""
    return [_tidy_journal(state / "journal", limits, room_for_bytes, dry_run), _tidy_output(state, limits, dry_run)]


def tidy_records(state: Path, limits: Limits, *, dry_run: bool = False) -> list[Tidied]:
    """A service has these files open, and does it itself: two that write at once wait for each other."""
    found = []
    oldest = limits.oldest(time.time())
    counts = []
    for path in lists_in(state):
        with contextlib.closing(Registry(path)) as registry:
            counts.append(registry.forget(oldest, dry_run=dry_run))
    if counts:
        removed, removed_bytes, kept, kept_bytes = map(sum, zip(*counts, strict=True))
        found.append(Tidied("records", removed, removed_bytes, kept, kept_bytes))
    if (state / HISTORY).exists():
        history = History(state / HISTORY)
        with contextlib.closing(history):
            found.append(Tidied("history", *history.forget(oldest, dry_run=dry_run)))
    with usage.open_book(state) as book:
        if book is not None:
            found.append(Tidied("usage", *book.forget(oldest, dry_run=dry_run)))
    return found


def _tidy_journal(folder: Path, limits: Limits, room_for_bytes: int, dry_run: bool) -> Tidied:
    tidied = Tidied("journal")
    if not folder.is_dir():
        return tidied
    for path in segments.unfinished_in(folder):
        if not dry_run:
            segments.remove(path)
    for segment in segments.files_in(folder):
        if not segment.is_compressed and (
            not segments.is_being_written(segment.path) if dry_run else segments.compress(segment)
        ):
            tidied.compressed += 1
    files = [segment.path for segment in segments.files_in(folder)]
    items = [_item(path, in_use=segments.is_being_written(path)) for path in files if path.exists()]
    written_bytes = sum(item.size_bytes for item in items if item.in_use)
    limit_bytes = limits.journal_bytes - max(written_bytes, room_for_bytes)
    for item in too_much(items, limit_bytes, limits.oldest(time.time())):
        if dry_run or segments.remove(item.path):
            tidied.removed += 1
            tidied.removed_bytes += item.size_bytes
    return _count_kept(tidied, items)


def _tidy_output(state: Path, limits: Limits, dry_run: bool) -> Tidied:
    """A job that runs is told of, and not counted: one that says much would cost all others what they have said."""
    tidied = Tidied("output")
    folder = state / "output"
    if not folder.is_dir():
        return tidied
    jobs = outputs(state)
    items = []
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(FileNotFoundError):
            job = jobs.get(str(path))
            item = _item(path, in_use=job is not None and job.runs)
            items.append(item)
            if job is not None and job.runs and item.size_bytes > limits.output_bytes:
                tidied.notes.append(
                    f"job {job.job_id} has written {item.size_bytes // MIB} MiB and runs on: {path} is not touched "
                    "before the job ends"
                )
    for item in too_much(items, limits.output_bytes, limits.oldest(time.time())):
        if not dry_run:
            item.path.unlink(missing_ok=True)
        tidied.removed += 1
        tidied.removed_bytes += item.size_bytes
    return _count_kept(tidied, items)


def _item(path: Path, in_use: bool) -> Item:
    found = path.stat()
    return Item(path, found.st_size, found.st_mtime, in_use)


def _count_kept(tidied: Tidied, items: list[Item]) -> Tidied:
    tidied.kept = len(items) - tidied.removed
    tidied.kept_bytes = sum(item.size_bytes for item in items) - tidied.removed_bytes
    return tidied


def rotate_log(log: Path, limit_bytes: int = SERVICE_LOG_BYTES) -> None:
    """The log of this process, if that is the file: what was in it is kept once, beside it."""
    try:
        ours, there = os.fstat(2), log.stat()
    except OSError:
        return
    if (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino) or there.st_size < limit_bytes:
        return
    log.replace(log.with_name(f"{log.name}.1"))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if (now := os.fstat(number)) and (now.st_dev, now.st_ino) == (there.st_dev, there.st_ino):
                os.dup2(descriptor, number)
    os.close(descriptor)
