"""Several GPUs: one scheduler each, and a placement above them.

A job that names a GPU goes there. Any other goes to a GPU where it fits at once, else to the one with the shortest
queue, counted in GPU seconds where lengths are known. A job that waits and holds nothing yet is not bound to its GPU:
when another GPU runs out of waiting jobs, it takes over the next one from the longest queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from salus.core import events as ev
from salus.core.actions import AcceptJob, Action, RefuseJob
from salus.core.model import JobId, JobSpec
from salus.core.scheduler import Scheduler
from salus.errors import RequestRejected

GpuIndex = int


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
            self._work_s[chosen] += spec.length_s or 0.0
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
        if isinstance(event, ev.JobLeft):
            self._work_s[gpu] -= self.schedulers[gpu].jobs[event.job_id].spec.length_s or 0.0
        done = self._deliver(gpu, event, now)
        if isinstance(event, ev.JobLeft):
            del self._gpu_of[event.job_id]
            self._pinned.discard(event.job_id)
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
        needs = spec.footprint.total_bytes
        everywhere = range(len(self.schedulers))
        able = [gpu for gpu in everywhere if needs <= self._capacity_bytes[gpu]]
        free = [gpu for gpu in able if needs <= self._free_bytes[gpu] and not self._queue_length[gpu]]
        return min(free or able or everywhere, key=lambda gpu: (self._work_s[gpu], len(self.schedulers[gpu].jobs), gpu))

    def _take_over(self, gpu: GpuIndex, now: float) -> list[Placed]:
        """A GPU that has nobody waiting takes over the next job of the longest queue."""
        if self._queue_length[gpu]:
            return []
        giver = max(range(len(self.schedulers)), key=self._queue_length.__getitem__)
        job = self.schedulers[giver].next_unstarted()
        if job is None or job.job_id in self._pinned or job.footprint.total_bytes > self._capacity_bytes[gpu]:
            return []
        done = self._deliver(giver, ev.JobLeft(job.job_id), now)
        self._gpu_of[job.job_id] = gpu
        for index, sign in ((giver, -1), (gpu, 1)):
            self._work_s[index] += sign * (job.spec.length_s or 0.0)
        arrival = self._deliver(gpu, ev.JobArrived(job.spec), now)
        done += [placed for placed in arrival if not isinstance(placed.action, AcceptJob)]
        if job.ready:
            done += self._deliver(gpu, ev.JobReady(job.job_id), now)
        return done
