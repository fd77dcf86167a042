"""The journal: every event the core was given and every action it gave back, a line each.

Replayed, the events of a live run give the same actions. The first line has the settings. A disk that fills up while
jobs run ends the journal, not the jobs.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from salus.core.actions import Action
from salus.core.events import Event
from salus.core.model import GpuConfig
from salus.core.policies import Policy
from salus.core.scheduler import Scheduler
from salus.errors import RequestRejected
from salus.service.codec import from_plain, to_plain

log = logging.getLogger(__name__)

FORMAT = 1


class Journal:
    def __init__(self, folder: Path, config: GpuConfig, policy: Policy, which: str = "") -> None:
        """`which` tells the journals of several devices apart."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        self.path = folder / f"{stamp}-{os.getpid()}{which}.jsonl"
        self.broken: str | None = None
        try:
            self._file: TextIO | None = self.path.open("x", buffering=1 << 16)
            self._put({"format": FORMAT, "config": to_plain(config), "policy": str(policy)})
            self.flush(raises=True)
        except OSError as error:
            raise RequestRejected(
                f"{self.path}: the journal cannot be written ({error.strerror}); make room there"
            ) from None

    def record(self, event: Event, now: float, actions: list[Action]) -> None:
        if self._file is not None:
            self._put({"t": now, "event": to_plain(event), "actions": [to_plain(action) for action in actions]})

    def flush(self, *, raises: bool = False) -> None:
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            if raises:
                raise
            self._give_up(error)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _put(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.broken = f"{self.path}: the journal ends here ({error.strerror}); jobs go on without it"
        log.error("%s", self.broken)
        self._file = None


def leases(path: Path) -> list[tuple[str, int, float, float]]:
    """Who held the lease of which lane from when to when, in a whole journal: job, lane, start and end."""
    held: dict[str, tuple[int, float]] = {}
    found: list[tuple[str, int, float, float]] = []
    last = 0.0
    with path.open() as file:
        next(file, None)
        for line in map(json.loads, file):
            event, last = line["event"], line["t"]
            gives_up = event.get("yielded") or event["kind"] in ("JobIdled", "JobLeft")
            if gives_up and event["job_id"] in held:
                lane, since = held.pop(event["job_id"])
                found.append((event["job_id"], lane, since, last))
            for action in line["actions"]:
                if action["kind"] == "GrantLease":
                    held[action["job_id"]] = (action["lane_id"], last)
    return found + [(job_id, lane, since, last) for job_id, (lane, since) in held.items()]


def replay(path: Path, load_policy: Callable[[str], Policy]) -> tuple[int, str | None]:
    """Feeds a journal's events to a new scheduler. How many there were, and the first difference if there is one."""
    try:
        with path.open() as file:
            return _replay(path, file, load_policy)
    except OSError as error:
        raise RequestRejected(f"{path}: cannot be read ({error.strerror}); expected a journal of salus serve") from None


def _replay(path: Path, file: TextIO, load_policy: Callable[[str], Policy]) -> tuple[int, str | None]:
    scheduler: Scheduler | None = None
    number = 0
    for number, text in enumerate(file):
        try:
            line = json.loads(text)
            if scheduler is None:
                scheduler = Scheduler(from_plain(line["config"], load_policy), load_policy(line["policy"]))
                continue
            event, expected = from_plain(line["event"], load_policy), line["actions"]
        except (ValueError, KeyError, TypeError):
            raise RequestRejected(
                f"{path}:{number + 1}: is not a line of a journal; expected one of salus serve"
            ) from None
        found = [to_plain(action) for action in scheduler.handle(event, line["t"])]
        if found != expected:
            return number, f"{path}:{number + 1}: {type(event).__name__} gave {expected} and now gives {found}"
    if scheduler is None:
        raise RequestRejected(f"{path}: is empty; expected a journal of salus serve")
    return number, None
