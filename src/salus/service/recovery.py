"""After a restart: the jobs of the service before come back, each tells where it is, and only then is anything decided.

Who they are is in the registry; everything else they say themselves (`Reattach`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from salus.core import events as ev
from salus.core.model import Footprint, Phase
from salus.core.scheduler import Scheduler
from salus.errors import RequestRejected
from salus.protocol import messages as msg
from salus.protocol.page import Word
from salus.registry import SavedJob
from salus.service.connection import Connection
from salus.service.history import command_key
from salus.service.job import LiveJob, is_alive

if TYPE_CHECKING:
    from salus.service.live import Live

log = logging.getLogger(__name__)

RECOVERY_S = 3.0
"""How long jobs from before a restart may take to come back."""
RECOVERY_TICK_S = 0.02
MOST = (1 << 63) - 1
"""That a word of a page is said to hold."""


def note_place(scheduler: Scheduler, job: LiveJob) -> None:
    """On the job's page, whenever it changes: what the job tells a service that is started again (`reattach`)."""
    core = scheduler.jobs.get(job.job_id)
    if core is None or job.page is None:
        return
    if core.lane != job.recorded_lane:
        job.recorded_lane = core.lane
        job.live.registry.entered(job.job_id, core.lane)
    words = job.page.words
    words[Word.LANE] = core.lane or 0
    # One that waits for its first memory has none, but it may have its context.
    has = core.footprint if core.phase is not Phase.WAITING else Footprint(0, 0, core.context_bytes)
    words[Word.RESERVED_PERSISTENT] = has.persistent_bytes
    words[Word.RESERVED_EPHEMERAL] = has.ephemeral_bytes
    words[Word.RESERVED_INTERNAL] = has.internal_bytes


class Recovery:
    def __init__(self, live: Live) -> None:
        self._live = live
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Handle | None = None
        """Set as long as somebody may still come back in time."""
        self._ends_at = 0.0

    def begin(self, jobs: Sequence[SavedJob]) -> None:
        """Jobs of the service before us are given a moment to come back; until then nobody gets anything."""
        live = self._live
        for saved in jobs:
            key = command_key(saved.uid, saved.asked.command, saved.asked.directory)
            job = LiveJob(saved.job_id, saved.token, saved.uid, saved.asked, key, saved.submitted_at, None, live)
            job.returning, job.waited_for, job.had_worker = True, saved.worker or saved.launcher, saved.worker > 0
            job.launched_by, job.recorded_lane, job.paused_by = saved.launcher, saved.lane, saved.paused_by
            live.jobs[job.job_id] = job
        if live.jobs:
            log.info("waits for %d jobs from before to come back", len(live.jobs))
            live.decide(ev.RecoveryBegan())
            self._ends_at = self._loop.time() + RECOVERY_S
            self._waiting = self._loop.call_soon(self._look_who_is_missing)

    def rejoin(self, connection: Connection, asked: msg.Rejoin) -> LiveJob:
        live = self._live
        job = live.job_of(connection, asked.job_id, asked.token)
        if job.launcher is not None:
            raise RequestRejected(f"job {job.job_id} has a launcher already")
        job.launcher = connection
        return job

    def reattach(self, connection: Connection, asked: msg.Reattach) -> LiveJob:
        live = self._live
        job = live.job_of(connection, asked.job_id, asked.token)
        if not (job.returning or job.may_return):
            # It was cut off by this very service. Others may use what it has mapped.
            raise RequestRejected(f"job {job.job_id} lost its connection")
        if asked.holds and asked.lane != job.recorded_lane:
            # Another user's job may be at work in the lane that it names.
            raise RequestRejected(f"job {job.job_id} was not in lane {asked.lane}")
        # In this order: what cannot be opened changes nothing.
        has = {
            Word.LANE: job.recorded_lane or 0,
            Word.RESERVED_PERSISTENT: asked.persistent_bytes,
            Word.RESERVED_EPHEMERAL: asked.ephemeral_bytes,
            Word.RESERVED_INTERNAL: asked.internal_bytes,
            Word.ATTAINED_NS: asked.attained_ns,
        }
        # Whatever it says, it has not been there for longer than since it was registered.
        there_ns = max(0, int((time.time() - job.submitted_at) * 1e9))
        iterations, used_ns = (min(max(0, said), there_ns) for said in (asked.iterations, asked.used_ns))
        live.open(
            connection,
            job,
            asked.arena,
            {word: min(max(0, value), MOST) for word, value in has.items()},
            (iterations, used_ns),
        )
        job.returning = job.may_return = False
        if job.job_id in live.scheduler.jobs:
            # It was believed to have nothing: its launcher came back in time, and it did not.
            live.decide(ev.JobLeft(job.job_id))
        capacity = live.scheduler.config.capacity_bytes
        sizes = (asked.persistent_bytes, asked.ephemeral_bytes, asked.internal_bytes)
        footprint = Footprint(*(min(max(0, size), capacity) for size in sizes))
        spec = live.sizes.spec(job)
        if footprint.persistent_bytes or footprint.ephemeral_bytes:
            spec = replace(spec, footprint=footprint)
        recovering = self._waiting is not None
        if job.link is not None:
            job.link.suspended, job.link.holds = asked.suspended, asked.holds
        if asked.holds:
            live.leases.holders[job.job_id] = job
        live.decide(
            ev.JobReturned(
                spec,
                footprint,
                lane_id=job.recorded_lane if recovering and not asked.on_host else None,
                on_host=asked.on_host,
                mid_iteration=asked.suspended,
                holds=asked.holds,
                ready=asked.waits,
                iterations=job.reported_iterations,
                ran_s=job.reported_ns / 1e9,
                gpu_time_s=min(max(0, asked.attained_ns), job.reported_ns) / 1e9,
                paused=job.paused_by is not None,
            )
        )
        note_place(live.scheduler, job)
        live.leases.share_counts(job)
        job.started_at = job.started_at or time.time()
        job.measured = True
        # With which share of the multiprocessors it runs is not known any more.
        job.activity = None
        log.info("job %s (%s) is back", job.job_id, job.asked.name)
        return job

    def _look_who_is_missing(self) -> None:
        """Ends the recovery when nobody is who still lives, or when it has lasted long enough."""
        live = self._live
        missing = [
            job
            for job in live.jobs.values()
            if job.returning
            # The process that used the device, and the launcher: either may have ended meanwhile without the other.
            and ((job.had_worker and is_alive(job.waited_for)) or (job.launcher is None and is_alive(job.launched_by)))
        ]
        if missing and self._loop.time() < self._ends_at:
            self._waiting = self._loop.call_later(RECOVERY_TICK_S, self._look_who_is_missing)
        else:
            self._end()

    def _end(self) -> None:
        live = self._live
        self._waiting = None
        for job in [job for job in live.jobs.values() if job.returning]:
            if job.launcher is not None:
                job.may_return = job.had_worker
                live.arrive_again(job)
            else:
                log.info("job %s (%s) did not come back", job.job_id, job.asked.name)
                live.let_go(job)
        live.handle(ev.RecoveryFinished())
        if not live.jobs:
            live.on_empty()
