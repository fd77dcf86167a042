"""What a user may ask for: the caps of the settings, held in one place for every way to ask.

A new job and a change of one that is there (`Caps.check`), and a job that grows (`Caps.memory_left`), come here. Users
and groups are looked up each time, so somebody who joins a group has its caps without a restart of the service.
"""

from __future__ import annotations

import grp
import pwd
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from salus.config.file import Keys, as_text
from salus.config.schema import Limits
from salus.errors import RequestRejected
from salus.service.access import groups_of
from salus.units import format_bytes


@dataclass(frozen=True)
class Cap:
    value: Any
    rule: str
    """Which setting says so, and where: for the message."""


class Caps:
    def __init__(self, limits: Limits | None = None, where: Callable[[Keys], str] = as_text) -> None:
        """`where`: the file and line of a setting."""
        self._limits, self._where = limits or Limits(), where

    def of(self, uid: int, cap: str) -> Cap | None:
        """None: no limit."""
        found = self._limits.rule(cap, user_name(uid), map(_group_name, groups_of(uid)))
        return None if found is None else Cap(found[0], f"{as_text(found[1])} in {self._where(found[1])}")

    def check(
        self,
        uid: int,
        *,
        weight: float | None = None,
        priority: int | None = None,
        jobs: int | None = None,
        memory_bytes: int | None = None,
        more_bytes: int = 0,
    ) -> None:
        """Refuses what is over a cap. `jobs` and `memory_bytes`: what the user would have then, with everything else of
        theirs; `more_bytes` of that are what is asked for."""
        cap = self.of(uid, "weight") if weight is not None else None
        if cap is not None and weight is not None and weight > cap.value:
            raise RequestRejected(_over(uid, f"weight {weight:g}", f"{cap.value:g}", cap))
        cap = self.of(uid, "priority") if priority is not None else None
        if cap is not None and priority is not None and priority > cap.value:
            raise RequestRejected(_over(uid, f"priority {priority}", str(cap.value), cap))
        cap = self.of(uid, "jobs") if jobs is not None else None
        if cap is not None and jobs is not None and jobs > cap.value:
            raise RequestRejected(
                f"user {user_name(uid)} has {jobs - 1} {'job' if jobs == 2 else 'jobs'}, running and waiting, and may "
                f"have {cap.value} at once ({cap.rule}); try again when one has ended"
            )
        cap = self.of(uid, "memory") if memory_bytes is not None else None
        if cap is not None and memory_bytes is not None and memory_bytes > cap.value:
            raise RequestRejected(_over_memory(uid, memory_bytes, more_bytes, cap))

    def memory_refusal(self, uid: int, memory_bytes: int, more_bytes: int) -> str | None:
        """Why a job may not grow until the user has so much; None: it may."""
        cap = self.of(uid, "memory")
        return None if cap is None or memory_bytes <= cap.value else _over_memory(uid, memory_bytes, more_bytes, cap)

    def share(self, uid: int) -> float:
        """What the user gets beside others, where users share."""
        cap = self.of(uid, "share")
        return 1.0 if cap is None else float(cap.value)


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _over(uid: int, asked: str, allowed: str, cap: Cap) -> str:
    return f"{asked} is over the cap of {allowed} for user {user_name(uid)} ({cap.rule}); ask for {allowed} or less"


def _over_memory(uid: int, memory_bytes: int, more_bytes: int, cap: Cap) -> str:
    has, more, allowed = format_bytes(memory_bytes - more_bytes), format_bytes(more_bytes), format_bytes(cap.value)
    return (
        f"{more} more is over the memory cap of {allowed} for all jobs of user {user_name(uid)}, which have {has} "
        f"({cap.rule}); ask for less, or try again when one has ended"
    )


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
