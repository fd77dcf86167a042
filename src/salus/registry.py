"""Jobs, in SQLite: those that run now, by which a service that is started again knows them, and those that have ended.

A service writes here. Commands read it where there is none, and a launcher whose service is gone writes how its job
ended. Of running ones only this is kept; everything else they tell a new service themselves.
Several services may share the file: of running jobs each knows its own, by its socket.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from salus.errors import RequestRejected
from salus.processes import began, is_there
from salus.protocol.messages import Register

log = logging.getLogger(__name__)

FILE = "jobs.sqlite"
KEPT_FILES = "kept-*.sqlite"
"""See `salus.records`."""
OPEN_S = 5.0
FORGET_S = 90 * 86400.0
KEPT = 1000
"""Jobs that have ended."""
_ADDED = {
    "device": "TEXT NOT NULL DEFAULT ''",
    "socket": "TEXT NOT NULL DEFAULT ''",
    "row": "TEXT NOT NULL DEFAULT '{}'",
    "released": "INTEGER NOT NULL DEFAULT 0",
    "finished_at": "REAL",
    # When each process began, as the kernel counts it: numbers of processes are given out again.
    "launcher_began": "INTEGER NOT NULL DEFAULT 0",
    "worker_began": "INTEGER NOT NULL DEFAULT 0",
    # By this alone a job is let back into its lane after a restart: whose memory that is, no job says for itself.
    "lane": "INTEGER",
    "paused_by": "INTEGER",
}
"""Columns that a file of an older version lacks."""
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS jobs (
    job_id INTEGER PRIMARY KEY AUTOINCREMENT,
    token TEXT NOT NULL,
    uid INTEGER NOT NULL,
    asked TEXT NOT NULL,
    submitted_at REAL NOT NULL,
    launcher INTEGER NOT NULL,
    worker INTEGER NOT NULL DEFAULT 0,
    {", ".join(f"{column} {kind}" for column, kind in _ADDED.items())}
)
"""
KEPT_BYTES = 64 * 2**20
"""What is written of all of those together: commands may be long."""
_TRIM = """
DELETE FROM jobs WHERE finished_at IS NOT NULL AND (finished_at < ? OR job_id NOT IN
    (SELECT job_id FROM (
        SELECT job_id, ROW_NUMBER() OVER latest AS number, SUM(LENGTH(asked) + LENGTH(row)) OVER latest AS size_bytes
        FROM jobs WHERE finished_at IS NOT NULL WINDOW latest AS (ORDER BY job_id DESC)
    ) WHERE number <= ? AND size_bytes <= ?))
"""


@dataclass(frozen=True)
class SavedJob:
    job_id: str
    token: str
    uid: int
    asked: Register
    submitted_at: float
    launcher: int
    worker: int
    """The process that used the device; 0: none did."""
    device: str
    """On which it was placed."""
    lane: int | None
    """Which of that device's lanes it was in."""
    paused_by: int | None = None
    """The user who paused it; None: it is not paused."""


@dataclass(frozen=True)
class Record:
    """A job that no service looks after: it has ended, or goes on without."""

    uid: int
    row: dict[str, Any]
    """As in `salus ps --json`."""
    launcher: int
    """0: it is gone."""
    worker: int
    """The process that used the device; 0: none did, or it is gone."""
    token: str
    """By which the job's processes are found."""

    @property
    def goes_on(self) -> bool:
        return bool(self.row["state"] == "unmanaged")


@dataclass(frozen=True)
class Output:
    """What a submitted job writes to."""

    job_id: str
    runs: bool
    """As far as is known here: on another machine that shares the folder it may."""


class Numbers(Enum):
    """Which ids a list gives out. A service for several users has those that end in 0, a user's own the others.

    So no job of the one has the id of a job of the other, though neither knows what the other gives out.
    """

    OWN = "last + 1 + (last % 10 = 9)"
    SHARED = "(last / 10 + 1) * 10"


