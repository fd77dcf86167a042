"""The journal: every event the core was given and every action it gave back, a line each.

Replayed (`replay`), the events of a live run give the same actions. It is written in segments (`segments`), each of
which begins with a header: the settings, and a snapshot of the scheduler from which the segment can be replayed without
those before it. A disk that fills up while jobs run ends the journal, not the jobs.
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import IO, Any

from salus import __version__
from salus.core.actions import Action
from salus.core.events import Event
from salus.core.model import GpuConfig
from salus.core.policies import Policy
from salus.core.scheduler import Scheduler
from salus.core.snapshot import SnapshotFailed
from salus.errors import RequestRejected
from salus.service.codec import NS, pack, to_plain, whole_ns
from salus.service.segments import create, name_of, publish

log = logging.getLogger(__name__)

FORMAT = 2
SEGMENT_BYTES = 8 * 2**20
SEGMENT_S = 86400.0
"""The age at which a segment is full however small it is: what is too old is removed by the segment."""


class Journal:
    def __init__(
        self, folder: Path, config: GpuConfig, policy: Policy, which: str = "", segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """`which` tells the journals of several devices apart."""
        self._folder, self._segment_bytes = folder, segment_bytes
        self._run = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{which}"
        self._number = self._at_ns = 0
        self._bytes = self._header_bytes = 0
        """Of the segment that is being written."""
        self._began_at = 0.0
        self.broken: str | None = None
        self.path = folder / name_of(self._run, 1)
        self._file: IO[bytes] | None = None
        try:
            self._begin({"config": to_plain(config), "policy": str(policy), "state": None})
        except OSError as error:
            raise RequestRejected(
                f"{self.path}: the journal cannot be written ({error.strerror}); make room there"
            ) from None

    def record(self, event: Event, now: float, actions: list[Action]) -> None:
        if self._file is None:
            return
        at_ns = whole_ns(now)
        # A moment that is not whole nanoseconds is written as it is.
        line = [at_ns - self._at_ns if isinstance(at_ns, int) else now, pack(event, now)]
        self._at_ns = round(now * NS)
        line += [pack(action, now) for action in actions]
        try:
            self._bytes += self._file.write(_encoded(line))
        except OSError as error:
            self._give_up(error)

    @property
    def is_full(self) -> bool:
        """With many jobs a header is long, and a segment should be more than that."""
        if self._file is None or self._bytes == self._header_bytes:
            return False
        long_enough = max(self._segment_bytes, 2 * self._header_bytes)
        return self._bytes >= long_enough or time.time() - self._began_at >= SEGMENT_S

    def rotate(self, scheduler: Scheduler) -> None:
        """Finishes the segment and begins the next one. Not from inside a decision."""
        self.flush()
        if self._file is None:
            return
        try:
            state: dict[str, Any] | None = scheduler.snapshot()
        except SnapshotFailed as error:
            log.warning("a segment of the journal can be replayed only after those before it: %s", error)
            state = None
        before = self._file
        try:
            self._begin({"config": to_plain(scheduler.config), "policy": str(scheduler.policy), "state": state})
        except OSError as error:
            self._give_up(error)
        finally:
            before.close()

    def flush(self) -> None:
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self, header: dict[str, Any]) -> None:
        """The header is on the disk before the segment has its name."""
        began_at, clock_s = time.time(), time.monotonic()
        name = name_of(self._run, self._number + 1)
        facts = {"format": FORMAT, "salus": __version__, "began_at": began_at, "clock_s": clock_s}
        text = _encoded({**facts, **header})
        file = create(self._folder, name)
        try:
            file.write(text)
            file.flush()
            self.path = publish(self._folder, name)
        except OSError:
            _abandon(file)
            raise
        self._file = file
        self._number += 1
        self._began_at, self._at_ns = began_at, round(clock_s * NS)
        self._bytes = self._header_bytes = len(text)

    def _give_up(self, error: OSError) -> None:
        self.broken = f"{self.path}: the journal ends here ({error.strerror}); jobs go on without it"
        log.error("%s", self.broken)
        if self._file is not None:
            _abandon(self._file)
        self._file = None


def _abandon(file: IO[bytes]) -> None:
    """Closes it without another attempt to write what is in its buffer."""
    try:
        file.close()
    except OSError as error:
        log.debug("%s", error)
    part = Path(file.name)
    if part.suffix == ".part":
        part.unlink(missing_ok=True)


def _encoded(line: object) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"
