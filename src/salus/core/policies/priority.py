"""Strict priorities: only the jobs of the highest level that has a ready one run, and they share fairly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from salus.core.model import Job, JobSpec
from salus.core.policies.base import Moment
from salus.core.policies.fair import Fair

if TYPE_CHECKING:
    from salus.core.order import Key


class Priority(Fair):
    """The most urgent jobs only, fairly among themselves; a larger number is more urgent."""

    name = "priority"

    def memory_order(self, job: Job) -> Key:
        return (-self._level(job.spec), super().memory_order(job))

    def lease_order(self, job: Job) -> Key:
        return (-self._level(job.spec), super().lease_order(job))

    def may_displace(self, waiting: Job, resident: Job, moment: Moment) -> bool:
        if waiting.spec.priority != resident.spec.priority:
            return waiting.spec.priority > resident.spec.priority
        return super().may_displace(waiting, resident, moment)

    def is_urgent(self, waiting: Job, resident: Job) -> bool:
        return waiting.spec.priority > resident.spec.priority

    def is_patient(self, waiting: Job, moment: Moment) -> bool:
        # Jobs of a lower level need not be waited for.
        return False

    def choose(self, firsts: Sequence[Job], moment: Moment) -> Iterable[Job]:
        top = max((self._level(job.spec) for job in firsts), default=0)
        return super().choose([job for job in firsts if self._level(job.spec) == top], moment)

    def _level(self, spec: JobSpec) -> int:
        return spec.priority