class Registry:
    def __init__(
        self, path: Path, socket: str | None = "", *, numbers: Numbers = Numbers.OWN, busy_s: float = 5.0
    ) -> None:
        """`socket`: of the service whose running jobs these are; None: those of any service."""
        # A state directory may be one for several machines.
        self._socket = f"{os.uname().nodename}:{socket or ''}"
        self._of_any_service = socket is None
        self._numbers = numbers
        self.path = path
        with usable(path):
            self._db = sqlite3.connect(path, isolation_level=None, timeout=OPEN_S)
            self._prepare()
            self._db.execute(f"PRAGMA busy_timeout={int(busy_s * 1000)}")

    def _prepare(self) -> None:
        """Another process may be about the same."""
        until = time.monotonic() + OPEN_S
        while True:
            try:
                self._db.execute("PRAGMA journal_mode=WAL")
                # What the kernel has survives a killed service. After a crash of the machine there are no jobs.
                self._db.execute("PRAGMA synchronous=OFF")
                self._db.execute("BEGIN IMMEDIATE")
                break
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > until:
                    raise
                time.sleep(0.02)
        self._db.execute(_SCHEMA)
        there = {row[1] for row in self._db.execute("PRAGMA table_info(jobs)")}
        for column, kind in _ADDED.items():
            if column not in there:
                self._db.execute(f"ALTER TABLE jobs ADD COLUMN {column} {kind}")
        self._db.execute("COMMIT")

    # By the service.

    def add(self, token: str, uid: int, asked: Register, submitted_at: float, launcher: int, device: str) -> str:
        """Its id, which no job before it had."""
        try:
            cursor = self._db.execute(
                "INSERT INTO jobs "
                "(job_id, token, uid, asked, submitted_at, launcher, launcher_began, device, socket) "
                f"SELECT {self._numbers.value}, ?, ?, ?, ?, ?, ?, ?, ? "
                "FROM (SELECT coalesce(max(seq), 0) AS last FROM sqlite_sequence WHERE name = 'jobs')",
                (token, uid, json.dumps(asdict(asked)), submitted_at, launcher, began(launcher), device, self._socket),
            )
        except sqlite3.Error as error:
            raise RequestRejected(f"the list of jobs cannot be written ({error}); make room on the disk") from None
        return str(cursor.lastrowid)

    def keep(self, job_id: str, token: str, uid: int, asked: Register, launcher: int, user: str = "") -> None:
        """From a launcher: a job that another list gave its id. One of that id from before is forgotten."""
        self._write("DELETE FROM jobs WHERE job_id = ?", int(job_id))
        self._write(
            # It comes back to no service from here.
            "INSERT INTO jobs "
            "(released, row, job_id, token, uid, asked, submitted_at, launcher, launcher_began, socket) "
            "VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            json.dumps({"user": user}),
            *(int(job_id), token, uid, json.dumps(asdict(asked)), time.time(), launcher, began(launcher)),
            self._socket,
        )

    def attached(self, job_id: str, worker: int) -> None:
        self._write("UPDATE jobs SET worker = ?, worker_began = ? WHERE job_id = ?", worker, began(worker), int(job_id))

    def entered(self, job_id: str, lane: int | None) -> None:
        """None: it is in no lane now."""
        self._write("UPDATE jobs SET lane = ? WHERE job_id = ?", lane, int(job_id))

    def remove(self, job_id: str) -> None:
        """It was none."""
        self._write("DELETE FROM jobs WHERE job_id = ?", int(job_id))

    def describe(self, row: dict[str, Any]) -> None:
        """What is known of the job, as in `salus ps --json`."""
        self._write(
            "UPDATE jobs SET row = ?, finished_at = ? WHERE job_id = ?",
            json.dumps(row),
            row["finished_at"],
            int(row["id"]),
        )

    def change(self, job_id: str, asked: Register) -> None:
        """What is asked of the job is something else from now on."""
        self._write("UPDATE jobs SET asked = ? WHERE job_id = ?", json.dumps(asdict(asked)), int(job_id))

    def pause(self, job_id: str, by_uid: int | None) -> None:
        """None: it was resumed."""
        self._write("UPDATE jobs SET paused_by = ? WHERE job_id = ?", by_uid, int(job_id))

    def release(self, job_id: str) -> None:
        """It goes on without a service, and will not come back to one."""
        self._write("UPDATE jobs SET released = 1 WHERE job_id = ?", int(job_id))

    def running(self) -> list[SavedJob]:
        """Those of the service before us, which was killed."""
        rows = self._db.execute(
            "SELECT job_id, token, uid, asked, submitted_at, launcher, worker, device, lane, paused_by FROM jobs "
            "WHERE finished_at IS NULL AND NOT released AND socket = ? ORDER BY job_id",
            (self._socket,),
        )
        return [
            SavedJob(str(job_id), token, uid, Register(**json.loads(asked)), *rest)
            for job_id, token, uid, asked, *rest in rows.fetchall()
        ]

    def _write(self, statement: str, *values: object) -> None:
        """A full disk is no reason to keep a job from its end."""
        try:
            self._db.execute(statement, values)
        except (sqlite3.Error, OverflowError, UnicodeError) as error:
            log.warning("the list of jobs cannot be written (%s)", error)

    # By anyone.

    def ended(self) -> list[Record]:
        """Those that are over: the last ones, and those of which nobody knows how they ended."""
        return [record for record in self._records("finished_at IS NOT NULL OR released") if not record.goes_on]

    def unmanaged(self) -> list[Record]:
        """Those that go on without a service."""
        return [record for record in self._records("finished_at IS NULL AND released") if record.goes_on]

    def all(self) -> list[Record]:
        """Where there is no service: the jobs of one that was killed go on without, too."""
        return self._records("1")

    def find(self, job_id: str) -> Record | None:
        return next(iter(self._records("job_id = ?", job_id)), None)

    def _records(self, which: str, *values: object) -> list[Record]:
        rows = self._db.execute(
            "SELECT job_id, uid, asked, submitted_at, row, finished_at, token, launcher, launcher_began, worker, "
            f"worker_began FROM jobs WHERE (finished_at IS NOT NULL OR ? OR socket = ?) AND ({which}) ORDER BY job_id",
            (self._of_any_service, self._socket, *values),
        )
        found = []
        for job_id, uid, asked, submitted_at, text, finished_at, token, *processes in rows.fetchall():
            row = {**_at_least(str(job_id), json.loads(asked), submitted_at), **json.loads(text)}
            launcher = worker = 0
            if finished_at is None:
                launcher, worker = _if_alive(*processes[:2]), _if_alive(*processes[2:])
                alive = launcher or worker
                row |= {
                    "state": "unmanaged" if alive else "lost",
                    "wait_reason": None if alive else "how it ended is not known",
                    "lane": None,
                    "position": None,
                }
            found.append(Record(uid, row, launcher, worker, token))
        return found

    def cancelled(self, job_id: str) -> None:
        """One that goes on without a service was told to end."""
        self._write("UPDATE jobs SET row = json_set(row, '$.state', 'cancelled') WHERE job_id = ?", int(job_id))

    def finish(
        self, job_id: str, token: str, exit_code: int, why: str = "", counts: Mapping[str, float] | None = None
    ) -> None:
        """From a launcher: its job has ended, and no service has heard of it. `counts`: what it did, if known."""
        found = self._db.execute(
            "SELECT row FROM jobs WHERE job_id = ? AND token = ? AND finished_at IS NULL", (int(job_id), token)
        ).fetchone()
        if found is not None:
            row = json.loads(found[0])
            cancelled = row.get("state") == "cancelled"
            state = "cancelled" if cancelled else "done" if exit_code == 0 else "failed"
            ended = {"state": state, "exit_code": exit_code, "finished_at": time.time(), "lane": None}
            done = counts or {}
            self.describe({"id": job_id, **row, **ended, **done, "wait_reason": why or None, "position": None})

    def trim(self) -> None:
        """Only the last ones are kept; of those that are lost, too."""
        for record in self._records("finished_at IS NULL AND released"):
            if not record.goes_on:
                self._write(
                    "UPDATE jobs SET row = ?, finished_at = submitted_at WHERE job_id = ?",
                    json.dumps(record.row),
                    int(record.row["id"]),
                )
        # Those of a service that never came back.
        for job_id, *processes in self._db.execute(
            "SELECT job_id, launcher, launcher_began, worker, worker_began FROM jobs "
            "WHERE finished_at IS NULL AND submitted_at < ?",
            (time.time() - FORGET_S,),
        ).fetchall():
            if not _any_alive(processes):
                self._write("DELETE FROM jobs WHERE job_id = ?", job_id)
        self._write(_TRIM, float("-inf"), KEPT, KEPT_BYTES)

    # What is kept on the disk.

    def forget(self, oldest: float, *, dry_run: bool = False) -> tuple[int, int, int, int]:
        """Ended jobs, but for the last ones that are not too old. How many those are, how large, and the same of what
        stays."""
        counted = "SELECT COUNT(*), COALESCE(SUM(LENGTH(asked) + LENGTH(row)), 0) FROM jobs"
        self._db.execute("BEGIN IMMEDIATE")
        before, before_bytes = self._db.execute(counted).fetchone()
        self._db.execute(_TRIM, (oldest, KEPT, KEPT_BYTES))
        kept, kept_bytes = self._db.execute(counted).fetchone()
        self._db.execute("ROLLBACK" if dry_run else "COMMIT")
        return before - kept, before_bytes - kept_bytes, kept, kept_bytes

    def close(self) -> None:
        self._db.close()


