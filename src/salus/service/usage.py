"""The account of who used how much, in SQLite: a row for each job and day, written as time passes.

A row has the GPU time of the job on that day, as in `salus ps`, and its memory times time: what was reserved for it on
the GPU, multiplied by how long. Days are those of the machine's local time. Every few seconds what was used is added
up here, so a crash loses no more than that of a job's memory, and nothing of its GPU time: a job that comes back says
how much it had.

The file is bounded: the oldest days go first.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from salus.core.model import Job, Phase
from salus.errors import RequestRejected
from salus.service.caps import user_name

if TYPE_CHECKING:
    from salus.service.job import LiveJob

log = logging.getLogger(__name__)

FILE = "usage.sqlite"
LOOK_S = 1.0
"""How often memory is looked at."""
WRITE_S = 5.0
MOST_ROWS = 100_000
_ROW_BYTES = 120
"""About, with its part of the index."""
KEYS = ("user", "day", "job")
"""What usage can be added up by."""
MOST_LETTERS = 200

_SCHEMA = """
CREATE TABLE IF NOT EXISTS usage (
    day TEXT NOT NULL,
    job_id INTEGER NOT NULL,
    submitted_at REAL NOT NULL,
    uid INTEGER NOT NULL,
    name TEXT NOT NULL,
    gpu_time_s REAL NOT NULL,
    memory_byte_s REAL NOT NULL,
    had_s REAL NOT NULL,
    PRIMARY KEY (day, job_id, submitted_at)
) WITHOUT ROWID;
"""
_ADD = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    gpu_time_s = gpu_time_s + excluded.gpu_time_s,
    memory_byte_s = memory_byte_s + excluded.memory_byte_s,
    had_s = excluded.had_s
"""
"""`had_s`: the job's GPU time of all days when the row was written. Of a job that comes back after a crash, what it has
beyond that was not counted."""


