"""How much of a GPU a job keeps busy: seen while it is the only one at work, and kept for its next run.

The driver's counters are of the whole GPU. So only a time counts in which one job alone held a lease and nobody outside
had the GPU open; and not a job's first seconds, which are no measure of the others.

From that, how small a part of the GPU's multiprocessors (SMs) would do for the job under MPS. A smaller part makes its
context smaller by as much. `sms` is the part of the SMs that work, on average over time. At worst that is all of them
for a part `sms` of the time; with a share of them, this part lasts 1/share as long, and the rest is as it was. So the
share is chosen with which even then the job is slower by `SLOWER` at the most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SLOWER = 0.02
SMALLEST_SHARE = 10
STEP = 5
"""Shares are multiples of it, in percent."""
FIRST_LOOKS = 6
"""Of a job alone, that do not count."""
ENOUGH_LOOKS = 4


@dataclass(frozen=True, slots=True)
class Activity:
    """Of a GPU, over a while."""

    busy: float
    """The part of the time in which anything ran."""
    sms: float
    """The part of the multiprocessors that worked, on average."""


class Measured:
    """What was seen of one job."""

    def __init__(self) -> None:
        self._looks = 0
        self._busy = self._sms = 0.0

    def add(self, seen: Activity) -> None:
        self._looks += 1
        if self._looks > FIRST_LOOKS:
            self._busy += seen.busy
            self._sms += seen.sms

    def mean(self) -> Activity | None:
        """None: it was not seen for long enough."""
        counted = self._looks - FIRST_LOOKS
        return Activity(self._busy / counted, self._sms / counted) if counted >= ENOUGH_LOOKS else None


@dataclass(frozen=True, slots=True)
class Turn:
    """Who held which lease, and how far it was."""

    job_id: str
    grants: int
    iterations: int


class Alone:
    """Tells whether one job had the GPU to itself between two looks, and worked."""

    def __init__(self) -> None:
        self._before: Turn | None = None

    def look(self, now: Turn | None) -> bool:
        """`now`: the only holder of a lease; None where there is none, or more than one."""
        before, self._before = self._before, now
        if before is None or now is None:
            return False
        return (before.job_id, before.grants) == (now.job_id, now.grants) and now.iterations > before.iterations


def share_for(sms: float) -> int | None:
    """In percent; None: all of them."""
    least = 100 * sms / (sms + SLOWER)
    share = max(SMALLEST_SHARE, STEP * math.ceil(least / STEP - 1e-9))
    return share if share < 100 else None