def lists_in(folder: Path) -> list[Path]:
    """The lists in a state directory: the user's own, and those kept of jobs in services of others."""
    return [path for path in (folder / FILE, *sorted(folder.glob(KEPT_FILES))) if path.exists()]


def outputs(folder: Path) -> dict[str, Output]:
    """What the jobs of a state directory write to, by the path of the file. Only reads, and so keeps nobody waiting."""
    return {path: output for one in lists_in(folder) for path, output in _outputs_in(one)}


def _outputs_in(path: Path) -> list[tuple[str, Output]]:
    found = []
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=OPEN_S)) as db:
        for job_id, log_path, finished_at, socket, *processes in db.execute(
            "SELECT job_id, json_extract(asked, '$.log'), finished_at, socket, "
            "launcher, launcher_began, worker, worker_began FROM jobs WHERE json_extract(asked, '$.log') IS NOT NULL"
        ):
            elsewhere = str(socket).partition(":")[0] != os.uname().nodename
            runs = finished_at is None and (elsewhere or _any_alive(processes))
            found.append((str(log_path), Output(str(job_id), runs)))
    return found


@contextlib.contextmanager
def open_registry(folder: Path, socket: Path) -> Iterator[Registry | None]:
    """The one in a state directory; None where nothing has run yet."""
    path = folder / FILE
    if not path.exists():
        yield None
        return
    registry = Registry(path, str(socket))
    try:
        with usable(path):
            yield registry
    finally:
        registry.close()


