"""Several GPUs: one scheduler each, and a placement above them.

A job that names a GPU goes there. Any other goes to a GPU where it fits at once, else to the one with the shortest
queue, counted in GPU seconds where lengths are known. A job that waits and holds nothing yet is not bound to its GPU:
when another GPU runs out of waiting jobs, it takes over the next one from the longest queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from salus.core import events as ev
from salus.core.actions import AcceptJob, Action, RefuseJob
from salus.core.model import Job, JobId, JobSpec
from salus.core.scheduler import Scheduler
from salus.errors import RequestRejected

GpuIndex = int

TAKE_OVER_LOOKAHEAD = 16


@dataclass(frozen=True, slots=True)
class Room:
    """What placement looks at, of one GPU."""

    capacity_bytes: int
    free_bytes: int
    queue_length: int
    work_s: float
    """Of the jobs whose length is known."""
    jobs: int


def choose(needs_bytes: int, rooms: Mapping[GpuIndex, Room]) -> GpuIndex:
    """Where a job fits at once, else where it fits at all, the one with the least to do."""
    able = [gpu for gpu, room in rooms.items() if needs_bytes <= room.capacity_bytes]
    free = [gpu for gpu in able if needs_bytes <= rooms[gpu].free_bytes and not rooms[gpu].queue_length]
    return min(free or able or rooms, key=lambda gpu: (rooms[gpu].work_s, rooms[gpu].jobs, gpu))


@dataclass(frozen=True, slots=True)
class Placed:
    """An action, and the GPU whose scheduler ordered it."""

    gpu: GpuIndex
    action: Action


class Cluster:
    """Takes the events of jobs, and hands each to the scheduler that has the job."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        if not schedulers:
            raise ValueError("a cluster needs at least one GPU")
        self.schedulers = list(schedulers)
        self._gpu_of: dict[JobId, GpuIndex] = {}
        self._pinned: set[JobId] = set()
        self._length_s: dict[JobId, float] = {}
        # What placement looks at, kept at hand for each GPU: a new job asks all of them.
        self._free_bytes = [scheduler.free_bytes for scheduler in self.schedulers]
        self._queue_length = [scheduler.queue_length for scheduler in self.schedulers]
        self._work_s = [0.0] * len(self.schedulers)
        self._capacity_bytes = [scheduler.config.capacity_bytes for scheduler in self.schedulers]

    def arrive(self, spec: JobSpec, now: float, gpu: GpuIndex | None = None) -> list[Placed]:
        """Places a new job; `gpu` pins it to one."""
        if spec.job_id in self._gpu_of:
            raise RequestRejected(f"there is a job {spec.job_id} already; give this one another id")
        if gpu is not None and not 0 <= gpu < len(self.schedulers):
            raise RequestRejected(f"there is no GPU {gpu}; there are {len(self.schedulers)}, counted from 0")
        chosen = self._choose(spec) if gpu is None else gpu
        done = self._deliver(chosen, ev.JobArrived(spec), now)
        if not any(isinstance(placed.action, RefuseJob) for placed in done):
            self._gpu_of[spec.job_id] = chosen
            self._length_s[spec.job_id] = spec.length_s or 0.0
            self._work_s[chosen] += self._length_s[spec.job_id]
            if gpu is not None:
                self._pinned.add(spec.job_id)
        return done

    def handle(self, event: ev.Event, now: float, gpu: GpuIndex | None = None) -> list[Placed]:
        """Delivers an event of a job, or one of a GPU (`LaneReleased`, `TimerFired`, `PolicyChanged`) to that `gpu`."""
        job_id = getattr(event, "job_id", None)
        if job_id is not None:
            gpu = self.gpu_of(job_id)
        elif gpu is None:
            raise RequestRejected(f"{type(event).__name__} needs the number of the GPU it happened on")
        done = self._deliver(gpu, event, now)
        if isinstance(event, ev.JobLeft):
            self._forget(event.job_id, gpu)
        for placed in done:
            if isinstance(placed.action, RefuseJob):
                self._forget(placed.action.job_id, gpu)
        if isinstance(event, (ev.JobLeft, ev.LaneReleased)):
            done += self._take_over(gpu, now)
        return done

    def gpu_of(self, job_id: JobId) -> GpuIndex:
        try:
            return self._gpu_of[job_id]
        except KeyError:
            raise RequestRejected(f"there is no job {job_id}") from None

    def _deliver(self, gpu: GpuIndex, event: ev.Event, now: float) -> list[Placed]:
        scheduler = self.schedulers[gpu]
        done = [Placed(gpu, action) for action in scheduler.handle(event, now)]
        self._free_bytes[gpu] = scheduler.free_bytes
        self._queue_length[gpu] = scheduler.queue_length
        return done

    def _choose(self, spec: JobSpec) -> GpuIndex:
        rooms = {
            gpu: Room(
                self._capacity_bytes[gpu], self._free_bytes[gpu], self._queue_length[gpu], self._work_s[gpu],
                len(scheduler.jobs),
            )
            for gpu, scheduler in enumerate(self.schedulers)
        }  # fmt: skip
        return choose(spec.footprint.total_bytes, rooms)

    def _forget(self, job_id: JobId, gpu: GpuIndex) -> None:
        del self._gpu_of[job_id]
        self._work_s[gpu] -= self._length_s.pop(job_id)
        self._pinned.discard(job_id)

    def _take_over(self, gpu: GpuIndex, now: float) -> list[Placed]:
        """A GPU that has nobody waiting, and room, takes over the next jobs of the longest queue."""
        done: list[Placed] = []
        while not self._queue_length[gpu]:
            giver = max(range(len(self.schedulers)), key=self._queue_length.__getitem__)
            candidates = islice(self.schedulers[giver].unstarted(), TAKE_OVER_LOOKAHEAD)
            job = next((job for job in candidates if self._may_take(gpu, job)), None)
            if job is None:
                break
            done += self._move(job, giver, gpu, now)
        return done

    def _may_take(self, gpu: GpuIndex, job: Job) -> bool:
        return job.job_id not in self._pinned and job.footprint.total_bytes <= self._free_bytes[gpu]

    def _move(self, job: Job, giver: GpuIndex, taker: GpuIndex, now: float) -> list[Placed]:
        done = self._deliver(giver, ev.JobLeft(job.job_id), now)
        self._gpu_of[job.job_id] = taker
        self._work_s[giver] -= self._length_s[job.job_id]
        self._work_s[taker] += self._length_s[job.job_id]
        # As it is known by now: it may have been measured while it waited.
        spec = replace(
            job.spec, footprint=job.footprint, footprint_known=job.footprint_known, utilization=job.utilization
        )
        arrival = self._deliver(taker, ev.JobArrived(spec), now)
        done += [placed for placed in arrival if not isinstance(placed.action, AcceptJob)]
        if job.ready:
            done += self._deliver(taker, ev.JobReady(job.job_id), now)
        return done
