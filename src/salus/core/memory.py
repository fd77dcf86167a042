"""Who is on the GPU: admission in the policy's order, coming and going.

The way of a job through the phases of its memory:

    WAITING --admit--> RESIDENT --park--> PARKED --admit--> RESIDENT
                          |  \\                |
                          |   page out        page out
                          |    v               v
                     leaves   PAGING_OUT --> PAGED_OUT --admit--> PAGING_IN --> RESIDENT

`settle` gives memory out. Growing jobs come first: they are in the middle of an iteration and cannot be switched out.
(Those that have yet to begin wait as long as the policy lets newcomers wait.)
Then waiting jobs, in the policy's order. A job that does not fit may displace others: jobs that have been idle for
long, and those the policy lets it displace, the last in the order first. Displaced jobs leave their lanes (parked: no
copy, and they come back as soon as a lane has room), and if that is not enough are paged out. Nobody is displaced
for a job that would not run at once, and nobody is touched unless it is certain to be enough. While room is being
made for a job, nobody else gets memory. (`growth` has the growing jobs, `room` how room is made.)

Why nobody waits for ever, and why growth cannot deadlock, is told in docs/decisions/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from salus.core import contexts, growth, leases, room
from salus.core.actions import AdmitJob, AllowGrowth, PageIn
from salus.core.events import JobReturned
from salus.core.lanes import LaneTable, Place, Step
from salus.core.model import LANE_PHASES, QUEUED_PHASES, Job, Lease, Phase
from salus.core.order import Entry
from salus.core.policies.base import memory_rank
from salus.core.state import LaneLeases, State

LOOKAHEAD = 16
"""How many jobs of the queue are tried. Those behind them would only fit by overtaking that many."""
RETURNING_LOOKAHEAD = 4
"""How many of the jobs behind those, that hold memory already, are tried as well."""
OVERTAKEN_LIMIT = 64
"""A job that was overtaken this often is not overtaken again by jobs that hold no memory yet."""
STAYS_S = 5.0
"""A job that could not be paged out is not tried again for this long."""
LATE_S = 5.0
"""Room that is being made, and has not become more for this long, keeps nobody out any more."""
DISPLACE_TRIES = 2
"""For how many jobs that do not fit a displacement is planned, at the most, each time."""


def settle(st: State) -> None:
    if st.coming[0] != st.lanes.coming_bytes:
        st.coming = (st.lanes.coming_bytes, st.now)
    st.vacating.clear()
    st.told_before, st.told = st.told, set()
    if st.growing and not growth.grow(st):
        return
    _leave_stuck_lanes(st)
    if len(st.waiting):
        _admit_waiting(st)
    else:
        _spread(st)
    if st.at_the_door:
        contexts.settle(st)


# Admission


def _admit_waiting(st: State) -> None:
    blocked: list[Job] = []
    closed = False
    firsts: list[Entry] | None = None
    nobody_runs = not st.running
    for job in _next_in_line(st):
        if closed and job.phase is Phase.WAITING:
            continue
        if _would_go_again(st, job):
            continue
        # The first half is what `_place_for` would find out too; this loop is the hottest there is.
        place = None if job.blocked_at == st.lanes.freed else _place_for(st, job)
        if place is not None:
            for other in blocked:
                other.overtaken += 1
            _admit(st, job, place)
            firsts = None
            continue
        if st.lanes.coming_bytes and _room_is_coming(st, job):
            if not _comes_late(st):
                return
            # Somebody was stopped on the way out. Nobody is displaced in its place, but those that fit go in.
            blocked.append(job)
            continue
        # With nobody at work there is all the time to look for one who could be.
        if job.ready and (len(blocked) < DISPLACE_TRIES or nobody_runs):
            firsts = firsts or leases.first_of_each_lane(st)
            if _displace_for(st, job, firsts):
                return
        blocked.append(job)
        # Jobs that hold memory already may pass even then: the blocked one may be waiting for just that memory. And
        # one that could not run yet if it had its memory keeps nobody out.
        closed = closed or (job.ready and (not st.policy.overtakes or job.overtaken >= OVERTAKEN_LIMIT))
    if blocked and nobody_runs and not _somebody_will_run(st):
        _break_standstill(st)


def _next_in_line(st: State) -> list[Job]:
    """The head of the queue, and the first of those behind it that hold memory: they should be able to come back."""
    head = st.waiting.head(LOOKAHEAD)
    if len(st.returning) and len(st.waiting) > LOOKAHEAD:
        known = {job.job_id for job in head}
        head += [job for job in st.returning.head(RETURNING_LOOKAHEAD) if job.job_id not in known]
    if len(st.returning) and st.policy.patience_s and room.waits_for_newcomers(st):
        head = _who_can_compute_first(st, head)
    return _keep_room_for_whom_it_was_made(st, head) if st.waiting.in_groups else head


def _keep_room_for_whom_it_was_made(st: State, head: list[Job]) -> list[Job]:
    """Where groups take turns in the queue, a displaced job may be ahead of the one that displaced it, and would take
    the room back at once, again and again. So the waiting job goes ahead of all that it comes before in the policy's
    own order."""
    job = st.room_for
    if job is None or job not in st.waiting:
        return head
    ours = memory_rank(st.policy, job)
    others = [other for other in head if other is not job]
    at = next((place for place, other in enumerate(others) if ours < memory_rank(st.policy, other)), len(others))
    return [*others[:at], job, *others[at:]]


def _who_can_compute_first(st: State, head: list[Job]) -> list[Job]:
    """One more newcomer would have to load first, too. But what is urgent, or is being made room for, stays first.

    Each of those who can compute goes ahead of such newcomers and of nobody else: two that both are let in before the
    other would displace each other for ever.
    """
    order: list[Job] = []
    for job in head:
        at = len(order)
        while at and _can_compute(job) and _steps_back(st, order[at - 1], job):
            at -= 1
        order.insert(at, job)
    return order


def _can_compute(job: Job) -> bool:
    return job.ready and job.iterations_done > 0


def _steps_back(st: State, newcomer: Job, job: Job) -> bool:
    return not (_can_compute(newcomer) or newcomer is st.room_for or st.policy.is_urgent(newcomer, job))


def _somebody_will_run(st: State) -> bool:
    """Somebody in a lane wants to, or may want to before long, or memory is on its way. Asks to be woken in time."""
    if st.lanes.coming_bytes and not _comes_late(st):
        return True
    in_lanes = [job for job in st.on_gpu.values() if job.lane is not None]
    if any(job.ready or job.holds or job.phase is Phase.PAGING_IN for job in in_lanes):
        return True
    # One that has been idle for long may never.
    pause_ends_at = max((room.idle_enough_at(st, job) for job in in_lanes), default=st.now)
    if st.now < pause_ends_at:
        st.wake_at(pause_ends_at)
    return st.now < pause_ends_at


def _break_standstill(st: State) -> None:
    """Those that hold memory keep one another out, and nobody computes: whatever the policy says, one must run."""
    for job in [*st.returning, *st.waiting.head(LOOKAHEAD)]:
        if _would_go_again(st, job) or (st.lanes.lanes and not job.ready) or must_wait_to_be_measured(st, job):
            continue
        if contexts.would_crowd(st, job) and not (job.ready and growth.could_run(st, job, job.footprint)):
            continue
        others = [other for other in st.on_gpu.values() if other is not job and room.can_move(other)]
        place = st.lanes.find(job.to_admit_bytes(), job.footprint.ephemeral_bytes, job.spec.owner)
        if place is not None:
            _admit(st, job, place)
            return
        if room.make_room(st, room.last_first(st, others), _fits(job)):
            return


def _would_go_again(st: State, job: Job) -> bool:
    """On the host, and wants more than it can have before others end: it would come in, not run, and step aside."""
    return job.phase is Phase.PAGED_OUT and job.wanted is not None and not growth.could_run(st, job, job.wanted)


def _place_for(st: State, job: Job) -> Place | None:
    if job.blocked_at == st.lanes.freed or must_wait_to_be_measured(st, job):
        return None
    if contexts.would_crowd(st, job):
        job.blocked_at = st.lanes.freed
        return None
    place = st.lanes.find(job.to_admit_bytes(), job.footprint.ephemeral_bytes, job.spec.owner)
    if place is None:
        job.blocked_at = st.lanes.freed
    return place


def must_wait_to_be_measured(st: State, job: Job) -> bool:
    """Without paging, a job of unknown size could grow into a wall that nobody can move: one such at a time."""
    if st.paging_allowed or job.footprint_known or job.phase is not Phase.WAITING:
        return False
    return any(not other.footprint_known for other in st.on_gpu.values())


def _room_is_coming(st: State, job: Job) -> bool:
    """The job will fit once what is under way has finished."""
    if contexts.would_crowd(st, job):
        return False
    need, coming = job.footprint.ephemeral_bytes, st.lanes.coming_bytes
    return st.lanes.find(job.to_admit_bytes(), need, job.spec.owner, spare_bytes=coming) is not None


def _comes_late(st: State) -> bool:
    """Nothing of what is about to be free has become so for long. Asks to be woken when that may be."""
    late_at = st.coming[1] + LATE_S
    if st.now < late_at:
        st.wake_at(late_at)
    return st.now >= late_at


def _admit(st: State, job: Job, place: Place) -> None:
    room.dequeue(st, job)
    st.lanes.add_fixed(job.to_admit_bytes())
    st.at_the_door.pop(job.job_id, None)
    job.context_bytes = 0
    if st.room_for is job:
        st.room_for = None
    was = job.phase
    _enter_lane(st, job, place)
    if was is Phase.PAGED_OUT:
        st.enter_phase(job, Phase.PAGING_IN)
        st.emit(PageIn(job.job_id), job)
    else:
        st.enter_phase(job, Phase.RESIDENT)
    if job.mid_iteration and job.wanted is None:
        st.emit(AllowGrowth(job.job_id, job.footprint), job)
    if was is not Phase.PARKED:
        job.on_gpu_since = st.now
    st.on_gpu[job.job_id] = job
    leases.start_competing(st, job)


def _enter_lane(st: State, job: Job, place: Place) -> None:
    job.lane = st.lanes.enter(place, job.job_id, job.footprint.ephemeral_bytes, job.spec.owner)
    leases.join(st, st.leases.setdefault(job.lane, LaneLeases()))
    st.emit(AdmitJob(job.job_id, job.lane, job.footprint), job)


def restore(st: State, job: Job, was: JobReturned) -> None:
    """Puts a job where it was before a restart. It fitted there then."""
    if was.on_host:
        job.mid_iteration = was.mid_iteration
        job.host_bytes = job.footprint.persistent_bytes
        st.host_used_bytes += job.host_bytes
        st.lanes.add_fixed(job.footprint.internal_bytes)
        st.enter_phase(job, Phase.PAGED_OUT)
        room.enqueue(st, job)
        return
    if was.lane_id is None and not was.holds:
        held = job.footprint.persistent_bytes > 0
        st.lanes.add_fixed(job.footprint.fixed_bytes)
        if held:
            st.on_gpu[job.job_id] = job
        else:
            # It waits for its first memory, as much as it is expected to need, and may have its context.
            job.context_bytes = job.footprint.internal_bytes
            job.footprint = job.spec.footprint
        st.enter_phase(job, Phase.PARKED if held else Phase.WAITING)
        room.enqueue(st, job)
        return
    st.lanes.add_fixed(job.footprint.fixed_bytes)
    lane = st.leases.get(was.lane_id) if was.lane_id is not None else None
    # One that comes back after its lane was given to somebody else goes on in a lane of its own.
    lane_id = was.lane_id if lane is None or lane.holder is None or not was.holds else None
    job.lane = st.lanes.restore(lane_id, job.job_id, job.footprint.ephemeral_bytes, job.spec.owner)
    leases.join(st, st.leases.setdefault(job.lane, LaneLeases()))
    st.enter_phase(job, Phase.RESIDENT)
    job.on_gpu_since = st.now
    st.on_gpu[job.job_id] = job
    st.emit(AdmitJob(job.job_id, job.lane, job.footprint), job)
    if was.holds:
        leases.hold(st, st.leases[job.lane], job)
    leases.start_competing(st, job)


# Coming and going


def page_out_finished(st: State, job: Job) -> None:
    st.lanes.leaving_bytes -= job.footprint.persistent_bytes
    st.lanes.free_fixed(job.footprint.persistent_bytes)
    del st.on_gpu[job.job_id]
    if job.lane is not None:
        leases.end_lease(st, job)
        room.leave_lane(st, job, announce=False)
        job.mid_iteration = True
    if job.wanted is not None:
        # Nothing of it but internal memory is on the GPU now, so it comes back as large as it wants to be.
        job.footprint = replace(job.wanted, internal_bytes=job.footprint.internal_bytes)
        if job.footprint.covers(job.wanted):
            growth.stop_growing(st, job)
        # It has nothing in a lane any more, so it is in nobody's way.
        job.stalled = False
    st.enter_phase(job, Phase.PAGED_OUT)
    room.enqueue(st, job)


def page_out_failed(st: State, job: Job) -> None:
    """It stays where it was. Others are paged out in its place, or it is tried again later."""
    st.lanes.leaving_bytes -= job.footprint.persistent_bytes
    _free_host(st, job)
    job.stays_until = st.now + STAYS_S
    st.wake_at(job.stays_until)
    if job.lane is not None:
        st.enter_phase(job, Phase.RESIDENT)
    else:
        st.enter_phase(job, Phase.PARKED)
        room.enqueue(st, job)


def page_in_finished(st: State, job: Job) -> None:
    _free_host(st, job)
    st.enter_phase(job, Phase.RESIDENT)
    leases.start_competing(st, job)


def forget(st: State, job: Job) -> None:
    """The job is gone, and so is its memory."""
    leases.end_lease(st, job)
    if job.phase is Phase.PAGING_OUT:
        st.lanes.leaving_bytes -= job.footprint.persistent_bytes
    if job.lane is not None:
        room.leave_lane(st, job, announce=False)
    if job.phase is Phase.PAGED_OUT:
        st.lanes.free_fixed(job.footprint.internal_bytes)
    elif job.phase is not Phase.WAITING:
        st.lanes.free_fixed(job.footprint.fixed_bytes)
    contexts.give_up(st, job)
    _free_host(st, job)
    growth.stop_growing(st, job)
    room.dequeue(st, job)
    if st.room_for is job:
        st.room_for = None
    st.on_gpu.pop(job.job_id, None)
    del st.jobs[job.job_id]


def _free_host(st: State, job: Job) -> None:
    st.host_used_bytes -= job.host_bytes
    job.host_bytes = 0


# Making room for those that wait


def _displace_for(st: State, job: Job, firsts: list[Entry]) -> bool:
    """Begins or goes on to make room for a waiting job; False if nobody may be, or need be, displaced for it."""
    if must_wait_to_be_measured(st, job):
        return False
    same = st.policy.patience_s > 0 or job.no_room_at == (st.lanes.freed, len(st.on_gpu))
    if same and st.now < job.no_room_since + st.config.quantum_s:
        st.wake_at(job.no_room_since + st.config.quantum_s)
        return False
    if contexts.would_crowd(st, job):
        job.no_room_at, job.no_room_since = (st.lanes.freed, len(st.on_gpu)), st.now
        return False
    patient = room.is_patient(st, job)
    if not patient and not leases.would_run(st, job, firsts):
        return False
    victims = room.whom_it_may_displace(st, job, patient)
    if victims and patient and not leases.would_run(st, job, firsts):
        return False
    if victims and room.make_room(st, room.last_first(st, victims), _fits(job)):
        st.room_for = job
        return True
    # Planning is the most expensive thing done here. The same plan fails again until somebody came, went or aged; and
    # who had the patience to wait can wait for another quantum.
    job.no_room_at, job.no_room_since = (st.lanes.freed, len(st.on_gpu)), st.now
    return False


def _fits(job: Job) -> Callable[[LaneTable], bool]:
    def fits(table: LaneTable) -> bool:
        return table.find(job.to_admit_bytes(), job.footprint.ephemeral_bytes, job.spec.owner) is not None

    return fits


def _spread(st: State) -> None:
    """With memory to spare and nobody waiting for it, a job that waits for its turn in a lane gets one of its own."""
    for lane in list(st.leases.values()):
        while len(lane.ready) > 1:
            # In lease order: if the first that is behind another would not run, those after it would not either.
            job = next((job for job in lane.ready if job.lease is Lease.NONE), None)
            if job is None:
                break
            need = job.footprint.ephemeral_bytes
            if need > st.lanes.free_bytes or not leases.would_run(st, job):
                break
            room.leave_lane(st, job, announce=True)
            _enter_lane(st, job, Place(Step.NEW, None, need))
            leases.start_competing(st, job)


def _leave_stuck_lanes(st: State) -> None:
    """Those that wait behind a job that does not come to an end go to another lane, where there is room."""
    for lane_id, lane in list(st.leases.items()):
        if lane.holder is None or not lane.holder.stuck:
            continue
        for job in [job for job in lane.ready if job.lease is Lease.NONE]:
            place = st.lanes.find(0, job.footprint.ephemeral_bytes, job.spec.owner)
            if place is not None and place.lane_id != lane_id:
                room.leave_lane(st, job, announce=True)
                _enter_lane(st, job, place)
                leases.start_competing(st, job)


def check_phases(st: State) -> Iterable[tuple[Job, bool]]:
    """For `Scheduler.validate`: each job, and whether its phase agrees with where it is listed."""
    for job in st.jobs.values():
        queued = job.phase in QUEUED_PHASES
        # A stalled job on its way to the host keeps its lane until what it has there is safe.
        in_lane = job.phase in LANE_PHASES or (job.phase is Phase.PAGING_OUT and job.lease is not Lease.NONE)
        on_gpu = job.phase not in (Phase.WAITING, Phase.PAGED_OUT)
        in_queue = queued and room.wants_in(job)
        agrees = (job in st.waiting) == in_queue and (job.lane is not None) == in_lane
        yield job, agrees and (job.job_id in st.on_gpu) == on_gpu
