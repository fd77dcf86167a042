"""Jobs that want more memory than they have.

Stalled in the middle of an iteration, a job cannot be switched out: for it everybody else may be displaced. Where
memory is short, one such job at a time grows to the end of its iteration. One that has yet to begin waits as long as
the policy lets newcomers wait. Why this cannot deadlock is told in docs/decisions/.
"""

from __future__ import annotations

from salus.core import contexts, leases, room
from salus.core.actions import AllowGrowth, RefuseGrowth
from salus.core.lanes import LaneTable
from salus.core.model import Footprint, Job, Phase
from salus.core.state import State
from salus.units import format_bytes

GROWS_FIRST_S = 1.0
"""So long after it got it, the job that others were displaced for comes first when it wants yet more."""


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


def grow(st: State) -> bool:
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
        elif job.phase is Phase.PAGED_OUT and not could_run(st, job, wanted):
            # It would take from others what they run in, and not be able to run itself before they end.
            waits = False
        elif _growth_bytes(st.lanes, job, wanted) > st.lanes.free_bytes:
            waits = not _can_do_without(job, wanted) and _make_room_to_grow(st, job, wanted)
        else:
            if not _leaves_no_lane(st, job, wanted):
                _allow_growth(st, job, wanted)
            waits = False
        if waits:
            return False
    return True


def _can_do_without(job: Job, wanted: Footprint) -> bool:
    """It is paused between iterations. Nobody is displaced for it, but for what the driver took for it already."""
    return job.paused and not job.stalled and wanted.internal_bytes <= job.footprint.internal_bytes


def _make_room_to_grow(st: State, job: Job, wanted: Footprint) -> bool:
    """For a job that is stalled in the middle of an iteration everyone else may be displaced.

    True while the others have to wait for that.
    """

    def fits(table: LaneTable) -> bool:
        return _growth_bytes(table, job, wanted) <= table.free_bytes

    if fits(st.lanes.trial()):
        return True
    if _can_wait(st, job, wanted):
        victims = room.whom_it_may_displace(st, job, patient=True)
        return bool(victims) and room.make_room(st, room.last_first(st, victims), fits)
    others = [other for other in st.on_gpu.values() if other is not job and room.can_move(other)]
    if room.make_room(st, room.last_first(st, others), fits):
        if job.stalled:
            st.grows_first = job
        return True
    if room.can_move(job) and st.host_has_room(room.to_page_bytes(job)) and not room.must_stay(st, job):
        # Not even all the others together are enough: what they keep on the GPU stays until they end. So this job
        # steps aside whole and comes back, as large as it wants to be, when they have.
        room.vacate(st, [job], room.page_out)
        return True
    others = [other for other in st.on_gpu.values() if other is not job]
    if any(room.must_stay(st, other) for other in (job, *others)):
        # Who could not be paged out may be yet.
        return job.stalled
    if not job.stalled and any(_may_free_memory(st, other, job) for other in others):
        # It is at a boundary and only gets no new lease; those who can run free its memory when they end.
        return False
    if st.lanes.coming_bytes or any(_can_go_on(st, other, job) for other in others):
        return job.stalled
    stop_growing(st, job)
    # Beside what it needs after all, others may find a place.
    st.lanes.freed += 1
    reason = (
        f"needs {format_bytes(wanted.total_bytes)}, other jobs hold the rest of the GPU, "
        "and the host memory for paging is used up or turned off"
    )
    st.emit(RefuseGrowth(job.job_id, reason), job)
    leases.start_competing(st, job)
    return False


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


def _leaves_no_lane(st: State, job: Job, wanted: Footprint) -> bool:
    """Whether nobody could run any more if a job that does not run had this too, and memory for paging were used up."""
    if st.lanes.lanes or job.stalled or st.config.host_bytes is None:
        return False
    needs = [
        other.footprint.ephemeral_bytes for other in st.waiting if other is not job and other.phase is Phase.PARKED
    ]
    # Or it could not run itself, and those that are idle now could not either when they want to.
    needs.append(wanted.ephemeral_bytes + (wanted.persistent_bytes if job.phase is Phase.PAGED_OUT else 0))
    return st.lanes.free_bytes - _growth_bytes(st.lanes, job, wanted) < min(needs)


def could_run(st: State, job: Job, wanted: Footprint) -> bool:
    """Whether it fits beside what nobody can take from the others."""
    stays = sum(contexts.stays_bytes(other) for other in st.jobs.values() if other is not job)
    return wanted.total_bytes + stays + st.lanes.outside_bytes <= st.config.capacity_bytes


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
    return room.is_patient(st, job) and any(other.ready or st.now < room.idle_enough_at(st, other) for other in running)


def _can_go_on(st: State, other: Job, stalled: Job) -> bool:
    """Whether the other job may yet free memory by itself while this one stalls."""
    if other is stalled or other.wanted is not None:
        return False
    if other.phase is Phase.PAGING_IN or other.paused:
        return True  # a person who paused it will resume or cancel it; nobody dies of a pause meanwhile
    if not other.ready or other.lane is None:
        return False
    holder = st.leases[other.lane].holder
    return holder is None or holder is other or not (holder.stalled or holder.stuck)


def _may_free_memory(st: State, other: Job, job: Job) -> bool:
    """The same for one at a boundary: nobody else waits for it, and those that are idle may go on one day."""
    if other.wanted is None and not other.ready:
        return True
    if other.wanted is None and other.phase is Phase.PARKED:
        return st.lanes.find(0, other.footprint.ephemeral_bytes, other.spec.owner) is not None
    return other.phase is Phase.PAGING_OUT or _can_go_on(st, other, job)


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
    stop_growing(st, job)
    if st.grows_first is job:
        st.grows_first_until = st.now + GROWS_FIRST_S
    st.emit(AllowGrowth(job.job_id, wanted), job)
    leases.start_competing(st, job)


def stop_growing(st: State, job: Job) -> None:
    if job.wanted is not None:
        job.wanted = None
        job.stalled = False
        st.growing.remove(job)
