"""What processes have on the GPU outside any allocator, their contexts: who may make one, and when.

A context stays as long as its process does; it can be neither shared nor paged. That of a job with memory is part of
what it reserved. The process of one that waits for its first memory asks before it makes its context (`ContextWanted`)
and may as soon as that fits into what is free: then it is ready when the job gets its memory. If it does not fit, the
context is made when the job is admitted.

So many contexts could be made that nobody can run any more. So there is always room beside all of them for the largest
of the jobs they belong to, with the memory of everybody else on the host (`would_crowd`).
"""

from __future__ import annotations

from salus.core.actions import AllowContext
from salus.core.model import Job, Phase
from salus.core.state import State


def stays_bytes(job: Job) -> int:
    """What of it is on the GPU whatever becomes of its memory."""
    return job.context_bytes if job.phase is Phase.WAITING else job.footprint.internal_bytes


def would_crowd(st: State, job: Job) -> bool:
    """With its context on the GPU, one of those that have theirs there could not run any more, or it could not itself.

    Of one that has asked for nothing yet, it is assumed that it will need as much as its context.
    """
    if job.phase is not Phase.WAITING or job.context_bytes or not job.footprint.internal_bytes:
        return False
    there = [other for other in st.jobs.values() if other.phase is not Phase.WAITING or other.context_bytes]
    stays = job.footprint.internal_bytes + sum(map(stays_bytes, there))
    largest = max(map(_needs_bytes, (job, *there)))
    return bool(there) and stays + largest > st.config.capacity_bytes - st.lanes.outside_bytes


def _needs_bytes(job: Job) -> int:
    """Beyond its context, to run."""
    needs = job.wanted or job.footprint
    return needs.persistent_bytes + needs.ephemeral_bytes or job.footprint.internal_bytes


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
    """After memory was given out, and not while room is being made for somebody."""
    if st.room_for is not None or st.lanes.coming_bytes:
        return
    for job in list(st.at_the_door.values()):
        if job.footprint.internal_bytes <= st.lanes.free_bytes and not would_crowd(st, job):
            del st.at_the_door[job.job_id]
            job.context_bytes = job.footprint.internal_bytes
            st.lanes.add_fixed(job.context_bytes)
            st.emit(AllowContext(job.job_id), job)
