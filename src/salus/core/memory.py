"""Who is on the GPU: admission in the policy's order, making room, growth, paging.

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
made for a job, nobody else gets memory.

Why nobody waits for ever, and why growth cannot deadlock, is told in docs/decisions/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from salus.core import leases
from salus.core.actions import AdmitJob, AllowGrowth, LeaveLane, PageIn, PageOut, RefuseGrowth
from salus.core.events import JobReturned
from salus.core.lanes import LaneTable, Place, Step
from salus.core.model import LANE_PHASES, QUEUED_PHASES, Footprint, Job, Lease, Phase
from salus.core.order import Entry
from salus.core.policies.base import Rotation
from salus.core.state import LaneLeases, State
from salus.units import format_bytes

LOOKAHEAD = 16
"""How many jobs of the queue are tried. Those behind them would only fit by overtaking that many."""
RETURNING_LOOKAHEAD = 4
"""How many of the jobs behind those, that hold memory already, are tried as well."""
OVERTAKEN_LIMIT = 64
"""A job that was overtaken this often is not overtaken again by jobs that hold no memory yet."""
STAYS_S = 5.0
"""A job that could not be paged out is not tried again for this long."""
COMING_S = 1.0
"""For a job that is on its way in, one that runs is kept on the GPU for this long at the most. More than the patience
of a policy would make newcomers leave again as soon as they are in."""
GROWS_FIRST_S = 1.0
"""So long after it got it, the job that others were displaced for comes first when it wants yet more."""
DISPLACE_TRIES = 2
"""For how many jobs that do not fit a displacement is planned, at the most, each time."""


def settle(st: State) -> None:
    st.vacating.clear()
    st.told_before, st.told = st.told, set()
    if st.growing and not _grow(st):
        return
    _leave_stuck_lanes(st)
    if len(st.waiting):
        _admit_waiting(st)
    else:
        _spread(st)


# Admission


def enqueue(st: State, job: Job) -> None:
    job.blocked_at = -1
    job.overtaken = 0
    if not _wants_in(job):
        dequeue(st, job)
        return
    key = st.policy.memory_order(job)
    st.waiting.put(job, key)
    if job.phase is not Phase.WAITING:
        st.returning.put(job, key)


def dequeue(st: State, job: Job) -> None:
    st.waiting.discard(job)
    st.returning.discard(job)


def _admit_waiting(st: State) -> None:
    blocked: list[Job] = []
    closed = False
    firsts: list[Entry] | None = None
    nobody_runs = not st.running
    for job in _next_in_line(st):
        if closed and job.phase is Phase.WAITING:
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
            return
        # With nobody at work there is all the time to look for one who could be.
        if job.ready and (len(blocked) < DISPLACE_TRIES or nobody_runs):
            firsts = firsts or leases.first_of_each_lane(st)
            if _displace_for(st, job, firsts):
                return
        blocked.append(job)
        # Jobs that hold memory already may pass even then: the blocked one may be waiting for just that memory. And
        # one that could not run yet if it had its memory keeps nobody out.
        closed = closed or (job.ready and (not st.policy.overtakes or job.overtaken >= OVERTAKEN_LIMIT))
    if blocked and not st.lanes.lanes:
        _break_standstill(st)


def _wants_in(job: Job) -> bool:
    """A job that was displaced queues again when it wants to run; an idle one would only be displaced again."""
    return job.ready or job.phase is Phase.WAITING


def _next_in_line(st: State) -> list[Job]:
    """The head of the queue, and the first of those behind it that hold memory: they should be able to come back."""
    head = st.waiting.head(LOOKAHEAD)
    if len(st.returning) and len(st.waiting) > LOOKAHEAD:
        known = {job.job_id for job in head}
        head += [job for job in st.returning.head(RETURNING_LOOKAHEAD) if job.job_id not in known]
    return head


def _break_standstill(st: State) -> None:
    """Nobody is in a lane, and those that hold memory keep one another out: whatever the policy says, one must run."""
    for job in [*st.returning, *st.waiting.head(LOOKAHEAD)]:
        others = [other for other in st.on_gpu.values() if other is not job and _can_move(other)]
        place = _place_for(st, job)
        if place is not None:
            _admit(st, job, place)
            return
        if _make_room(st, _last_first(st, others), _fits(job)):
            return


def _place_for(st: State, job: Job) -> Place | None:
    if job.blocked_at == st.lanes.freed or must_wait_to_be_measured(st, job):
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
    need, coming = job.footprint.ephemeral_bytes, st.lanes.coming_bytes
    return st.lanes.find(job.to_admit_bytes(), need, job.spec.owner, spare_bytes=coming) is not None


def _admit(st: State, job: Job, place: Place) -> None:
    dequeue(st, job)
    st.lanes.add_fixed(job.to_admit_bytes())
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
    st.leases.setdefault(job.lane, LaneLeases())
    st.emit(AdmitJob(job.job_id, job.lane, job.footprint), job)


def restore(st: State, job: Job, was: JobReturned) -> None:
    """Puts a job where it was before a restart. It fitted there then."""
    if was.on_host:
        job.mid_iteration = was.mid_iteration
        job.host_bytes = job.footprint.persistent_bytes
        st.host_used_bytes += job.host_bytes
        st.lanes.add_fixed(job.footprint.internal_bytes)
        st.enter_phase(job, Phase.PAGED_OUT)
        enqueue(st, job)
        return
    if was.lane_id is None and not was.holds:
        held = job.footprint.fixed_bytes > 0
        if held:
            st.lanes.add_fixed(job.footprint.fixed_bytes)
            st.on_gpu[job.job_id] = job
        st.enter_phase(job, Phase.PARKED if held else Phase.WAITING)
        enqueue(st, job)
        return
    st.lanes.add_fixed(job.footprint.fixed_bytes)
    lane = st.leases.get(was.lane_id) if was.lane_id is not None else None
    # One that comes back after its lane was given to somebody else goes on in a lane of its own.
    lane_id = was.lane_id if lane is None or lane.holder is None or not was.holds else None
    job.lane = st.lanes.restore(lane_id, job.job_id, job.footprint.ephemeral_bytes, job.spec.owner)
    st.leases.setdefault(job.lane, LaneLeases())
    st.enter_phase(job, Phase.RESIDENT)
    job.on_gpu_since = st.now
    st.on_gpu[job.job_id] = job
    st.emit(AdmitJob(job.job_id, job.lane, job.footprint), job)
    if was.holds:
        leases.hold(st, st.leases[job.lane], job)
    leases.start_competing(st, job)


# Leaving: lanes, the GPU, the system


def park(st: State, job: Job) -> None:
    """Takes a job at its boundary out of its lane."""
    _leave_lane(st, job, announce=True)
    st.enter_phase(job, Phase.PARKED)
    enqueue(st, job)


def page_out(st: State, job: Job) -> None:
    """Starts moving a job to the host. A stalled lease holder takes what it has in the lane along."""
    with_lane = job.stalled
    job.host_bytes = _to_page_bytes(job)
    st.host_used_bytes += job.host_bytes
    st.lanes.leaving_bytes += job.footprint.persistent_bytes
    dequeue(st, job)
    if with_lane:
        leases.stop_competing(st, job)
    elif job.lane is not None:
        _leave_lane(st, job, announce=True)
    st.enter_phase(job, Phase.PAGING_OUT)
    st.emit(PageOut(job.job_id, with_lane), job)


def page_out_finished(st: State, job: Job) -> None:
    st.lanes.leaving_bytes -= job.footprint.persistent_bytes
    st.lanes.free_fixed(job.footprint.persistent_bytes)
    del st.on_gpu[job.job_id]
    if job.lane is not None:
        leases.end_lease(st, job)
        _leave_lane(st, job, announce=False)
        job.mid_iteration = True
    if job.wanted is not None:
        # Nothing of it but internal memory is on the GPU now, so it comes back as large as it wants to be.
        job.footprint = replace(job.wanted, internal_bytes=job.footprint.internal_bytes)
        if job.footprint.covers(job.wanted):
            _stop_growing(st, job)
    st.enter_phase(job, Phase.PAGED_OUT)
    enqueue(st, job)


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
        enqueue(st, job)


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
        _leave_lane(st, job, announce=False)
    if job.phase is Phase.PAGED_OUT:
        st.lanes.free_fixed(job.footprint.internal_bytes)
    elif job.phase is not Phase.WAITING:
        st.lanes.free_fixed(job.footprint.fixed_bytes)
    _free_host(st, job)
    _stop_growing(st, job)
    dequeue(st, job)
    st.on_gpu.pop(job.job_id, None)
    del st.jobs[job.job_id]


def _leave_lane(st: State, job: Job, *, announce: bool) -> None:
    assert job.lane is not None
    lane_id = job.lane
    leases.stop_competing(st, job)
    if announce:
        st.emit(LeaveLane(job.job_id, lane_id), job)
    job.lane = None
    st.lanes.leave(lane_id, job.job_id)
    if lane_id not in st.lanes.lanes:
        del st.leases[lane_id]


def _free_host(st: State, job: Job) -> None:
    st.host_used_bytes -= job.host_bytes
    job.host_bytes = 0


def _to_page_bytes(job: Job) -> int:
    in_lane = job.footprint.ephemeral_bytes if job.stalled else 0
    return job.footprint.persistent_bytes + in_lane


# Making room


def _displace_for(st: State, job: Job, firsts: list[Entry]) -> bool:
    """Begins or goes on to make room for a waiting job; False if nobody may be, or need be, displaced for it."""
    if must_wait_to_be_measured(st, job):
        return False
    same = st.policy.patience_s > 0 or job.no_room_at == (st.lanes.freed, len(st.on_gpu))
    if same and st.now < job.no_room_since + st.config.quantum_s:
        st.wake_at(job.no_room_since + st.config.quantum_s)
        return False
    patient = _is_patient(st, job)
    if not patient and not leases.would_run(st, job, firsts):
        return False
    victims = _whom_it_may_displace(st, job, patient)
    if victims and patient and not leases.would_run(st, job, firsts):
        return False
    if victims and _make_room(st, _last_first(st, victims), _fits(job)):
        return True
    # Planning is the most expensive thing done here. The same plan fails again until somebody came, went or aged; and
    # who had the patience to wait can wait for another quantum.
    job.no_room_at, job.no_room_since = (st.lanes.freed, len(st.on_gpu)), st.now
    return False


def _is_patient(st: State, job: Job) -> bool:
    """Whether it waits yet before it displaces anyone who wants to run. Asks to be woken when that may be over."""
    if st.policy.is_patient(job, st.moment):
        st.wake_at(job.since + st.policy.patience_s)
        return True
    if st.policy.rotates is not Rotation.NEVER and not st.policy.patience_s:
        # Whom it may displace changes as others run, and nothing else may happen that would make us ask again.
        st.wake_at(st.now + max(st.config.quantum_s, leases.SHORTEST_TICK_S))
    return False


def _fits(job: Job) -> Callable[[LaneTable], bool]:
    def fits(table: LaneTable) -> bool:
        return table.find(job.to_admit_bytes(), job.footprint.ephemeral_bytes, job.spec.owner) is not None

    return fits


def _whom_it_may_displace(st: State, job: Job, patient: bool) -> list[Job]:
    """Jobs that have been idle for long, and those the policy allows. Asks to be woken when time may change that."""
    policy, moment = st.policy, st.moment
    ours = (policy.memory_order(job), job.arrival)
    keeps_busy = None if patient else _keeps_busy(st)
    victims = []
    for other in [other for other in st.on_gpu.values() if not (patient and other.ready)]:
        if other is job or other.stalled or not _can_move(other):
            continue
        idle = not other.ready and other.lease is Lease.NONE
        if idle and st.now >= _idle_enough_at(st, other):
            victims.append(other)
            continue
        if idle:
            st.wake_at(_idle_enough_at(st, other))
        if patient:
            continue
        # One that comes before us in the order would take back at once what it gave up.
        behind = ours < (policy.memory_order(other), other.arrival)
        if behind and policy.may_displace(job, other, moment):
            if other is not keeps_busy:
                victims.append(other)
            continue
        patience_over_at = max(job.since, other.on_gpu_since) + policy.patience_s
        if st.now < patience_over_at:
            st.wake_at(patience_over_at)
    return victims


def _idle_enough_at(st: State, job: Job) -> float:
    return max(job.idle_since, job.since) + st.config.idle_patience_s


def _keeps_busy(st: State) -> Job | None:
    """While memory comes in for one job, another must have something to compute: the first of those that can run."""
    came = [job.on_gpu_since for job in st.on_gpu.values() if job.phase is Phase.PAGING_IN]
    # One that was stopped on its way in never arrives.
    if not came or st.now >= max(came) + COMING_S:
        return None
    st.wake_at(max(came) + COMING_S)
    able = [job for job in st.on_gpu.values() if job.phase is Phase.RESIDENT and job.ready and not job.stalled]
    return min(able, key=lambda job: (st.policy.memory_order(job), job.arrival), default=None)


def _can_move(job: Job) -> bool:
    return job.phase is Phase.RESIDENT or job.phase is Phase.PARKED


def _must_stay(st: State, job: Job) -> bool:
    """It could not be paged out a moment ago. Asks to be woken when it may be tried again."""
    if st.now < job.stays_until:
        st.wake_at(job.stays_until)
        return True
    return False


def _last_first(st: State, jobs: Iterable[Job]) -> list[Job]:
    """Whom to displace first: idle jobs, then those that were told already, then what the policy would run last."""
    order = sorted(jobs, key=lambda job: (st.policy.memory_order(job), job.arrival), reverse=True)
    return sorted(order, key=lambda job: (job.ready, job.stuck, job.job_id not in st.told_before))


def _make_room(st: State, victims: list[Job], fits: Callable[[LaneTable], bool]) -> bool:
    """Takes lanes, or else memory, from the first of `victims` until it `fits`; does nothing if it never would."""
    with_lanes = [victim for victim in victims if victim.lane is not None and not victim.stalled]
    parked = _enough(st, with_lanes, fits, _without_lane)
    if parked:
        _vacate(st, parked, park)
        return True
    able: list[Job] = []
    to_host_bytes = 0
    for victim in victims:
        if st.host_has_room(to_host_bytes + _to_page_bytes(victim)) and not _must_stay(st, victim):
            to_host_bytes += _to_page_bytes(victim)
            able.append(victim)
    paged = _enough(st, able, fits, _without_memory)
    if paged:
        _vacate(st, paged, page_out)
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


def _vacate(st: State, jobs: list[Job], leave: Callable[[State, Job], None]) -> None:
    """Moves those at a boundary now; the others have their lease revoked and are moved when they get there."""
    for job in jobs:
        if job.lease is not Lease.NONE and not job.stalled:
            st.vacating.add(job.job_id)
            st.told.add(job.job_id)
        else:
            leave(st, job)


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
            _leave_lane(st, job, announce=True)
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
                _leave_lane(st, job, announce=True)
                _enter_lane(st, job, place)
                leases.start_competing(st, job)


# Growth


def want(st: State, job: Job, footprint: Footprint, *, stalled: bool) -> None:
    """The job asks for a larger footprint: stalled in mid-iteration, or because more was measured than reserved."""
    wanted = job.footprint.enclosing(footprint)
    if job.wanted is not None:
        wanted = wanted.enclosing(job.wanted)
    if wanted.total_bytes > st.config.capacity_bytes:
        whole = format_bytes(st.config.capacity_bytes)
        reason = f"needs {format_bytes(wanted.total_bytes)}, the whole GPU has {whole}"
        st.emit(RefuseGrowth(job.job_id, reason), job)
        return
    if job.wanted is None:
        st.growing.append(job)
    job.wanted = wanted
    job.stalled = job.stalled or stalled
    leases.stop_competing(st, job)


def lower(st: State, job: Job, footprint: Footprint) -> None:
    """The job needs no more than this, which is nowhere more than it has."""
    was, job.footprint = job.footprint, footprint
    if job.phase is Phase.WAITING:
        job.blocked_at = -1
        return
    freed = was.internal_bytes - footprint.internal_bytes
    if job.phase is not Phase.PAGED_OUT:
        freed += was.persistent_bytes - footprint.persistent_bytes
    if job.phase is Phase.PAGING_OUT:
        st.lanes.leaving_bytes -= was.persistent_bytes - footprint.persistent_bytes
    st.lanes.free_fixed(freed)
    if job.lane is not None:
        st.lanes.set_need(job.lane, job.job_id, footprint.ephemeral_bytes)


def _grow(st: State) -> bool:
    """Serves those that want more, in turn; False while nobody else may get memory because one of them waits for it."""
    before = _who_grows_first(st)
    for job in sorted(st.growing, key=lambda job: job is not before):
        wanted = job.wanted
        assert wanted is not None
        first = _who_grows_first(st)
        if job.phase in (Phase.PAGING_OUT, Phase.PAGING_IN):
            waits = job.stalled
        elif job.stalled and first is not None and first is not job:
            # It waits for the end of the iteration of the one before it, which is told to stop there.
            st.vacating.add(first.job_id)
            waits = True
        elif _growth_bytes(st.lanes, job, wanted) > st.lanes.free_bytes:
            waits = _make_room_to_grow(st, job, wanted)
        else:
            if not _leaves_no_lane(st, job, wanted):
                _allow_growth(st, job, wanted)
            waits = False
        if waits:
            return False
    return True


def _leaves_no_lane(st: State, job: Job, wanted: Footprint) -> bool:
    """Whether nobody could run any more if a job that does not run had this too, and memory for paging were used up."""
    if st.lanes.lanes or job.stalled or st.config.host_bytes is None:
        return False
    lanes = [
        other.footprint.ephemeral_bytes for other in st.waiting if other is not job and other.phase is Phase.PARKED
    ]
    return bool(lanes) and st.lanes.free_bytes - _growth_bytes(st.lanes, job, wanted) < min(lanes)


def _who_grows_first(st: State) -> Job | None:
    """The job for whose iteration others were displaced, until that has ended or a while after it got what it wanted.

    Jobs ask for a little at a time. If each were served in turn, they would displace one another in the middle of
    their iterations, and none would come to its end.
    """
    job = st.grows_first
    if job is None or job.job_id not in st.jobs or not job.holds or job.stuck or job.phase is not Phase.RESIDENT:
        return None
    if job.stalled:
        return job
    if job.wanted is not None or st.now >= st.grows_first_until:
        return None
    st.wake_at(st.grows_first_until)
    return job


def _make_room_to_grow(st: State, job: Job, wanted: Footprint) -> bool:
    """For a job that is stalled in the middle of an iteration everyone else may be displaced.

    True while the others have to wait for that.
    """

    def fits(table: LaneTable) -> bool:
        return _growth_bytes(table, job, wanted) <= table.free_bytes

    if fits(st.lanes.trial()):
        return True
    if _can_wait(st, job, wanted):
        victims = _whom_it_may_displace(st, job, patient=True)
        return bool(victims) and _make_room(st, _last_first(st, victims), fits)
    others = [other for other in st.on_gpu.values() if other is not job and _can_move(other)]
    if _make_room(st, _last_first(st, others), fits):
        if job.stalled:
            st.grows_first = job
        return True
    if _can_move(job) and st.host_has_room(_to_page_bytes(job)) and not _must_stay(st, job):
        # Not even all the others together are enough: what they keep on the GPU stays until they end. So this job
        # steps aside whole and comes back, as large as it wants to be, when they have.
        _vacate(st, [job], page_out)
        return True
    others = [other for other in st.on_gpu.values() if other is not job]
    if any(_must_stay(st, other) for other in (job, *others)):
        # Who could not be paged out may be yet.
        return job.stalled
    if not job.stalled and any(other.wanted is None for other in others):
        # It is at a boundary and only gets no new lease; those who can run free its memory when they end.
        return False
    if st.lanes.coming_bytes or any(_can_go_on(st, other, job) for other in others):
        return job.stalled
    _stop_growing(st, job)
    reason = (
        f"needs {format_bytes(wanted.total_bytes)}, other jobs hold the rest of the GPU, "
        "and the host memory for paging is used up or turned off"
    )
    st.emit(RefuseGrowth(job.job_id, reason), job)
    leases.start_competing(st, job)
    return False


def _can_wait(st: State, job: Job, wanted: Footprint) -> bool:
    """A job that has yet to begin (it loads its model, say) has no more right to others' memory than a newcomer has.

    Where a newcomer would have to have patience, so has this one, as long as others run. What the driver took for it is
    in use already, so for that there has to be room.
    """
    if job.stalled or job.iterations_done or wanted.internal_bytes > job.footprint.internal_bytes:
        return False
    running = [
        other
        for other in st.on_gpu.values()
        if other is not job and other.wanted is None and other.lane is not None and not other.stuck
    ]
    # One that makes a pause of a moment runs as well; whoever has been idle for longer can be displaced.
    return _is_patient(st, job) and any(other.ready or st.now < _idle_enough_at(st, other) for other in running)


def _can_go_on(st: State, other: Job, stalled: Job) -> bool:
    """Whether the other job may yet free memory by itself while this one stalls."""
    if other is stalled or other.wanted is not None:
        return False
    if other.phase is Phase.PAGING_IN:
        return True
    if not other.ready or other.lane is None:
        return False
    holder = st.leases[other.lane].holder
    return holder is None or holder is other or not (holder.stalled or holder.stuck)


def _growth_bytes(table: LaneTable, job: Job, wanted: Footprint) -> int:
    """What the growth takes from the free memory."""
    grown = wanted.internal_bytes - job.footprint.internal_bytes
    if job.phase is not Phase.PAGED_OUT:
        grown += wanted.persistent_bytes - job.footprint.persistent_bytes
    if job.lane is not None:
        grown += table.growth_bytes(job.lane, wanted.ephemeral_bytes)
    return grown


def _allow_growth(st: State, job: Job, wanted: Footprint) -> None:
    fixed = wanted.internal_bytes - job.footprint.internal_bytes
    if job.phase is not Phase.PAGED_OUT:
        fixed += wanted.persistent_bytes - job.footprint.persistent_bytes
    st.lanes.add_fixed(fixed)
    job.footprint = wanted
    if job.lane is not None:
        st.lanes.set_need(job.lane, job.job_id, wanted.ephemeral_bytes)
    _stop_growing(st, job)
    if st.grows_first is job:
        st.grows_first_until = st.now + GROWS_FIRST_S
    st.emit(AllowGrowth(job.job_id, wanted), job)
    leases.start_competing(st, job)


def _stop_growing(st: State, job: Job) -> None:
    if job.wanted is not None:
        job.wanted = None
        job.stalled = False
        st.growing.remove(job)


def check_phases(st: State) -> Iterable[tuple[Job, bool]]:
    """For `Scheduler.validate`: each job, and whether its phase agrees with where it is listed."""
    for job in st.jobs.values():
        queued = job.phase in QUEUED_PHASES
        # A stalled job on its way to the host keeps its lane until what it has there is safe.
        in_lane = job.phase in LANE_PHASES or (job.phase is Phase.PAGING_OUT and job.lease is not Lease.NONE)
        on_gpu = job.phase not in (Phase.WAITING, Phase.PAGED_OUT)
        in_queue = queued and _wants_in(job)
        agrees = (job in st.waiting) == in_queue and (job.lane is not None) == in_lane
        yield job, agrees and (job.job_id in st.on_gpu) == on_gpu
