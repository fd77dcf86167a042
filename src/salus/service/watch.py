"""An eye on whoever holds a lease: one that sits between two iterations while others wait, and one that ends none.

Both are seen on the jobs' pages. The first is told, and its helper thread gives the lease up; of the second the core is
told, so that nobody counts on it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from salus.core import events as ev
from salus.core.model import Job, Lease, Stuck
from salus.protocol import messages as msg
from salus.protocol.page import JobState, Word
from salus.service.report import Report

if TYPE_CHECKING:
    from salus.service.live import Live

log = logging.getLogger(__name__)

CONTENTION_S = 0.01
"""How often lease holders are looked at, while somebody waits: one that sits between two iterations is told."""
SITS = (JobState.STARTING, JobState.BETWEEN)
SITS_S = 0.002
"""One that is between two iterations is looked at again after this long."""


SEEMS_S, SEEMS_ITERATIONS = 0.1, 5
"""One whose iterations follow one another seems to sit if none has ended for so long, and for so many of them."""
LONG_S = 1.0
"""Whoever wants memory does not need a lease: for that, one that makes a pause of less is left alone."""


class Watch:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._loop = asyncio.get_running_loop()
        self._contention: asyncio.TimerHandle | None = None
        self.others_wait = False
        """At the last look some job was ready and had no lease."""

    def look_soon(self) -> None:
        """Somebody may be waiting for a holder that sits."""
        if self._contention is not None:
            return
        holders, jobs = self._live.leases.holders, self._live.scheduler.jobs
        # One that is to make room is told also where everybody has a lease.
        if len(holders) < len(self._live.jobs) or any(
            job_id in jobs and jobs[job_id].lease is Lease.REVOKED for job_id in holders
        ):
            self._contention = self._loop.call_later(CONTENTION_S, self._tell_contention)

    def _tell_contention(self) -> None:
        """Tells a lease holder that sits between iterations when somebody waits, so that it gives up its lease.

        A revocation alone is told by the page only: one that iterates looks at it at its next boundary, and waking its
        helper thread would only be in the way.
        """
        self._contention = None
        # One that passed its lease on may have been stopped before it could say so.
        self._live.leases.settle()
        scheduler = self._live.scheduler
        jobs = scheduler.jobs
        # Somebody waits for a turn, or for memory that one who sits there could do without.
        self.others_wait = any(core.competing and not core.holds for core in jobs.values())
        contended = self.others_wait or any(core.ready for core in scheduler.queue)
        grows = any(core.wanted is not None and not core.holds for core in jobs.values())
        again_s = CONTENTION_S if contended else LONG_S if grows else None
        for job in self._live.leases.holders.values():
            if job.page is None or job.report is None or job.worker is None:
                continue
            words, report = job.page.words, job.report
            wanted = contended or jobs[job.job_id].lease is Lease.REVOKED or (grows and _has_sat_for_long(report))
            passed, job.passed = job.passed, report.boundaries
            if not wanted:
                words[Word.CONTENDED] = 0
                continue
            again_s = min(again_s or CONTENTION_S, CONTENTION_S)
            if report.is_contended or not (report.state in SITS or _seems_to_sit(report, jobs[job.job_id])):
                continue
            if job.passed == passed:
                # It clears that itself when it is on its way again.
                words[Word.CONTENDED] = 1
                job.worker.send(msg.Look())
            elif job.link is not None or jobs[job.job_id].lease is not Lease.REVOKED:
                # (Without an arena, one whose lease is revoked has given it up at its boundary already.)
                again_s = SITS_S
        if again_s is not None:
            # Who has a lease changes with every switch, so look again as long as there is somebody who has none.
            self._contention = self._loop.call_later(again_s, self._tell_contention)

    def look_for_stuck(self, after_s: float) -> None:
        """Lease holders that pass no boundary (an endless loop), or keep a lease that was revoked. What is stopped is
        seen sooner (`stopped`)."""
        now = self._loop.time()
        for job in list(self._live.leases.holders.values()):
            core = self._live.scheduler.jobs[job.job_id]
            if job.report is None:
                continue
            boundaries = job.report.boundaries
            if boundaries != job.boundaries:
                job.boundaries, job.boundary_at = boundaries, now
            # A job that counts boundaries and does not yield at them keeps the others waiting all the same.
            keeps_lease = job.revoked_at is not None and now > job.revoked_at + after_s
            stuck = keeps_lease or now > max(job.boundary_at, core.granted_at) + after_s
            if core.stuck is not Stuck.STOPPED and stuck != (core.stuck is not None):
                if stuck:
                    log.warning("job %s (%s) has not yielded for %g s", job.job_id, job.asked.name, after_s)
                    self._live.leases.batons.recall(job)
                self._live.handle(ev.JobStuck(job.job_id, stuck))


def _seems_to_sit(report: Report, core: Job) -> bool:
    longest_s = max(SEEMS_S, SEEMS_ITERATIONS * core.iteration_s)
    return report.state is JobState.RUNNING_ON and (report.iterating_since_s or 0.0) > longest_s


def _has_sat_for_long(report: Report) -> bool:
    """With an arena, a job notes on its page when its last iteration ended."""
    sits = report.state in (*SITS, JobState.RUNNING_ON)
    return sits and (report.iterating_since_s or 0.0) > LONG_S
