"""What processes have on the GPU outside any allocator, their contexts: who may make one, and when.

A context stays as long as its process does; it can be neither shared nor paged. That of a job with memory is part of
what it reserved. The process of one that waits for its first memory asks before it makes its context (`ContextWanted`)
and may as soon as that fits into what is free: then it is ready when the job gets its memory. If it does not fit, the
context is made when the job is admitted.

So many contexts could be made that nobody can run any more. So there is always room beside all of them for the largest
of the jobs they belong to, with the memory of everybody else on the host (`Crowd`). Only where nobody runs, or will, is
one let in that breaks this: it can.
"""

from __future__ import annotations

from typing import NamedTuple

from salus.core.actions import AllowContext
from salus.core.model import Job, Phase
from salus.core.state import State


def stays_bytes(job: Job) -> int:
    """What of it is on the GPU whatever becomes of its memory."""
    return job.context_bytes if job.phase is Phase.WAITING else job.footprint.internal_bytes


class Crowd(NamedTuple):
    """Those whose processes have their contexts on the GPU."""

    jobs: int
    stays_bytes: int
    largest_bytes: int
    """What the largest of them needs to run, beyond its context."""

    def joined_by(self, job: Job) -> Crowd:
        stays = self.stays_bytes + job.footprint.internal_bytes
        return Crowd(self.jobs + 1, stays, max(self.largest_bytes, _needs_bytes(job)))

    def fits(self, st: State) -> bool:
        """Each of them could run, with the memory of everybody else on the host."""
        room_bytes = st.config.capacity_bytes - st.lanes.outside_bytes
        return self.jobs <= 1 or self.stays_bytes + self.largest_bytes <= room_bytes


def _there(st: State) -> Crowd:
    there = [job for job in st.jobs.values() if job.phase is not Phase.WAITING or job.context_bytes]
    return Crowd(len(there), sum(map(stays_bytes, there)), max(map(_needs_bytes, there), default=0))


def _needs_bytes(job: Job) -> int:
    """Of one that has asked for nothing yet, it is assumed that it will need as much as its context."""
    needs = job.wanted or job.footprint
    return needs.persistent_bytes + needs.ephemeral_bytes or job.footprint.internal_bytes


def would_crowd(st: State, job: Job) -> bool:
    """With its context on the GPU, one of those that have theirs there could not run any more, or not it itself."""
    if job.phase is not Phase.WAITING or job.context_bytes or not job.footprint.internal_bytes:
        return False
    return not _there(st).joined_by(job).fits(st)


def want(st: State, job: Job) -> None:
    if job.phase is Phase.WAITING and not job.context_bytes:
        st.at_the_door[job.job_id] = job


def give_up(st: State, job: Job) -> None:
    """Its process is gone."""
    st.at_the_door.pop(job.job_id, None)
    if job.context_bytes:
        st.lanes.free_fixed(job.context_bytes)
        job.context_bytes = 0


def settle(st: State) -> None:
    """After memory was given out, and not while room is being made for somebody.

    Without paging, whoever grows could not take back what a context has: then they are made with the memory.
    """
    if st.room_for is not None or st.lanes.coming_bytes or not st.paging_allowed:
        return
    there = _there(st)
    for job in [job for job in st.at_the_door.values() if not job.paused]:
        more = there.joined_by(job)
        if job.footprint.internal_bytes <= st.lanes.free_bytes and more.fits(st):
            there = more
            del st.at_the_door[job.job_id]
            job.context_bytes = job.footprint.internal_bytes
            st.lanes.add_fixed(job.context_bytes)
            st.emit(AllowContext(job.job_id), job)
