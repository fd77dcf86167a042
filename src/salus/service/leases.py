"""Leases as they are used and handed on: who holds one, what it used of it, and how it goes to the next.

A lease goes from one job to the next in one of two ways: the service is told that it was given up, decides, and grants
it to another; or the core has promised it, and it goes straight from the one to the other (`batons`), of which the
service hears later. Whoever is next is told ahead, so as to be awake when it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING

from salus.core import events as ev
from salus.errors import RequestRejected
from salus.protocol import messages as msg
from salus.protocol.page import JobState, Word
from salus.service.batons import Batons
from salus.service.job import LiveJob
from salus.service.lease_clock import LeaseClock
from salus.service.report import MOST_COUNTED

if TYPE_CHECKING:
    from salus.service.live import Live

FORESEEN_S = 0.05
"""Of a job whose iterations are no longer than this it is known when it will yield."""
AHEAD_S = 0.002
"""So long before a boundary is expected, the next job is told of it."""
AWAKE_S = 0.002
"""How long the service stays awake for a yield that was announced."""


class Leases:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._loop = asyncio.get_running_loop()
        self.holders: dict[str, LiveJob] = {}
        self.batons = Batons()
        self._awake_until = 0.0

    # What the core decided.

    def grant(self, job: LiveJob) -> None:
        if job.page is None:
            return
        if job.started_at is None:
            job.started_at = time.time()
        self.holders[job.job_id] = job
        words = job.page.words
        if not job.runs_already:
            if job.link is not None:
                job.link.holds = False
                job.link.bring_up_to_date()
                job.link.holds = True
            job.cleared = job.clears
        job.lost_lease = False
        job.revoked_at, job.lease_clock = None, LeaseClock(self._loop.time())
        words[Word.REVOKE] = words[Word.CONTENDED] = words[Word.SOON] = 0
        # In this order: one that goes on in its iteration must know which lease it is, when it comes to yield.
        job.grants += 1
        words[Word.GRANTS] = job.grants
        if job.link is not None and job.link.suspended:
            # It waits in an allocation: in an iteration, or before its first, and then it has yet to fetch the lease.
            job.link.resume()
        self._awake_until = 0.0
        _wake(job.grant_event)

    def revoke(self, job: LiveJob) -> None:
        if job.page is not None:
            job.revoked_at = self._loop.time() if job.revoked_at is None else job.revoked_at
            job.page.words[Word.REVOKE] = 1
            self._foresee_boundary(job)

    def promise(self, job: LiveJob, after: LiveJob) -> bool:
        """False: it cannot go straight from the one to the other."""
        if not self.batons.offer(after, job):
            return False
        # It sleeps by the bell from now on.
        _wake(job.grant_event)
        return True

    # What jobs say.

    def ready(self, job: LiveJob) -> None:
        if job.yields_late is not None:
            job.yields_late = True
            return
        self._live.handle(ev.JobReady(job.job_id))

    def yielding(self, job: LiveJob, now: bool) -> None:
        """The job is about to yield. The next one is told, so that the lease can go straight to it.

        `now`: it did not know of a next one, and only waits for the device. So that one wakes up, and we stay awake.
        """
        self.settle()
        if job.job_id not in self.holders or self._live.scheduler.jobs[job.job_id].stalled:
            return
        self._live.handle(ev.JobYielding(job.job_id))
        following = self._live.jobs.get(self._live.scheduler.next_in_lane(job.job_id) or "")
        if now and following is not None and following.page is not None:
            following.page.words[Word.SOON] = 1
            _wake(following.grant_event)
            self._awake_until = self._loop.time() + AWAKE_S
            self._stay_awake()

    def yielded(self, job: LiveJob, wants_more: bool, passed: bool = False) -> None:
        self.settle()
        if passed:
            return
        if job.link is not None and not job.link.catch_up():
            # It may have taken something for itself that we did not hear of. Its lane is its own until it is dead.
            raise RequestRejected(f"the arena of job {job.job_id} cannot be followed any more")
        if job.report is not None and job.report.yielded_lease < job.grants:
            # Nobody had fetched that one, and it went when the job was paged out. It has another by now.
            return
        if self._live.scheduler.jobs[job.job_id].stalled:
            # Another of its threads waits for memory. The lease is over when that has been settled.
            job.yields_late = wants_more
            return
        if not self._live.scheduler.jobs[job.job_id].holds:
            if job.link is not None and job.link.suspended:
                return  # the same, and it has none yet
            if job.lost_lease:
                self._gave_up_late(job, wants_more)
                return
            raise RequestRejected(f"job {job.job_id} gives up a lease that it does not have")
        self.end_offer(job)
        self._gave_up(job, wants_more)

    def yield_late(self, job: LiveJob) -> None:
        """It was given what it waited for, or refused; if it had said meanwhile that it yields, it has now."""
        wants_more, job.yields_late = job.yields_late, None
        if wants_more is not None and job.job_id in self._live.jobs and job.job_id in self.holders:
            self.yielded(job, wants_more)

    def recalled(self, heir: LiveJob, ticket: int) -> None:
        """It does not hold the lease that it was promised, and cannot take it any more."""
        self.settle()
        if self.batons.is_promised(heir, ticket):
            # It waits like any other again.
            self._live.decide(ev.JobIdled(heir.job_id))
            self._live.decide(ev.JobReady(heir.job_id))

    # What is over, and what was used so far.

    def settle(self) -> None:
        """Leases that went straight from one job to the next."""
        for offer, wants_more in self.batons.passed():
            if offer.heir is None:
                self._gave_up(offer.giver, wants_more)
                continue
            offer.heir.runs_already = True
            try:
                self._gave_up(offer.giver, wants_more)
            finally:
                offer.heir.runs_already = False

    def end_offer(self, giver: LiveJob) -> None:
        """Its lease is over, and was not passed on. An heir that went on by itself must not get it."""
        gone = self.batons.over(giver)
        if gone is not None and gone.job_id in self._live.scheduler.jobs:
            self._live.decide(ev.JobIdled(gone.job_id))

    def take_away(self, job: LiveJob) -> None:
        """The lease of a job whose process is stopped, and that has no memory in the lane (`stopped`).

        A ticket that the job was told is still known: it may have been about to pass the lease on.
        """
        self.report(None)
        self.holders.pop(job.job_id, None)
        job.lost_lease = True
        if job.page is not None:
            job.page.words[Word.REVOKE] = 1
        self._live.decide(ev.JobIdled(job.job_id))
        self._note_time(job)

    def went_with(self, job: LiveJob) -> None:
        """It was paged out in mid-iteration, and so its lease is over."""
        self.end_offer(job)
        self.report(None)
        self.holders.pop(job.job_id, None)
        job.yields_late = None
        if job.link is not None:
            job.link.holds = False

    def report(self, besides: LiveJob | None) -> None:
        """What the lease holders used since the last time, off their pages."""
        for job in list(self.holders.values()):
            if job is not besides:
                iterations, used_s = self._used(job)
                if used_s > 0 or iterations:
                    self._live.decide(ev.IterationFinished(job.job_id, used_s, iterations))
                    self._note_time(job)

    # Inside.

    def _gave_up_late(self, job: LiveJob, wants_more: bool) -> None:
        """The lease was taken from the job while its process was stopped.

        Its iterations count. The time for which it was stopped is no time on the device, whatever the page says.
        """
        job.lost_lease = False
        self.end_offer(job)
        iterations, _ = self._used(job)
        self._live.decide(ev.IterationFinished(job.job_id, 0.0, iterations))
        if wants_more:
            self._live.decide(ev.JobReady(job.job_id))

    def _gave_up(self, job: LiveJob, wants_more: bool) -> None:
        if job.lost_lease and not self._live.scheduler.jobs[job.job_id].holds:
            self._gave_up_late(job, wants_more)
            return
        self.report(job)
        iterations, used_s = self._used(job)
        self.holders.pop(job.job_id, None)
        self._live.lease_is_over(job)
        self._live.decide(ev.IterationFinished(job.job_id, used_s, iterations, yielded=wants_more))
        self._note_time(job)
        if not wants_more:
            # Idle ends the lease too. Yielded first, the job might be granted the next one before it is idle.
            self._live.decide(ev.JobIdled(job.job_id))

    def _foresee_boundary(self, job: LiveJob) -> None:
        """Its lease was revoked. Shortly before it gets to a boundary the next one is told, so as to be awake then."""
        iteration_s = self._live.scheduler.jobs[job.job_id].iteration_s
        if job.link is None:
            # On the host device it yields at the end of its iteration and does not say so beforehand. If that is far
            # off, better not to be bound until then.
            if self._live.device.gpu is None and iteration_s <= FORESEEN_S:
                self._loop.call_soon(self._will_yield, job, job.grants)
            return
        if job.report is None:
            return
        state, left_s = job.report.state, iteration_s
        if state is JobState.BETWEEN:
            left_s = 0.0
        elif not iteration_s:
            return  # it says so itself, when it is there
        elif state in (JobState.ITERATING, JobState.RUNNING_ON):
            left_s -= job.report.iterating_since_s or 0.0
        self._loop.call_later(max(0.0, left_s - AHEAD_S), self._will_yield, job, job.grants)

    def _will_yield(self, job: LiveJob, grants: int) -> None:
        # Not if that lease is over: the next one was not revoked.
        if self._live.jobs.get(job.job_id) is job and job.grants == grants:
            self.yielding(job, now=False)

    def _stay_awake(self) -> None:
        """Going to sleep and waking up again takes longer than what is to be done then."""
        if self._loop.time() < self._awake_until:
            self._loop.call_soon(self._stay_awake)

    def _used(self, job: LiveJob) -> tuple[int, float]:
        if job.report is None:
            return 0, 0.0
        iterations, used_ns = job.report.used()
        more = max(0, iterations - job.reported_iterations)
        more_ns = max(0, used_ns - job.reported_ns)
        job.reported_iterations += more
        job.reported_ns += more_ns
        return more, self._charged(job, more_ns / 1e9)

    def _charged(self, job: LiveJob, said_s: float) -> float:
        core = self._live.scheduler.jobs.get(job.job_id)
        if job.lease_clock is None or core is None or not core.holds or core.wanted is not None:
            return said_s  # waiting for memory is no time on the device
        return job.lease_clock.charge(said_s, self._loop.time(), others_wait=self._live.watch.others_wait)

    def _note_time(self, job: LiveJob) -> None:
        """On its page, for a service that is started again: how much of the device's time was its own."""
        core = self._live.scheduler.jobs.get(job.job_id)
        if core is not None and job.page is not None:
            job.page.words[Word.ATTAINED_NS] = min(int(core.attained_s * 1e9), MOST_COUNTED)
            job.page.words[Word.NOTED_NS] = job.reported_ns

    def share_counts(self, job: LiveJob) -> None:
        """The launcher sees them too: it tells how much the job did if no service is there when the job ends."""
        core = self._live.scheduler.jobs.get(job.job_id)
        if job.launcher is not None and job.page is not None and core is not None:
            self._note_time(job)
            iterations = max(0, core.iterations_done - job.reported_iterations)
            ran_ns = max(0, round(core.ran_s * 1e9) - job.reported_ns)
            job.launcher.send(msg.Counting(iterations, ran_ns), (job.page_descriptor,))


def _wake(event: int) -> None:
    # A job can fill its own event up to the brim; then it is awake.
    with contextlib.suppress(BlockingIOError):
        os.eventfd_write(event, 1)
