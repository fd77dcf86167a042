"""The jobs that are running now, in SQLite: what a service that is started again needs to know them by.

Everything else they tell it themselves. A service that ends on purpose leaves nothing here.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict, dataclass
from pathlib import Path

from salus.errors import RequestRejected
from salus.protocol.messages import Register

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    job_id INTEGER PRIMARY KEY AUTOINCREMENT,
    token TEXT NOT NULL,
    uid INTEGER NOT NULL,
    asked TEXT NOT NULL,
    submitted_at REAL NOT NULL,
    launcher INTEGER NOT NULL,
    worker INTEGER NOT NULL DEFAULT 0,
    device TEXT NOT NULL DEFAULT ''
);
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


class Registry:
    def __init__(self, path: Path) -> None:
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            # What the kernel has survives a killed service. After a crash of the machine there are no jobs.
            self._db.execute("PRAGMA synchronous=OFF")
            self._db.executescript(_SCHEMA)
            if "device" not in {row[1] for row in self._db.execute("PRAGMA table_info(jobs)")}:
                self._db.execute("ALTER TABLE jobs ADD COLUMN device TEXT NOT NULL DEFAULT ''")
        except sqlite3.Error as error:
            raise RequestRejected(
                f"{path}: the list of jobs cannot be used ({error}); move the file away or make room"
            ) from None

    def add(self, token: str, uid: int, asked: Register, submitted_at: float, launcher: int, device: str) -> str:
        """Its id, which no job before it had."""
        cursor = self._db.execute(
            "INSERT INTO jobs (token, uid, asked, submitted_at, launcher, device) VALUES (?, ?, ?, ?, ?, ?)",
            (token, uid, json.dumps(asdict(asked)), submitted_at, launcher, device),
        )
        return str(cursor.lastrowid)

    def attached(self, job_id: str, worker: int) -> None:
        self._db.execute("UPDATE jobs SET worker = ? WHERE job_id = ?", (worker, int(job_id)))

    def remove(self, job_id: str) -> None:
        self._db.execute("DELETE FROM jobs WHERE job_id = ?", (int(job_id),))

    def all(self) -> list[SavedJob]:
        rows = self._db.execute(
            "SELECT job_id, token, uid, asked, submitted_at, launcher, worker, device FROM jobs ORDER BY job_id"
        )
        return [
            SavedJob(str(job_id), token, uid, Register(**json.loads(asked)), *rest)
            for job_id, token, uid, asked, *rest in rows.fetchall()
        ]

    def close(self, *, forget: bool) -> None:
        if forget:
            self._db.execute("DELETE FROM jobs")
        self._db.close()
