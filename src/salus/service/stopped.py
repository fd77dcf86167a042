"""Jobs that are stopped, by Ctrl-Z or in a debugger, while others wait: what becomes of their lease.

The kernel says which process is stopped (`/proc/PID/stat`); lease holders are looked at while somebody waits for them.
A holder that is found stopped twice in a row is stuck to the core: those behind it go to other lanes if there is room.
If somebody still waits, it depends on whether the stopped job has memory in the lane.

- Without an arena a lane is only a number. The lease is taken from the stopped job and given to the next. The process
  may go on at any moment, and then ends its iteration beside another job; neither has memory that the other uses. It
  gives up, at its next boundary, a lease that it has no more (`Leases.yielded`), and waits like any other.
- With an arena nobody else may run in the lane before the stopped job is at a boundary, since it may go on at any
  moment; and nobody but its own process could move its memory. Those behind it are told whom they wait for.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from salus import processes
from salus.core import events as ev
from salus.core.model import Job, Stuck
from salus.protocol import messages as msg
from salus.protocol.page import JobState
from salus.service.job import LiveJob

if TYPE_CHECKING:
    from salus.service.live import Live

log = logging.getLogger(__name__)

LOOK_S = 0.25
LOOKS = 2
"""So often in a row a job is found stopped before anything is done about it: a debugger may only look at it."""


class Stopped:
    def __init__(self, live: Live) -> None:
        self._live = live

    def look(self) -> None:
        live = self._live
        waits = any(core.ready and not core.holds for core in live.scheduler.jobs.values())
        for job in list(live.jobs.values()):
            if job.stopped_looks or (waits and job.job_id in live.leases.holders):
                self._look_at(job)

    def _look_at(self, job: LiveJob) -> None:
        core = self._live.scheduler.jobs.get(job.job_id)
        if not is_stopped(job) or core is None:
            if job.stopped_looks:
                job.stopped_looks = 0
                self._goes_on(job)
            return
        job.stopped_looks += 1
        self._live.leases.settle()
        if job.stopped_looks < LOOKS or not core.holds:
            return
        if core.stuck is not Stuck.STOPPED:
            log.info("job %s (%s) is stopped while others wait", job.job_id, job.asked.name)
            self._live.leases.batons.recall(job)
            self._live.handle(ev.JobStuck(job.job_id, stopped=True))
            if job.link is not None:
                self._tell_those_behind(core)
        if job.link is None and core.holds and self._somebody_waits_for(core):
            self._take_lease(job)

    def _take_lease(self, job: LiveJob) -> None:
        heir = self._live.leases.batons.heir_of(job)
        if heir is not None:
            if not is_stopped(heir):
                return  # it was asked whether it has the lease, and answers before the next look
            # It took nothing: the lease was not passed on. When it goes on, it waits like any other.
            heir.stopped_looks, heir.lost_lease = max(1, heir.stopped_looks), True
            self._live.decide(ev.JobIdled(heir.job_id))
        self._live.leases.take_away(job)

    def _goes_on(self, job: LiveJob) -> None:
        core = self._live.scheduler.jobs.get(job.job_id)
        if core is None:
            return
        if core.stuck is Stuck.STOPPED:
            self._live.handle(ev.JobStuck(job.job_id, stuck=False, stopped=True))
            return
        at_the_door = job.report is not None and job.report.state == JobState.WAITING
        if at_the_door and not core.holds and not core.ready:
            # It waits for a lease that it was given, or promised, while it was stopped.
            self._live.handle(ev.JobReady(job.job_id))

    def _somebody_waits_for(self, core: Job) -> bool:
        jobs = self._live.scheduler.jobs.values()
        behind = any(other.competing and not other.holds and other.lane == core.lane for other in jobs)
        return behind or any(other.ready for other in self._live.scheduler.queue)

    def _tell_those_behind(self, core: Job) -> None:
        for other in self._live.scheduler.jobs.values():
            launcher = self._live.jobs[other.job_id].launcher
            why = self._live.scheduler.explain(other.job_id)
            if launcher is not None and other.competing and not other.holds and other.lane == core.lane and why:
                launcher.send(msg.Told(f"job {other.job_id} {why.text}"))


def is_stopped(job: LiveJob) -> bool:
    """The process that uses the device; where none does yet, `salus run` itself, with which Ctrl-Z stops the job."""
    if job.process is not None:
        seen = processes.look_at(job.process.pid)
    else:
        keeper = None if job.launcher is None else processes.look_at(job.launcher.pid)
        seen = None if keeper is None else processes.look_at(keeper.parent)
    return seen is not None and seen.state in processes.STOPPED_STATES
