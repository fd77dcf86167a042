"""How much of a device each job uses: what is expected of it, what it asks for, what is seen, what is remembered.

A job of known size is admitted with it. Another starts with little and grows as it asks for more. What the driver takes
for a process, and how busy it keeps the GPU, only NVML tells.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from salus.core import events as ev
from salus.core.model import Footprint, Job, JobSpec, Phase
from salus.protocol import messages as msg
from salus.protocol.page import Word
from salus.service.history import History, PastRun
from salus.service.job import LiveJob
from salus.service.utilization import Activity, Alone, Turn, share_for

if TYPE_CHECKING:
    from salus.service.live import Live

log = logging.getLogger(__name__)

NOTABLE_BYTES = 32 << 20
"""A change of less is not worth a decision."""
CONTEXT_BYTES = 768 << 20
"""What the driver takes for a process on a GPU, more or less, where none has ever been seen."""
LARGEST_CONTEXT_BYTES = 2 << 30
"""Of a job whose memory cannot be sorted, all of it is internal; that is no measure of others."""
MEASURE_S = 0.1
SETTLED_AFTER = 3
"""Boundaries after which a job has shown how much memory it needs."""
MEASURE_LIMIT_S = 20.0
"""One that reaches no boundary keeps others from being measured for this long."""


class Sizes:
    def __init__(self, live: Live, history: History) -> None:
        self._live, self._history = live, history
        self._loop = asyncio.get_running_loop()
        self.outside_bytes = 0
        """Used by others, of what we would share."""
        self._context_bytes = 0
        """What a process takes of the GPU before it has been measured: what the last one that was took."""
        if live.device.gpu is not None:
            self._context_bytes = history.last_internal_bytes(LARGEST_CONTEXT_BYTES) or CONTEXT_BYTES
        self._growing: str | None = None
        """The job whose size is being measured."""
        self._alone = Alone()

    # What is expected.

    def expected(self, asked: msg.Register, key: str) -> Footprint:
        """What was declared, or else what the last run of the same command used."""
        past = self._history.last(key)
        known = asked.persistent_bytes is not None or asked.ephemeral_bytes is not None
        if past is not None and not known:
            return Footprint(past.persistent_bytes, past.ephemeral_bytes, past.internal_bytes)
        declared = Footprint(asked.persistent_bytes or 0, asked.ephemeral_bytes or 0)
        # Nobody declares what the driver takes for a process, and it must not be given to others first.
        left = self._live.scheduler.config.capacity_bytes - declared.total_bytes
        internal = self._context_bytes if past is None else past.internal_bytes
        return replace(declared, internal_bytes=max(0, min(internal, left)))

    def spec(self, job: LiveJob) -> JobSpec:
        """What was declared; what was not, from the last run of the same command."""
        asked = job.asked
        past = self._history.last(job.key)
        declared = asked.persistent_bytes is not None or asked.ephemeral_bytes is not None
        job.measured = declared or past is not None
        footprint = self.expected(asked, job.key)
        iterations, length_s = asked.iterations, asked.duration_s
        if past is not None and length_s is None:
            share = iterations / past.iterations if iterations is not None else 1.0
            length_s, iterations = past.gpu_time_s * share, iterations or past.iterations
        return JobSpec(
            job_id=job.job_id,
            footprint=footprint,
            # One that declared nothing holds nothing yet; when it begins to, it is measured (`_may_grow`).
            footprint_known=True,
            owner=job.uid,
            owner_weight=self._live.share_of(job.uid),
            priority=asked.priority,
            weight=asked.weight,
            length_s=length_s,
            iterations=iterations,
            # Side by side under MPS, jobs share the multiprocessors; without, time.
            utilization=None if past is None else past.busy if self._live.mps is None else past.sms,
        )

    def sm_share(self, job: LiveJob) -> int | None:
        """Under MPS, in percent: what was asked for, or what is enough by what was seen of its last run; None: all."""
        if job.asked.sm_share is not None or self._live.mps is None:
            return job.asked.sm_share
        past = self._history.last(job.key)
        return None if past is None or past.sms is None else share_for(past.sms)

    def remember(self, job: LiveJob, core: Job, exit_code: int | None) -> None:
        seen = None if job.activity is None else job.activity.mean()
        if seen is None or job.sm_share is not None:
            # With a share it is no measure of what it would do with all; what was known is still true.
            past = self._history.last(job.key)
            seen = None if past is None or past.busy is None or past.sms is None else Activity(past.busy, past.sms)
        run = PastRun(
            core.iterations_done,
            core.attained_s,
            job.final["persistent_bytes"],
            job.final["ephemeral_bytes"],
            job.final["internal_bytes"],
            None if seen is None else seen.busy,
            None if seen is None else seen.sms,
        )
        self._history.add(job.key, job.asked.name, exit_code, run)

    @property
    def has_contexts(self) -> bool:
        """Whether a process takes something of the device before it has asked for anything."""
        return self._context_bytes > 0

    # What it asks for.

    def wanted(self, job: LiveJob) -> None:
        """The job waits in an allocation. It gets a little more than it asks for, so as not to ask every time."""
        self._live.leases.settle()
        core = self._live.scheduler.jobs.get(job.job_id)
        if job.link is None or job.link.wanted is None or core is None:
            return
        if core.phase is not Phase.RESIDENT:
            # It is asked again once it is admitted. Until then it wants the device, and may have room made for it; also
            # where more was seen of it than it may have, or it lost its lane while it waited.
            if not core.ready:
                self._live.handle(ev.JobReady(job.job_id))
            return
        if core.wanted is not None and (core.stalled or not core.holds):
            # It waits already. (One that runs, and that more was seen of than it may have, does not: it begins to now.)
            return
        if not self._may_grow(job):
            return
        private_bytes, lane_bytes = job.link.wanted
        exact = core.footprint.enclosing(Footprint(private_bytes, lane_bytes))
        if core.footprint.covers(exact):
            self._live.admit(job)
            return
        larger = core.footprint.enclosing(
            Footprint(
                _with_headroom(private_bytes, core.footprint.persistent_bytes),
                _with_headroom(lane_bytes, core.footprint.ephemeral_bytes),
            )
        )
        if core.wanted is not None:
            larger = larger.enclosing(core.wanted)
        refusal = self._live.may_not_grow(job.uid, exact.total_bytes - core.footprint.total_bytes)
        if refusal is not None:
            self._refuse(job, refusal)
            return
        extra = larger.total_bytes - core.footprint.total_bytes
        fits = extra <= self._live.scheduler.free_bytes and self._live.may_not_grow(job.uid, extra) is None
        footprint = larger if fits else exact
        if not core.holds:
            self._live.handle(ev.FootprintChanged(job.job_id, footprint))
        else:
            self._live.handle(ev.MemoryWanted(job.job_id, footprint))

    def _refuse(self, job: LiveJob, why: str) -> None:
        """The job gets its framework's own out-of-memory error, and its user is told whose limit that is."""
        log.info("job %s (%s) may not grow: %s", job.job_id, job.asked.name, why)
        if job.launcher is not None:
            job.launcher.send(msg.Told(f"job {job.job_id} is out of memory: {why}"))
        if job.link is not None:
            job.link.refuse()

    def went_out(self, job: LiveJob) -> None:
        """Its memory is on the host: it will come back with what it needed lately, or is known to, and no more.

        It may have been given more than it asked for, and has let go of what was empty.
        """
        core = self._live.scheduler.jobs[job.job_id]
        if job.report is None or job.link is None or job.link.suspended or core.wanted is not None:
            return
        needed = max(job.report.bytes_in(Word.NEEDED_BYTES), job.report.bytes_in(Word.PRIVATE_BYTES))
        persistent = max(needed, core.spec.footprint.persistent_bytes)
        if persistent + NOTABLE_BYTES <= core.footprint.persistent_bytes:
            self._live.handle(ev.FootprintChanged(job.job_id, replace(core.footprint, persistent_bytes=persistent)))

    def _may_grow(self, job: LiveJob) -> bool:
        """Where not everybody could be paged out, jobs of unknown size are measured one at a time.

        Two that grow into each other could both be stuck.
        """
        if job.measured or (self._live.scheduler.config.host_bytes != 0 and self._live.pager.host_takes_all()):
            return True
        if self._growing is None or self._growing not in self._live.jobs:
            self._growing = job.job_id
            job.growing_since = self._loop.time()
            self._loop.call_later(MEASURE_S, self._measure)
        return self._growing == job.job_id

    def _measure(self) -> None:
        """After a few iterations a job has shown what it needs, or after some time without any: the next one's turn."""
        job = self._live.jobs.get(self._growing or "")
        if job is not None and job.report is not None:
            late = self._loop.time() > job.growing_since + MEASURE_LIMIT_S
            if job.report.boundaries < SETTLED_AFTER and not late:
                self._loop.call_later(MEASURE_S, self._measure)
                return
            job.measured = True
        self._growing = None
        for other in list(self._live.jobs.values()):
            self.wanted(other)

    # What is seen.

    def gpu_seen(self, used_by: dict[int, int], used_bytes: int) -> None:
        """What NVML shows: each process's bytes, and all that has come into use since the service started.

        A job's internal memory is what its process has beyond what its arena knows of. What nobody of ours has is
        outside memory; on a GPU that is larger than what we share, it may not matter.
        """
        ours = 0
        for job in list(self._live.jobs.values()):
            core = self._live.scheduler.jobs.get(job.job_id)
            if core is None:
                continue
            used = used_by.get(job.worker.pid, 0) if job.worker is not None else 0
            ours += used
            if job.report is None or not used:
                continue
            # Without an arena all of it is: nothing is known of it, and nothing of it can be shared.
            private = job.report.bytes_in(Word.PRIVATE_BYTES) - job.report.bytes_in(Word.OUT_BYTES)
            internal = min(used, max(0, used - private - job.report.bytes_in(Word.MADE_BYTES)))
            # The two do not show the same moment, and while a job is switched or paged gigabytes lie in between.
            steady = job.has_again(internal, NOTABLE_BYTES)
            # Of one that is back and waits for a lease, part of what is out is the lane's.
            suspended = job.link is not None and job.link.suspended
            settled = core.phase is Phase.RESIDENT and core.wanted is None and steady and not suspended
            if settled and job.link is not None:
                self._context_bytes = internal
            if settled and abs(internal - core.footprint.internal_bytes) >= NOTABLE_BYTES:
                self._live.handle(ev.FootprintChanged(job.job_id, replace(core.footprint, internal_bytes=internal)))
        others = max(0, used_bytes - ours)
        outside = max(0, self._live.scheduler.config.capacity_bytes - (self._live.device.room_bytes - others))
        if abs(outside - self.outside_bytes) >= NOTABLE_BYTES or (outside == 0 != self.outside_bytes):
            self.outside_bytes = outside
            self._live.handle(ev.OutsideMemoryChanged(outside))

    def activity_seen(self, seen: Activity, used_by: dict[int, int]) -> None:
        """Since the last look. It is a job's if that was alone on the GPU all the time."""
        ours = {job.worker.pid for job in self._live.jobs.values() if job.worker is not None}
        now = None
        holders = list(self._live.leases.holders.values())
        if len(holders) == 1 and holders[0].report is not None and used_by.keys() <= ours:
            now = Turn(holders[0].job_id, holders[0].grants, holders[0].report.used()[0])
        if self._alone.look(now) and holders[0].activity is not None:
            holders[0].activity.add(seen)


def _with_headroom(wanted_bytes: int, had_bytes: int) -> int:
    """An eighth more, at least 32 MiB and at most 1 GiB, where more is wanted than there was."""
    if wanted_bytes <= had_bytes:
        return had_bytes
    return wanted_bytes + min(max(wanted_bytes >> 3, 32 << 20), 1 << 30)
