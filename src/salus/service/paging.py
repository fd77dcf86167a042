"""Paging, as the service sees it: orders to a job's arena, and what it answers.

A job that does not answer in time, or cannot go, is left alone: the core hears `PageOutFailed` and looks for another.
One that went too late is brought back.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from salus.core import events as ev
from salus.core.model import Phase
from salus.protocol import messages as msg
from salus.protocol.page import Word
from salus.protocol.slots import Kind
from salus.service.job import LiveJob
from salus.service.recovery import note_place

if TYPE_CHECKING:
    from salus.service.live import Live

log = logging.getLogger(__name__)

PAGE_OUT_LIMIT_S = 5.0
SLOWEST_PAGING_BYTES_S = 1 << 30
"""A job that takes longer than this to be paged out is given up on."""
PAGE_AGAIN_S = 0.1
PREPARE_S = 0.1
SLOWEST_PINNING_BYTES_S = 1 << 30
NOTABLE_BYTES = 32 << 20
"""Host memory is not made ready for less."""


class Pager:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._loop = asyncio.get_running_loop()
        self._preparing: asyncio.TimerHandle | None = None
        self._pins: tuple[LiveJob, float] | None = None
        """Who was told last to make host memory ready, and until when that may take."""

    def page_out(self, job: LiveJob, with_lane: bool) -> ev.Event | None:
        """The answer, where it is known already."""
        if job.link is None:
            return ev.PageOutFinished(job.job_id)
        if job.worker is None:
            # It lost its connection and lives on, with everything it has.
            return ev.PageOutFailed(job.job_id)
        job.page_orders += 1
        job.link.page_out(with_lane)
        job.worker.send(msg.Look())
        persistent = self._live.scheduler.jobs[job.job_id].footprint.persistent_bytes
        limit_s = PAGE_OUT_LIMIT_S + persistent / SLOWEST_PAGING_BYTES_S
        self._loop.call_later(limit_s, self._page_out_is_late, job, job.page_orders)
        return None

    def page_in(self, job: LiveJob) -> bool:
        if job.link is None or job.worker is None:
            return False
        job.page_orders += 1
        job.link.page_in(self.host_takes_all())
        job.worker.send(msg.Look())
        return True

    def host_takes_all(self) -> bool:
        """Whether every job may keep its host memory for the next time it is paged out."""
        limit = self._live.scheduler.config.host_bytes
        needed = sum(job.footprint.persistent_bytes for job in self._live.scheduler.jobs.values())
        return limit is None or needed <= limit

    def prepare_soon(self) -> None:
        """Somebody waits for memory. Making host memory ready takes ten times as long as filling it."""
        if self._preparing is None and self._live.scheduler.config.host_bytes:
            self._preparing = self._loop.call_later(PREPARE_S, self._prepare)

    def _prepare(self) -> None:
        """Whoever took memory since the last time makes some ready, again and again while somebody waits.

        One at a time, and nobody while one is being paged out: the machine pins memory no faster for two of them.
        """
        self._preparing = None
        if self._live.scheduler.queue_length:
            self.prepare_soon()
        if not self.host_takes_all() or self._somebody_pins():
            return
        for job in self._live.jobs.values():
            if job.link is None or job.worker is None or job.report is None:
                continue
            more_bytes = job.report.bytes_in(Word.PRIVATE_BYTES) - job.prepared_bytes
            if more_bytes >= NOTABLE_BYTES:
                job.prepared_bytes += more_bytes
                self._pins = (job, self._loop.time() + more_bytes / SLOWEST_PINNING_BYTES_S)
                job.link.prepare()
                job.worker.send(msg.Look())
                return

    def _somebody_pins(self) -> bool:
        if any(core.phase is Phase.PAGING_OUT for core in self._live.scheduler.jobs.values()):
            return True
        if self._pins is None:
            return False
        job, until = self._pins
        report = job.report
        if report is None or job.job_id not in self._live.jobs or self._loop.time() > until:
            return False
        return report.bytes_in(Word.PRIVATE_BYTES) - report.bytes_in(Word.HOME_BYTES) >= NOTABLE_BYTES

    def paged(self, job: LiveJob, kind: Kind, done: bool) -> None:
        core = self._live.scheduler.jobs.get(job.job_id)
        if core is None or job.link is None:
            return
        if kind is Kind.PAGE_IN:
            if not done:
                # Its memory is not free yet, whoever has it. It stays within reach on the host meanwhile.
                self._loop.call_later(PAGE_AGAIN_S, self._page_in_again, job, job.page_orders)
            elif job.link.suspended and core.holds:
                # It went in mid-iteration, too late, and has been given its lease back.
                self._live.admit(job)
                job.link.bring_up_to_date()
                job.link.resume()
            elif core.phase is Phase.PAGING_IN:
                self._live.handle(ev.PageInFinished(job.job_id))
                # It may have asked for more meanwhile.
                self._live.sizes.wanted(job)
        elif core.phase is Phase.PAGING_OUT:
            if not done:
                log.warning("job %s could not be paged out", job.job_id)
            elif job.link.suspended:
                self._live.leases.went_with(job)
            else:
                self._live.sizes.went_out(job)
            self._live.handle(ev.PageOutFinished(job.job_id) if done else ev.PageOutFailed(job.job_id))
            # It comes back as large as it wants to be, or as it needs to.
            note_place(self._live.scheduler, job)
            # One that stepped aside to grow, and never asked for a lease, still waits for its memory.
            self._live.sizes.wanted(job)
        elif done and core.phase in (Phase.RESIDENT, Phase.PARKED):
            # Too late: it was given up on. (One that is out by now has been told so twice, and answers twice.)
            self.page_in(job)

    def _page_in_again(self, job: LiveJob, order: int) -> None:
        if order == job.page_orders and job.job_id in self._live.jobs:
            self.page_in(job)

    def _page_out_is_late(self, job: LiveJob, order: int) -> None:
        """Its process is stopped, or never comes to rest. Nobody waits for it any longer."""
        core = self._live.scheduler.jobs.get(job.job_id)
        if order == job.page_orders and core is not None and core.phase is Phase.PAGING_OUT:
            log.warning("job %s does not answer; it could not be paged out", job.job_id)
            self._live.handle(ev.PageOutFailed(job.job_id))
