"""What commands used when they ran before, in SQLite: a command that was seen is admitted with what it used then."""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from salus.errors import RequestRejected

log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    command_key TEXT NOT NULL,
    name TEXT NOT NULL,
    finished_at REAL NOT NULL,
    exit_code INTEGER,
    iterations INTEGER NOT NULL,
    gpu_time_s REAL NOT NULL,
    persistent_bytes INTEGER NOT NULL,
    ephemeral_bytes INTEGER NOT NULL,
    internal_bytes INTEGER NOT NULL,
    busy REAL,
    sms REAL
);
CREATE INDEX IF NOT EXISTS runs_by_command ON runs (command_key, finished_at);
"""
KEPT_OF_COMMAND = 10
"""Runs: those that went well come before the others, then the latest."""
KEPT = 20_000
"""Runs of all commands: a few megabytes."""
_TRIM = """
DELETE FROM runs WHERE finished_at < ? OR rowid NOT IN
    (SELECT rowid FROM (
        SELECT rowid, ROW_NUMBER() OVER
            (PARTITION BY command_key ORDER BY (exit_code IS 0 AND iterations > 0) DESC, finished_at DESC) AS number,
            ROW_NUMBER() OVER (ORDER BY finished_at DESC) AS of_all
        FROM runs
    ) WHERE number <= ? AND of_all <= ?)
"""
_ROW_BYTES = 200
"""Of a run with its place in the index, about."""


@dataclass(frozen=True)
class PastRun:
    iterations: int
    gpu_time_s: float
    persistent_bytes: int
    ephemeral_bytes: int
    internal_bytes: int
    busy: float | None = None
    """The part of the time in which it kept the GPU busy; None where that was never seen."""
    sms: float | None = None
    """The part of the GPU's multiprocessors that it kept at work."""


def command_key(uid: int, command: list[str], directory: str) -> str:
    """The same command in another folder, or of another user, may be another program.

    And what one user's jobs used must neither be learned nor changed by another user who runs the same command.
    """
    return hashlib.sha256(json.dumps([uid, directory, command]).encode()).hexdigest()


class History:
    def __init__(self, path: Path) -> None:
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
            self._add_columns()
        except sqlite3.Error as error:
            raise RequestRejected(
                f"{path}: the history cannot be used ({error}); move the file away or make room"
            ) from None

    def _add_columns(self) -> None:
        """To a history that was begun without them."""
        there = {row[1] for row in self._db.execute("PRAGMA table_info(runs)")}
        for column in ("busy", "sms"):
            if column not in there:
                self._db.execute(f"ALTER TABLE runs ADD COLUMN {column} REAL")

    def last(self, key: str) -> PastRun | None:
        """The last run of this command that went well."""
        row = self._db.execute(
            "SELECT iterations, gpu_time_s, persistent_bytes, ephemeral_bytes, internal_bytes, busy, sms FROM runs "
            "WHERE command_key = ? AND exit_code = 0 AND iterations > 0 ORDER BY finished_at DESC LIMIT 1",
            (key,),
        ).fetchone()
        return PastRun(*row) if row else None

    def last_internal_bytes(self, at_most: int) -> int | None:
        """Of the last run of anything that had any, and no more than that."""
        row = self._db.execute(
            "SELECT internal_bytes FROM runs WHERE internal_bytes BETWEEN 1 AND ? ORDER BY finished_at DESC LIMIT 1",
            (at_most,),
        ).fetchone()
        return int(row[0]) if row else None

    def add(self, key: str, name: str, exit_code: int | None, run: PastRun) -> None:
        self._write(
            "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                key,
                name,
                time.time(),
                exit_code,
                run.iterations,
                run.gpu_time_s,
                run.persistent_bytes,
                run.ephemeral_bytes,
                run.internal_bytes,
                run.busy,
                run.sms,
            ),
        )

    def forget(self, oldest: float, *, dry_run: bool = False) -> tuple[int, int, int, int]:
        """Runs that are too old, and those that tell no more than later ones of the same command do. How many those
        are, about how large, and the same of what stays."""
        self._db.execute("BEGIN IMMEDIATE")
        gone = self._db.execute(_TRIM, (oldest, KEPT_OF_COMMAND, KEPT)).rowcount
        (kept,) = self._db.execute("SELECT COUNT(*) FROM runs").fetchone()
        self._db.execute("ROLLBACK" if dry_run else "COMMIT")
        return gone, gone * _ROW_BYTES, kept, kept * _ROW_BYTES

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        """A full disk, or a number that no machine holds, is no reason to keep a job from its end."""
        try:
            self._db.execute(statement, values)
        except (sqlite3.Error, OverflowError, UnicodeError) as error:
            log.warning("the history cannot be written (%s)", error)

    def close(self) -> None:
        self._db.close()