class Book:
    """The file."""

    def __init__(self, path: Path, *, busy_s: float = 5.0) -> None:
        with _usable(path):
            self._db = sqlite3.connect(path, isolation_level=None, timeout=busy_s)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)

    def add(self, rows: Iterable[tuple[Any, ...]]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany(_ADD, rows)
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def had_s(self, job_id: str, submitted_at: float) -> float:
        """The job's GPU time when it was last written down."""
        found = self._db.execute(
            "SELECT MAX(had_s) FROM usage WHERE job_id = ? AND submitted_at = ?", (int(job_id), submitted_at)
        ).fetchone()[0]
        return float(found or 0.0)

    def sums(self, by: Sequence[str], since: str | None = None, uid: int | None = None) -> list[dict[str, Any]]:
        """Added up by some of KEYS, from a day on; of one user, or of all."""
        columns = {"user": "uid", "day": "day", "job": "job_id, submitted_at"}
        group = ", ".join(columns[key] for key in KEYS if key in by)
        with _usable(Path(FILE)):
            found = self._db.execute(
                "SELECT uid, day, job_id, MAX(name), SUM(gpu_time_s), SUM(memory_byte_s), COUNT(DISTINCT job_id) "
                "FROM usage WHERE day >= ? AND (? IS NULL OR uid = ?) "
                + (f"GROUP BY {group} ORDER BY {group}" if group else ""),
                (since or "", uid, uid),
            ).fetchall()
        rows = []
        for owner, day, job_id, name, gpu_time_s, memory_byte_s, jobs in found:
            if not jobs:
                continue
            row: dict[str, Any] = {}
            # A job has one user. Their name is of use there.
            if "user" in by or "job" in by:
                row["user"] = user_name(owner)
            if "day" in by:
                row["day"] = day
            if "job" in by:
                row |= {"job": str(job_id), "name": name}
            else:
                row["jobs"] = jobs
            rows.append(row | {"gpu_time_s": gpu_time_s, "memory_byte_s": memory_byte_s})
        return rows

    def forget(self, oldest: float, *, dry_run: bool = False) -> tuple[int, int, int, int]:
        """Days that are too old, and the oldest where there are too many rows. How many rows those are, about how
        large, and the same of what stays."""
        day = day_of(oldest) if oldest > 0 else ""
        self._db.execute("BEGIN IMMEDIATE")
        gone = self._db.execute("DELETE FROM usage WHERE day < ?", (day,)).rowcount
        gone += self._db.execute(
            "DELETE FROM usage WHERE day < (SELECT day FROM usage ORDER BY day DESC LIMIT 1 OFFSET ?)", (MOST_ROWS,)
        ).rowcount
        (kept,) = self._db.execute("SELECT COUNT(*) FROM usage").fetchone()
        self._db.execute("ROLLBACK" if dry_run else "COMMIT")
        return gone, gone * _ROW_BYTES, kept, kept * _ROW_BYTES

    def close(self) -> None:
        self._db.close()


@dataclass
class _Seen:
    """A job as it was when it was last looked at."""

    core: Job
    """Another one after it came back, or began anew."""
    gpu_time_s: float
    at: float


@dataclass
class _Unwritten:
    uid: int
    name: str
    gpu_time_s: float = 0.0
    memory_byte_s: float = 0.0
    had_s: float = 0.0


class Account:
    """What the service adds to the book."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._seen: dict[str, _Seen] = {}
        self._unwritten: dict[tuple[str, str, float], _Unwritten] = {}
        self._written_at = float("-inf")
        self._is_broken = False

    def look(self, job: LiveJob, core: Job, now: float) -> float:
        """Counts what the job used since the last look, and says how much GPU time that was. `now`: seconds on a clock
        that never jumps."""
        seen = self._seen.get(job.job_id)
        if seen is None or seen.core is not core:
            seen = _Seen(core, min(core.attained_s, self._had_s(job)), now)
            self._seen[job.job_id] = seen
        part = self._unwritten.setdefault(
            (day_of(time.time()), job.job_id, job.submitted_at), _Unwritten(job.uid, job.asked.name[:MOST_LETTERS])
        )
        more_s = core.attained_s - seen.gpu_time_s
        part.gpu_time_s += more_s
        part.memory_byte_s += bytes_on_gpu(core) * (now - seen.at)
        part.had_s = core.attained_s
        seen.gpu_time_s, seen.at = core.attained_s, now
        return more_s

    def forget_job(self, job_id: str) -> None:
        self._seen.pop(job_id, None)

    def is_due(self, now: float) -> bool:
        return bool(self._unwritten) and now >= self._written_at + WRITE_S

    def write(self, now: float) -> None:
        self._written_at = now
        rows = [
            (day, int(job_id), submitted_at, part.uid, part.name, part.gpu_time_s, part.memory_byte_s, part.had_s)
            for (day, job_id, submitted_at), part in self._unwritten.items()
        ]
        try:
            self._book.add(rows)
        except sqlite3.Error as error:
            # What could not be written is tried again. A full disk is no reason to keep jobs from running.
            if not self._is_broken:
                log.warning("the account of usage cannot be written (%s); it is tried again", error)
            self._is_broken = True
            return
        self._is_broken = False
        self._unwritten.clear()

    def sums(self, by: Sequence[str], since: str | None, uid: int | None) -> list[dict[str, Any]]:
        return self._book.sums(by, since, uid)

    def forget(self, oldest: float) -> None:
        self._book.forget(oldest)

    def close(self) -> None:
        self._book.close()

    def _had_s(self, job: LiveJob) -> float:
        unwritten = [part.had_s for (_, job_id, _), part in self._unwritten.items() if job_id == job.job_id]
        try:
            return max([self._book.had_s(job.job_id, job.submitted_at), *unwritten])
        except sqlite3.Error as error:
            log.warning("the account of usage cannot be read (%s)", error)
            return max(unwritten, default=0.0)


def bytes_on_gpu(core: Job) -> int:
    """What is reserved for the job on the GPU now."""
    if core.phase is Phase.WAITING:
        return core.context_bytes
    if core.phase is Phase.PAGED_OUT:
        return core.footprint.internal_bytes
    return core.footprint.fixed_bytes + (core.footprint.ephemeral_bytes if core.lane is not None else 0)


def day_of(moment: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(moment))


@contextlib.contextmanager
def open_book(folder: Path) -> Iterator[Book | None]:
    """The one in a state folder; None where no service has kept one."""
    path = folder / FILE
    if not path.exists():
        yield None
        return
    with contextlib.closing(Book(path)) as book:
        yield book


@contextlib.contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise RequestRejected(
            f"{path}: the account of usage cannot be used ({error}); move the file away or make room"
        ) from None
