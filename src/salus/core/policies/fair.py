"""Equal service over weight for all jobs of the GPU, in whichever lanes they are.

Inside a lane the job that is furthest behind runs. Across lanes, a job that is ahead of the one furthest behind by
more than a quantum pauses at its boundary even when its lane is its own: so weights 1:2:4 mean 1:2:4.
Service is GPU time, which those who run at the same time in several lanes share; or with `by=memory` the time for which
a job runs multiplied by the bytes it occupies then, which nobody else can have.

Each job has a mark: its service over weight so far. The floor is the smallest mark among the jobs that compete. A job
that arrives, or comes back after a pause, starts at the floor: it shares from then on, and neither owes anything for
the time before nor gets it back. (Start-time fair queueing; Linux's CFS does the same.) One that wanted to run and
could not, because others had the memory, made no pause: what it fell behind by it gets back, up to `OWED_S`.

A job that could not be given memory for `patience` seconds takes it from one that is ahead of it and has had
memory for as long: nobody starves behind jobs that never end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from salus.core.model import BEGINS_S, Job, JobId
from salus.core.policies.base import Moment, Option, Policy, Rotation

if TYPE_CHECKING:
    from salus.core.order import Key

PATIENCE = Option("patience", "1800", "seconds a job waits for memory before it takes that of a job ahead of it")


SMALLEST_BYTES = 64 * 2**20
"""By memory, a job counts as at least this large, or one that needs next to nothing would keep all others out."""

OWED_S = 5.0
"""A job that comes back into memory runs before the others for no longer than this, however long it was kept out."""


class Fair(Policy):
    """Equal service over weight, by GPU time or by memory x time."""

    name = "fair"
    options = (
        Option("by", "time", "what is shared: GPU time, or memory x time", choices=("time", "memory")),
        PATIENCE,
    )

    def __init__(self, **given: str) -> None:
        super().__init__(**given)
        self._by_memory = self.settings["by"] == "memory"
        self.patience_s = float(self.settings["patience"])
        self._marks: dict[JobId, float] = {}
        self._came_at: dict[JobId, float] = {}
        """The floor when each arrived."""
        self._served_last: dict[JobId, int] = {}
        """In the order in which they were; 0: not yet. Of those with equal marks who was served before the others waits
        for them: marks are made equal where several were kept out for longer than is owed to them."""
        self._services = 0
        self._ran_s: dict[JobId, float] = {}
        """By memory: how much of each job's time is in its mark."""
        self._competing: defaultdict[int, set[JobId]] = defaultdict(set)
        self._floors: defaultdict[int, float] = defaultdict(float)

    @property
    def rotates(self) -> Rotation:
        return Rotation.ACROSS_LANES

    def memory_order(self, job: Job) -> Key:
        # Those that have not run yet get memory as they came, whichever of them is ready first.
        return (self._marks if job.ran_s else self._came_at)[job.job_id], self._served_last[job.job_id]

    def lease_order(self, job: Job) -> Key:
        return self._marks[job.job_id], self._served_last[job.job_id]

    def may_displace(self, waiting: Job, resident: Job, moment: Moment) -> bool:
        return waited_longer(waiting, resident, moment, self.patience_s) and (
            self._marks[resident.job_id] > self._marks[waiting.job_id]
        )

    def is_patient(self, waiting: Job, moment: Moment) -> bool:
        return moment.now < waiting.since + self.patience_s

    def choose(self, firsts: Sequence[Job], moment: Moment) -> Iterable[Job]:
        floor = min((self._marks[job.job_id] for job in firsts), default=0.0)
        return [job for job in firsts if self._marks[job.job_id] <= floor + self._allowance(job, moment)]

    def on_arrived(self, job: Job) -> None:
        self._marks[job.job_id] = self._came_at[job.job_id] = self._floor(job)
        self._ran_s[job.job_id] = job.ran_s
        self._served_last[job.job_id] = 0

    def on_ready(self, job: Job) -> None:
        self._marks[job.job_id] = max(self._marks[job.job_id], self._floor(job))

    def on_competing(self, job: Job) -> None:
        owed = OWED_S * self._rate(job)
        self._marks[job.job_id] = max(self._marks[job.job_id], self._floor(job) - owed)
        self._competing[self._level(job)].add(job.job_id)

    def on_resting(self, job: Job) -> None:
        self._floor(job)
        self._competing[self._level(job)].discard(job.job_id)

    def on_served(self, job: Job, gpu_time_s: float, iterations: int) -> None:
        before, self._ran_s[job.job_id] = self._ran_s[job.job_id], job.ran_s
        self._services += 1
        self._served_last[job.job_id] = self._services
        self._marks[job.job_id] += (job.ran_s - before if self._by_memory else gpu_time_s) * self._rate(job)

    def on_left(self, job: Job) -> None:
        for notes in (self._marks, self._came_at, self._ran_s, self._served_last):
            del notes[job.job_id]

    def _level(self, job: Job) -> int:
        """Jobs share with those of their own level; here all are of one."""
        return 0

    def _floor(self, job: Job) -> float:
        """The smallest mark among those that compete in the job's level. It never sinks, also when nobody does."""
        level = self._level(job)
        marks = [self._marks[job_id] for job_id in self._competing[level]]
        if marks:
            self._floors[level] = max(self._floors[level], min(marks))
        return self._floors[level]

    def _rate(self, job: Job) -> float:
        """Service over weight that a second counts for."""
        return (max(SMALLEST_BYTES, job.footprint.total_bytes) if self._by_memory else 1.0) / job.spec.weight

    def _allowance(self, job: Job, moment: Moment) -> float:
        """How far ahead the job may be: by a quantum, or by one iteration where that is longer."""
        return max(moment.quantum_s, job.iteration_s) * self._rate(job)


def waited_longer(waiting: Job, resident: Job, moment: Moment, patience_s: float) -> bool:
    """The one has waited, and the other has had its memory and has run, for at least this long.

    One that has come back to a lane has had what it needs since then: it must not have to leave before it could run.
    Nor, for a while, must one that has yet to begin, whatever leases it was given meanwhile.
    """
    begun = resident.on_gpu_since if resident.lane is None else max(resident.on_gpu_since, resident.since)
    if not resident.iterations_done and moment.now < begun + BEGINS_S:
        return False
    return moment.now >= max(waiting.since, begun) + patience_s and resident.granted_at >= begun
