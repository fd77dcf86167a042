"""Whether a job can be accepted, and why one waits: the answers a person gets.

A job that could run alone on the GPU is accepted and at worst waits; one that could not is refused with the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from salus.core import contexts, memory
from salus.core.model import QUEUED_PHASES, Footprint, GpuConfig, Job, Phase, Stuck
from salus.core.state import State
from salus.units import format_bytes


class WaitReason(Enum):
    """Why a job does not run now. Stable: programs may test for it."""

    MEMORY = "memory"
    ORDER = "order"
    ROOM_BEING_MADE = "room-being-made"
    UNKNOWN_SIZE = "unknown-size"
    GROWTH = "growth"
    PAGING = "paging"
    TURN = "turn"
    SHARE = "share"
    IDLE = "idle"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class Waiting:
    reason: WaitReason
    text: str
    """One line for a person."""
    position: int | None = None
    """Place in the queue for memory, from 1; None for a job that has its memory."""
    queue_length: int | None = None


def why_refused(footprint: Footprint, config: GpuConfig) -> str | None:
    """None if the job could run alone on this GPU."""
    if footprint.total_bytes <= config.capacity_bytes:
        return None
    parts = (
        ("persistent", footprint.persistent_bytes),
        ("ephemeral", footprint.ephemeral_bytes),
        ("internal", footprint.internal_bytes),
    )
    shown = " + ".join(f"{format_bytes(size)} {kind}" for kind, size in parts if size)
    total, whole = format_bytes(footprint.total_bytes), format_bytes(config.capacity_bytes)
    advice = "ask for less (--persistent, --ephemeral), or serve with more (--capacity)"
    return f"needs {shown} = {total}, the whole device has {whole}; {advice}"


def explain(st: State, job: Job) -> Waiting | None:
    """Why the job does not run; None if it does."""
    if job.paused:
        ends = "; it stops at its next boundary" if job.holds else ""
        return Waiting(WaitReason.PAUSED, f"paused{ends}")
    if job.wanted is not None and (job.stalled or not job.holds):
        more = job.wanted.total_bytes - job.footprint.total_bytes
        return Waiting(WaitReason.GROWTH, f"waits for {format_bytes(more)} more memory")
    if job.phase in QUEUED_PHASES:
        return _explain_queued(st, job)
    if job.phase in (Phase.PAGING_IN, Phase.PAGING_OUT):
        way = "back to the GPU" if job.phase is Phase.PAGING_IN else "to the host"
        return Waiting(WaitReason.PAGING, f"its memory is on the way {way}")
    if job.holds:
        return None
    if not job.ready:
        between = "between iterations: it does not ask to run"
        return Waiting(WaitReason.IDLE, between if job.iterations_done else "it has not begun to iterate")
    assert job.lane is not None
    holder = st.leases[job.lane].holder
    if holder is not None:
        return Waiting(WaitReason.TURN, _waits_behind(job, holder))
    return Waiting(WaitReason.SHARE, f"policy {st.policy} runs others now")


def _waits_behind(job: Job, holder: Job) -> str:
    # Whoever reads this may know nothing of another user's job.
    of_user = holder.spec.owner == job.spec.owner
    who = f"job {holder.job_id}" if of_user else "another user's job"
    ends = f"salus cancel {holder.job_id} ends it" if of_user else "the administrator can end it"
    if holder.stuck is Stuck.STOPPED:
        return f"waits for {who}, which is stopped (Ctrl-Z); {ends}"
    silent = f", and has passed no boundary for long; {ends}" if holder.stuck else ""
    return f"{who} runs in lane {holder.lane}{silent}"


def _explain_queued(st: State, job: Job) -> Waiting:
    if job not in st.waiting:
        return Waiting(WaitReason.IDLE, "its memory went to others while it was idle; it gets it back when it runs")
    place = (st.waiting.position(job), len(st.waiting))
    if memory.must_wait_to_be_measured(st, job):
        text = "another job of unknown size is being measured, and there is no paging"
        return Waiting(WaitReason.UNKNOWN_SIZE, text, *place)
    if contexts.would_crowd(st, job):
        context = format_bytes(job.footprint.internal_bytes)
        text = f"its process takes {context} for itself, which leaves the largest too little; it waits for one to end"
        return Waiting(WaitReason.MEMORY, text, *place)
    lanes = st.lanes
    needed, lane_bytes = job.to_admit_bytes(), job.footprint.ephemeral_bytes
    if lanes.find(needed, lane_bytes, job.spec.owner) is not None:
        return Waiting(WaitReason.ORDER, "it would fit, but jobs before it in the queue come first", *place)
    if lanes.find(needed, lane_bytes, job.spec.owner, spare_bytes=lanes.coming_bytes) is not None or st.vacating:
        return Waiting(WaitReason.ROOM_BEING_MADE, "room for it is being made", *place)
    lane = f" and a lane of {format_bytes(lane_bytes)}" if lane_bytes else ""
    free, whole = format_bytes(max(0, lanes.free_bytes)), format_bytes(lanes.capacity_bytes)
    text = f"needs {format_bytes(needed)}{lane}; {free} of {whole} are free"
    return Waiting(WaitReason.MEMORY, text, *place)
