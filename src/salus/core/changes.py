"""What a person changes about a job while it runs: its weight and priority, and whether it is paused.

A paused job counts as idle (`Job.ready`): it competes for no lease, waits for no memory, and may be displaced like any
idle job. A lease that it holds, or was promised, ends at the next boundary (`leases.settle`).
"""

from __future__ import annotations

from dataclasses import replace

from salus.core import leases, room
from salus.core.model import QUEUED_PHASES, Job
from salus.core.state import State
from salus.errors import RequestRejected


def pause(st: State, job: Job) -> None:
    if job.paused:
        return
    leases.stop_competing(st, job)
    job.paused = True
    job.idle_since = st.now
    if st.room_for is job:
        st.room_for = None
    if job.phase in QUEUED_PHASES:
        room.enqueue(st, job)


def resume(st: State, job: Job) -> None:
    if not job.paused:
        return
    job.paused = False
    if job.asks:
        # The policy treats this like the end of any other pause: nothing is made up for.
        st.policy.on_ready(job)
    if job.phase in QUEUED_PHASES:
        room.enqueue(st, job)
    leases.start_competing(st, job)


def change(st: State, job: Job, weight: float, priority: int) -> None:
    before = job.spec
    try:
        after = replace(before, weight=weight, priority=priority)
    except ValueError as error:
        raise RequestRejected(str(error)) from None
    newcomer_at = leases.newcomer_since(st, job)
    leases.stop_competing(st, job)
    job.spec = after
    st.policy.on_changed(job, before)
    if job.phase in QUEUED_PHASES:
        room.enqueue(st, job)
    leases.start_competing(st, job)
    leases.set_newcomer(st, job, newcomer_at)
