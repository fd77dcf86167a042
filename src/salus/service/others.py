"""What somebody may know of the jobs that they may not see: how many there are, and what they use, as totals.

No id, name, command, process or user of such a job is in any answer. Its memory and its part of the device are, or the
numbers of somebody's own jobs would not add up to the whole.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from salus.core.scheduler import Scheduler
from salus.service.job import LiveJob
from salus.service.usage import bytes_on_gpu

WINDOW_S = 10.0
"""A part of the device's time is that of the last seconds."""


class Shares:
    """How much of a device's time each user had: altogether, and lately."""

    def __init__(self) -> None:
        self._had_s: defaultdict[int, float] = defaultdict(float)
        self._marks: deque[tuple[float, dict[int, float]]] = deque()
        """What each user had, at moments of the last seconds."""

    def add(self, uid: int, gpu_time_s: float) -> None:
        self._had_s[uid] += gpu_time_s

    def mark(self, now: float) -> None:
        self._marks.append((now, dict(self._had_s)))
        while len(self._marks) > 1 and self._marks[1][0] <= now - WINDOW_S:
            self._marks.popleft()

    def had_s(self, may_see: Callable[[int], bool]) -> float:
        """Of all users whose jobs may not be seen, since the service began."""
        return sum(had_s for uid, had_s in self._had_s.items() if not may_see(uid))

    def lately(self, may_see: Callable[[int], bool]) -> float:
        """The part of the time of the last seconds that those users had, of what all had."""
        before = self._marks[0][1] if self._marks else {}
        gained = {uid: had_s - before.get(uid, 0.0) for uid, had_s in self._had_s.items()}
        whole_s = sum(gained.values())
        return sum(part for uid, part in gained.items() if not may_see(uid)) / whole_s if whole_s > 0 else 0.0


def totals(
    jobs: Iterable[LiveJob], scheduler: Scheduler, shares: Shares, may_see: Callable[[int], bool]
) -> dict[str, Any]:
    cores = [scheduler.jobs.get(job.job_id) for job in jobs if not may_see(job.uid)]
    return {
        "jobs": len(cores),
        "running": sum(core is not None and core.holds for core in cores),
        "memory_bytes": sum(bytes_on_gpu(core) for core in cores if core is not None),
        "gpu_time_s": shares.had_s(may_see),
        "share": shares.lately(may_see),
    }
