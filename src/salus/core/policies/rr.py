"""Fewest iterations first, inside each lane; all lanes at work.

Iterations count from when a job joined its lane: it starts level with the job that is furthest behind there, so that a
newcomer shares the lane at once and does not first make up for what the others did before it came.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from salus.core.model import Job, JobId, LaneId
from salus.core.policies.base import Moment, Policy, Rotation
from salus.core.policies.fair import PATIENCE, waited_longer

if TYPE_CHECKING:
    from salus.core.order import Key


class RoundRobin(Policy):
    """Fewest iterations first in every lane."""

    name = "rr"
    options = (PATIENCE,)

    def __init__(self, **given: str) -> None:
        super().__init__(**given)
        self.patience_s = float(self.settings["patience"])
        self._marks: dict[JobId, tuple[LaneId | None, int]] = {}
        self._competing: defaultdict[LaneId | None, set[JobId]] = defaultdict(set)

    @property
    def rotates(self) -> Rotation:
        return Rotation.IN_LANE

    def memory_order(self, job: Job) -> Key:
        # Memory goes round as well: who ran longest ago comes first.
        return job.ran_at

    def may_displace(self, waiting: Job, resident: Job, moment: Moment) -> bool:
        return waited_longer(waiting, resident, moment, self.patience_s)

    def is_patient(self, waiting: Job, moment: Moment) -> bool:
        return moment.now < waiting.since + self.patience_s

    def lease_order(self, job: Job) -> Key:
        return self._marks[job.job_id][1]

    def on_arrived(self, job: Job) -> None:
        self._marks[job.job_id] = (None, 0)

    def on_competing(self, job: Job) -> None:
        lane, mark = self._marks[job.job_id]
        others = self._competing[job.lane]
        floor = min((self._marks[job_id][1] for job_id in others), default=0)
        self._marks[job.job_id] = (job.lane, max(mark, floor) if lane == job.lane else floor)
        others.add(job.job_id)

    def on_resting(self, job: Job) -> None:
        others = self._competing[job.lane]
        others.discard(job.job_id)
        if not others:
            del self._competing[job.lane]

    def on_served(self, job: Job, gpu_time_s: float, iterations: int) -> None:
        lane, mark = self._marks[job.job_id]
        self._marks[job.job_id] = (lane, mark + iterations)

    def on_left(self, job: Job) -> None:
        del self._marks[job.job_id]
