"""How room is made: whom to displace, and how they leave.

Lanes are taken first, which costs no copy, and memory only where that is not enough. Those at a boundary go at once;
the others have their lease revoked and go when they get there. Who may be displaced for whom is the policy's to say,
but for those that have been idle for long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from salus.core import leases
from salus.core.actions import LeaveLane, PageOut
from salus.core.lanes import LaneTable
from salus.core.model import BEGINS_S, Job, Lease, Phase
from salus.core.policies.base import Rotation, memory_rank
from salus.core.state import State

COMING_S = 1.0
"""For a job that is on its way in, one that runs is kept on the GPU for this long at the most. More than the patience
of a policy would make newcomers leave again as soon as they are in."""
CATCHES_UP_S = 1.0
"""How often a job is looked at again that has had patience for long enough and is ahead of those with memory."""


# The queue for memory


def enqueue(st: State, job: Job) -> None:
    job.blocked_at = -1
    job.overtaken = 0
    if not wants_in(job):
        dequeue(st, job)
        return
    key, group = st.policy.memory_order(job), st.policy.group(job)
    st.waiting.put(job, key, group)
    if job.phase is not Phase.WAITING:
        st.returning.put(job, key, group)


def dequeue(st: State, job: Job) -> None:
    st.waiting.discard(job)
    st.returning.discard(job)


def wants_in(job: Job) -> bool:
    """A job that was displaced queues again when it wants to run; an idle one would only be displaced again."""
    return job.ready or (job.phase is Phase.WAITING and not job.paused)


# Leaving


def park(st: State, job: Job) -> None:
    """Takes a job at its boundary out of its lane."""
    leave_lane(st, job, announce=True)
    st.enter_phase(job, Phase.PARKED)
    enqueue(st, job)


def page_out(st: State, job: Job) -> None:
    """Starts moving a job to the host. A stalled lease holder takes what it has in the lane along."""
    with_lane = job.stalled
    job.host_bytes = to_page_bytes(job)
    st.host_used_bytes += job.host_bytes
    st.lanes.leaving_bytes += job.footprint.persistent_bytes
    dequeue(st, job)
    if with_lane:
        leases.stop_competing(st, job)
    elif job.lane is not None:
        leave_lane(st, job, announce=True)
    st.enter_phase(job, Phase.PAGING_OUT)
    st.emit(PageOut(job.job_id, with_lane), job)


def leave_lane(st: State, job: Job, *, announce: bool) -> None:
    assert job.lane is not None
    lane_id = job.lane
    leases.stop_competing(st, job)
    if announce:
        st.emit(LeaveLane(job.job_id, lane_id), job)
    job.lane = None
    st.lanes.leave(lane_id, job.job_id)
    st.leases[lane_id].had_s.pop(job.job_id, None)
    if lane_id not in st.lanes.lanes:
        del st.leases[lane_id]


def to_page_bytes(job: Job) -> int:
    in_lane = job.footprint.ephemeral_bytes if job.stalled else 0
    return job.footprint.persistent_bytes + in_lane


# Who leaves


def make_room(st: State, victims: list[Job], fits: Callable[[LaneTable], bool]) -> bool:
    """Takes lanes, or else memory, from the first of `victims` until it `fits`; does nothing if it never would."""
    # One that does not come to a boundary gives nothing up.
    victims = [victim for victim in victims if not victim.stuck]
    with_lanes = [victim for victim in victims if victim.lane is not None and not victim.stalled]
    parked = _enough(st, with_lanes, fits, _without_lane)
    if parked:
        vacate(st, parked, park)
        return True
    able: list[Job] = []
    to_host_bytes = 0
    for victim in victims:
        if st.host_has_room(to_host_bytes + to_page_bytes(victim)) and not must_stay(st, victim):
            to_host_bytes += to_page_bytes(victim)
            able.append(victim)
    paged = _enough(st, able, fits, _without_memory)
    if paged:
        vacate(st, paged, page_out)
        return True
    return False


def _enough(
    st: State, victims: list[Job], fits: Callable[[LaneTable], bool], take: Callable[[LaneTable, Job], None]
) -> list[Job]:
    """The first of them with which it fits, but those that it fits without; none if it fits with no number of them."""
    trial = st.lanes.trial()
    for count, victim in enumerate(victims, start=1):
        take(trial, victim)
        if fits(trial):
            enough = victims[:count]
            break
    else:
        return []
    # A small one that comes first is not displaced for what only a large one after it can give.
    for spared in enough[:-1]:
        trial = st.lanes.trial()
        for victim in enough:
            if victim is not spared:
                take(trial, victim)
        if fits(trial):
            enough = [victim for victim in enough if victim is not spared]
    return enough


def _without_lane(table: LaneTable, job: Job) -> None:
    if job.lane is not None:
        table.leave(job.lane, job.job_id)


def _without_memory(table: LaneTable, job: Job) -> None:
    table.free_fixed(job.footprint.persistent_bytes)
    _without_lane(table, job)


def vacate(st: State, jobs: list[Job], leave: Callable[[State, Job], None]) -> None:
    """Moves those at a boundary now; the others have their lease revoked and are moved when they get there."""
    for job in jobs:
        if job.lease is not Lease.NONE and not job.stalled:
            st.vacating.add(job.job_id)
            st.told.add(job.job_id)
        else:
            leave(st, job)


# Who may be displaced, and in which order


def last_first(st: State, jobs: Iterable[Job]) -> list[Job]:
    """Whom to displace first: idle jobs, then those that were told already, then what the policy would run last."""
    order = sorted(jobs, key=lambda job: memory_rank(st.policy, job), reverse=True)
    return sorted(order, key=lambda job: (job.ready, job.stuck is not None, job.job_id not in st.told_before))


def whom_it_may_displace(st: State, job: Job, patient: bool) -> list[Job]:
    """Jobs that have been idle for long, and those the policy allows. Asks to be woken when time may change that."""
    policy, moment = st.policy, st.moment
    ours = memory_rank(policy, job)
    keeps_busy = None if patient else _keeps_busy(st)
    victims = []
    for other in [other for other in st.on_gpu.values() if not (patient and other.ready)]:
        if other is job or other.stalled or not can_move(other):
            continue
        idle = not other.ready and other.lease is Lease.NONE
        if idle and st.now >= idle_enough_at(st, other):
            victims.append(other)
            continue
        if idle:
            st.wake_at(idle_enough_at(st, other))
        if patient:
            continue
        # One that comes before us in the order would take back at once what it gave up.
        behind = ours < memory_rank(policy, other)
        if behind and policy.may_displace(job, other, moment):
            if other is not keeps_busy or not _is_kept(st, other, job):
                victims.append(other)
            continue
        patience_over_at = max(job.since, other.on_gpu_since) + policy.patience_s
        if not other.iterations_done:
            patience_over_at = max(patience_over_at, max(other.on_gpu_since, other.since) + BEGINS_S)
        if st.now < patience_over_at:
            st.wake_at(patience_over_at)
    return victims


def _keeps_busy(st: State) -> Job | None:
    """While one job gets ready to run, another must have something to compute: the first of those that can run."""
    begun = [job for job in st.on_gpu.values() if job.competing and not job.stuck and job.iterations_done]
    return min(begun, key=lambda job: memory_rank(st.policy, job), default=None)


def waits_for_newcomers(st: State) -> bool:
    """Nobody computes, or is about to, while one that has its memory has yet to begin."""
    loads = any(not job.iterations_done and st.now < job.on_gpu_since + BEGINS_S for job in st.on_gpu.values())
    comes = any(job.iterations_done and job.phase is Phase.PAGING_IN for job in st.on_gpu.values())
    return loads and not comes and _keeps_busy(st) is None


def _is_kept(st: State, resident: Job, waiting: Job) -> bool:
    """Whether that one stays on the GPU for now although this one may displace it. Asks to be woken when it is over."""
    # One that was stopped on its way in never arrives.
    comes = [job.on_gpu_since + COMING_S for job in st.on_gpu.values() if job.phase is Phase.PAGING_IN]
    until = max(comes, default=st.now)
    if not st.policy.is_urgent(waiting, resident):
        # (Also while it has the lease that it waited for memory with: it gives that back when it finds out.)
        loads = [job.on_gpu_since + BEGINS_S for job in st.on_gpu.values() if not job.iterations_done]
        loaded_at = max(loads, default=st.now)
        if st.now < loaded_at:
            if resident.kept_since < resident.on_gpu_since:
                resident.kept_since = st.now
            # Others may come all the time: it is not kept for ever.
            until = max(until, min(loaded_at, resident.kept_since + BEGINS_S))
    if st.now >= until:
        return False
    st.wake_at(until)
    return True


def idle_enough_at(st: State, job: Job) -> float:
    return max(job.idle_since, job.since) + st.config.idle_patience_s


def is_patient(st: State, job: Job) -> bool:
    """Whether it waits yet before it displaces anyone who wants to run. Asks to be woken when that may be over."""
    if st.policy.is_patient(job, st.moment):
        st.wake_at(job.since + st.policy.patience_s)
        return True
    if st.policy.rotates is not Rotation.NEVER:
        # Whom it may displace changes as others run, and nothing else may happen that would make us ask again.
        again_s = CATCHES_UP_S if st.policy.patience_s else leases.SHORTEST_TICK_S
        st.wake_at(st.now + max(st.config.quantum_s, again_s))
    return False


def can_move(job: Job) -> bool:
    return job.phase is Phase.RESIDENT or job.phase is Phase.PARKED


def must_stay(st: State, job: Job) -> bool:
    """It could not be paged out a moment ago. Asks to be woken when it may be tried again."""
    if st.now < job.stays_until:
        st.wake_at(job.stays_until)
        return True
    return False