@contextlib.contextmanager
def usable(path: Path) -> Iterator[None]:
    """What is wrong with a list is one line that names the file."""
    try:
        yield
    except sqlite3.Error as error:
        raise RequestRejected(
            f"{path}: the list of jobs cannot be used ({error}); move the file away or make room"
        ) from None


def _at_least(job_id: str, asked: dict[str, Any], submitted_at: float) -> dict[str, Any]:
    """What every row has; of one that was not described, or by another version, some of it is missing."""
    return {
        "id": job_id,
        "name": asked["name"],
        "user": "",
        "state": "lost",
        "priority": asked["priority"],
        "weight": asked["weight"],
        "command": " ".join(asked["command"]),
        "log": asked["log"],
        "submitted_at": submitted_at,
        "device": "",
        **dict.fromkeys(("iterations", "persistent_bytes", "ephemeral_bytes", "internal_bytes"), 0),
        **dict.fromkeys(("gpu_time_s", "ran_s"), 0.0),
        **dict.fromkeys(("wait_reason", "position", "gpu", "lane", "started_at", "finished_at", "exit_code", "pid")),
    }


def _any_alive(processes: list[int]) -> bool:
    """Of a launcher and when it began, and a worker and when that did."""
    return bool(_if_alive(*processes[:2]) or _if_alive(*processes[2:]))


def _if_alive(pid: int, began: int) -> int:
    """The process, if it is the one that began then."""
    return pid if began and is_there(pid, began) else 0
