"""The chores of the service: the journal to the disk, and what is on the disk within its limits.

Writing is quick and done between two decisions; compressing and removing are not, and done in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path

from salus.core.scheduler import Scheduler
from salus.registry import Registry
from salus.service.history import History
from salus.service.journal import Journal
from salus.service.storage import Limits, rotate_log, tidy_files
from salus.service.usage import Account

log = logging.getLogger(__name__)

FLUSH_S = 1.0
FORGET_S = 3600.0
TIDY_S = 600.0
"""How often it is looked whether something is too old or too much; and whenever a segment is finished."""


class Housekeeping:
    def __init__(
        self,
        state: Path,
        limits: Limits,
        journals: Mapping[Journal, Scheduler],
        registry: Registry,
        history: History,
        account: Account,
    ) -> None:
        self._state, self._limits, self._journals = state, limits, journals
        self._registry, self._history, self._account = registry, history, account
        self._segment_finished = asyncio.Event()
        self._told: set[str] = set()

    async def run(self) -> None:
        await asyncio.gather(self._write(), self._tidy_files(), self._forget())

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            for journal, scheduler in self._journals.items():
                journal.flush()
                if journal.is_full:
                    journal.rotate(scheduler)
                    self._segment_finished.set()

    async def _tidy_files(self) -> None:
        while True:
            self._segment_finished.clear()
            await asyncio.to_thread(self._tidy_files_once)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._segment_finished.wait(), TIDY_S)

    async def _forget(self) -> None:
        """Milliseconds; and a thread of its own would keep the service waiting for the files."""
        while True:
            oldest = self._limits.oldest(time.time())
            try:
                self._registry.forget(oldest)
                self._history.forget(oldest)
                self._account.forget(oldest)
            except sqlite3.Error as error:
                log.warning("old records could not be removed (%s)", error)
            await asyncio.sleep(FORGET_S)

    def _tidy_files_once(self) -> None:
        # Each segment that is being written may grow to its full size before the next time.
        room_for_bytes = len(self._journals) * self._limits.segment_bytes(len(self._journals))
        try:
            rotate_log(self._state / "service.log")
            for tidied in tidy_files(self._state, self._limits, room_for_bytes=room_for_bytes):
                if tidied.removed:
                    log.info("%s: removed %d files, %d bytes", tidied.kind, tidied.removed, tidied.removed_bytes)
                for note in tidied.notes:
                    self._tell_once(note)
        except (OSError, sqlite3.Error) as error:
            log.warning("what is kept on the disk could not be limited: %s", error)

    def _tell_once(self, note: str) -> None:
        # Its size changes; the job is said first.
        whose = note.partition(" has ")[0]
        if whose not in self._told:
            self._told.add(whose)
            log.warning("%s", note)
