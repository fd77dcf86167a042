"""Equal service over weight for all jobs of the GPU, in whichever lanes they are.

Inside a lane the job that is furthest behind runs. Across lanes, a job that is ahead of the one furthest behind by
more than a quantum pauses at its boundary even when its lane is its own: so weights 1:2:4 mean 1:2:4.
Service is GPU time, which those who run at the same time in several lanes share; or with `by=memory` the time for which
a job runs multiplied by the bytes it occupies then, which nobody else can have.

How a job that arrives, or comes back after a pause, is caught up with is in `marks`. A job that wanted to run and could
not, because others had the memory, made no pause: what it fell behind by it gets back, up to `OWED_S`.

With `by=user` (and `by=user-memory`) users share first, and then each user's jobs share what the user gets. Both
levels follow the same rules: a user who comes back after a pause starts level with the user furthest behind. A user's
jobs are a group of the order, whose key is the user's mark.

A job that could not be given memory for `patience` seconds takes it from one that is ahead of it and has had
memory for as long: nobody starves behind jobs that never end. Between users that holds for a user who has no job in a
lane; another user gets a share already, and takes memory from their own jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from salus.core.model import BEGINS_S, Job, JobId, JobSpec
from salus.core.order import Group, Key
from salus.core.policies.base import Moment, Option, Policy, Rotation
from salus.core.policies.marks import Marks

PATIENCE = Option("patience", "1800", "seconds a job waits for memory before it takes that of a job ahead of it")


SMALLEST_BYTES = 64 * 2**20
"""By memory, a job counts as at least this large, or one that needs next to nothing would keep all others out."""

OWED_S = 5.0
"""A job that comes back into memory runs before the others for no longer than this, however long it was kept out."""

Owner = int


class Pool:
    """Jobs that share with one another: all of a level or, by user, those of one user."""

    __slots__ = ("arrival", "group", "in_lanes_since", "jobs", "marks")

    def __init__(self, group: Group | None, arrival: int) -> None:
        self.group = group
        self.arrival = arrival
        """Breaks ties between users."""
        self.in_lanes_since = float("-inf")
        """Since then one or the other of its jobs has competed."""
        self.marks: Marks[JobId] = Marks()
        self.jobs: dict[JobId, Job] = {}


class Fair(Policy):
    """Equal service over weight, for jobs or first for users, by GPU time or by memory x time."""

    name = "fair"
    options = (
        Option(
            "by",
            "time",
            "who shares what: jobs share GPU time, or memory x time; or users do, and then each user's jobs",
            choices=("time", "memory", "user", "user-memory"),
        ),
        PATIENCE,
    )
    note_classes = (Pool, Marks)

    def __init__(self, **given: str) -> None:
        super().__init__(**given)
        self._by_memory = self.settings["by"] in ("memory", "user-memory")
        self._by_user = self.settings["by"] in ("user", "user-memory")
        self.patience_s = float(self.settings["patience"])
        self._pools: dict[tuple[int, Owner | None], Pool] = {}
        """By level and, by user, by owner."""
        self._users: dict[int, Marks[Owner]] = {}
        """By level: what each user has had."""
        self._came_at: dict[JobId, float] = {}
        """The floor when each arrived."""
        self._services = 0
        self._arrivals = 0
        self._ran_s: dict[JobId, float] = {}
        """By memory: how much of each job's time is in its mark."""

    @property
    def rotates(self) -> Rotation:
        return Rotation.ACROSS_LANES

    def group(self, job: Job) -> Group | None:
        return self._pool(job).group

    def memory_order(self, job: Job) -> Key:
        # Those that have not run yet get memory as they came, whichever of them is ready first.
        mark, served_last = self._pool(job).marks.order(job.job_id)
        return mark if job.ran_s else self._came_at[job.job_id], served_last

    def lease_order(self, job: Job) -> Key:
        return self._pool(job).marks.order(job.job_id)

    def may_displace(self, waiting: Job, resident: Job, moment: Moment) -> bool:
        ours, theirs = self._pool(waiting), self._pool(resident)
        if ours is theirs:
            ahead = ours.marks[resident.job_id] > ours.marks[waiting.job_id]
            return ahead and waited_longer(waiting, resident, moment, self.patience_s)
        users = self._users[self._level(waiting.spec)]
        if users[resident.spec.owner] <= users[waiting.spec.owner]:
            return False
        # A user with a job in a lane has a share already. A second one would take the lane or memory of those who have
        # no more than that.
        if ours.marks.anyone_competes or any(job.lane is not None and not job.stuck for job in ours.jobs.values()):
            return False
        # By user: one that displaces its user's others all the time must not always be new, nor must the next newcomer.
        patience_s = self.patience_s + (BEGINS_S if has_yet_to_begin(resident, moment) else 0.0)
        return moment.now >= max(waiting.since, theirs.in_lanes_since) + patience_s

    def is_patient(self, waiting: Job, moment: Moment) -> bool:
        return moment.now < waiting.since + self.patience_s

    def choose(self, firsts: Sequence[Job], moment: Moment) -> Iterable[Job]:
        if self._by_user:
            firsts = self._of_users_behind(firsts, moment)
        floors: dict[Group | None, float] = {}
        for job in firsts:
            pool = self._pool(job)
            mark = pool.marks[job.job_id]
            floors[pool.group] = min(mark, floors.get(pool.group, mark))
        return [
            job
            for job in firsts
            if self._pool(job).marks[job.job_id]
            <= floors[self._pool(job).group] + _least_lease_s(job, moment) * self._rate(job)
        ]

    def on_arrived(self, job: Job) -> None:
        self._join(job)
        self._ran_s[job.job_id] = job.ran_s

    def on_ready(self, job: Job) -> None:
        pool = self._pool(job)
        pool.marks.come_back(job.job_id)
        if self._by_user and not any(other.ready for other in pool.jobs.values() if other is not job):
            self._users[self._level(job.spec)].come_back(job.spec.owner)
            self._move_user(job)

    def on_competing(self, job: Job) -> None:
        pool = self._pool(job)
        if not pool.marks.anyone_competes:
            pool.in_lanes_since = job.since
        pool.marks.come_back(job.job_id, OWED_S * self._rate(job))
        pool.marks.compete(job.job_id)
        if self._by_user:
            users = self._users[self._level(job.spec)]
            users.come_back(job.spec.owner, OWED_S * self._user_rate(job))
            users.compete(job.spec.owner)
            self._move_user(job)

    def on_resting(self, job: Job) -> None:
        marks = self._pool(job).marks
        marks.rest(job.job_id)
        if self._by_user and not marks.anyone_competes:
            self._users[self._level(job.spec)].rest(job.spec.owner)

    def on_served(self, job: Job, gpu_time_s: float, iterations: int) -> None:
        before, self._ran_s[job.job_id] = self._ran_s[job.job_id], job.ran_s
        served = job.ran_s - before if self._by_memory else gpu_time_s
        self._services += 1
        self._pool(job).marks.serve(job.job_id, served * self._rate(job), self._services)
        if self._by_user:
            users = self._users[self._level(job.spec)]
            users.serve(job.spec.owner, served * self._user_rate(job), self._services)
            self._move_user(job)

    def on_changed(self, job: Job, before: JobSpec) -> None:
        """On its new level it is as far ahead of the others as it was on the old one: changing gains nothing."""
        old = self._key(before)
        if old == self._key(job.spec):
            return
        ahead = self._pools[old].marks.ahead(job.job_id)
        user_ahead = self._users[old[0]].ahead(before.owner) if self._by_user else 0.0
        self._leave(job, old)
        self._join(job)
        self._pool(job).marks.push(job.job_id, ahead)
        self._came_at[job.job_id] = self._pool(job).marks[job.job_id]
        if self._by_user:
            self._users[self._level(job.spec)].push(job.spec.owner, user_ahead)
            self._move_user(job)

    def on_left(self, job: Job) -> None:
        self._leave(job, self._key(job.spec))
        del self._came_at[job.job_id], self._ran_s[job.job_id]

    def _join(self, job: Job) -> None:
        pool = self._pools.get(self._key(job.spec)) or self._new_pool(job)
        pool.jobs[job.job_id] = job
        pool.marks.arrive(job.job_id)
        self._came_at[job.job_id] = pool.marks[job.job_id]

    def _leave(self, job: Job, key: tuple[int, Owner | None]) -> None:
        pool = self._pools[key]
        pool.marks.forget(job.job_id)
        del pool.jobs[job.job_id]
        if self._by_user and not pool.jobs:
            # The user's mark is kept: another job of the user must not start level with those who were served less.
            del self._pools[key]

    def _level(self, spec: JobSpec) -> int:
        """Jobs share with those of their own level; here all are of one."""
        return 0

    def _key(self, spec: JobSpec) -> tuple[int, Owner | None]:
        return self._level(spec), spec.owner if self._by_user else None

    def _pool(self, job: Job) -> Pool:
        return self._pools[self._key(job.spec)]

    def _new_pool(self, job: Job) -> Pool:
        self._arrivals += 1
        pool = Pool(Group() if self._by_user else None, self._arrivals)
        self._pools[self._key(job.spec)] = pool
        if self._by_user:
            level = self._level(job.spec)
            users = self._users.setdefault(level, Marks())
            users.forget_absent({owner for at, owner in self._pools if at == level and owner is not None})
            users.arrive(job.spec.owner)
            self._move_user(job)
        return pool

    def _move_user(self, job: Job) -> None:
        """All jobs of the user come before or after those of others, by what the user has had."""
        level = self._level(job.spec)
        pool = self._pool(job)
        assert pool.group is not None
        pool.group.key = (-level, *self._users[level].order(job.spec.owner), pool.arrival)

    def _of_users_behind(self, firsts: Sequence[Job], moment: Moment) -> list[Job]:
        def mark(job: Job) -> float:
            return self._users[self._level(job.spec)][job.spec.owner]

        floor = min(map(mark, firsts), default=0.0)
        return [job for job in firsts if mark(job) <= floor + _least_lease_s(job, moment) * self._user_rate(job)]

    def _rate(self, job: Job) -> float:
        """Service over weight that a second counts for."""
        return self._size(job) / job.spec.weight

    def _user_rate(self, job: Job) -> float:
        """The same for the job's user, in whose share the weights of jobs have no part."""
        return self._size(job) / job.spec.owner_weight

    def _size(self, job: Job) -> float:
        return max(SMALLEST_BYTES, job.footprint.total_bytes) if self._by_memory else 1.0


def _least_lease_s(job: Job, moment: Moment) -> float:
    """How far ahead a job may be: by a quantum, or by one iteration where that is longer."""
    return max(moment.quantum_s, job.iteration_s)


def waited_longer(waiting: Job, resident: Job, moment: Moment, patience_s: float) -> bool:
    """The one has waited, and the other has had its memory and has run, for at least this long.

    One that has come back to a lane has had what it needs since then: it must not have to leave before it could run.
    Nor, for a while, must one that has yet to begin, whatever leases it was given meanwhile.
    """
    if has_yet_to_begin(resident, moment):
        return False
    begun = _has_memory_since(resident)
    return moment.now >= max(waiting.since, begun) + patience_s and resident.granted_at >= begun


def has_yet_to_begin(resident: Job, moment: Moment) -> bool:
    return not resident.iterations_done and moment.now < _has_memory_since(resident) + BEGINS_S


def _has_memory_since(resident: Job) -> float:
    return resident.on_gpu_since if resident.lane is None else max(resident.on_gpu_since, resident.since)
