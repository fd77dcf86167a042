"""Who runs: leases, one at most in a lane.

In each lane the first ready job in the policy's lease order is offered; the policy chooses among those offered.
`settle` turns the difference between what it chose and what runs now into grants and revocations. A lease is not
revoked before it lasted a quantum, except to make room in memory; between jobs that have taken turns for long, not
before it lasted longer (`_lasts_s`).

A holder that is about to stop may be given an heir (`promise`). That binds: the heir may run by the time that is heard
of here. So nothing takes its place or its memory, and it is granted the lease whatever the policy would choose then.
"""

from __future__ import annotations

from bisect import insort

from salus.core.actions import GrantLease, PromiseLease, RevokeLease, WithdrawPromise
from salus.core.model import Job, LaneId, Lease, Stuck
from salus.core.order import Entry, rank
from salus.core.policies.base import Rotation, lease_entry
from salus.core.state import LaneLeases, State

SHORTEST_TICK_S = 0.005
"""How often a rotating policy is asked again at the most, where the quantum is shorter or 0."""
LONGEST_TICK_S = 0.1
"""And at the least, where iterations seem to be longer: of a job's first ones that may be far from true."""
GROWS = 1 / 300
"""Of the time for which the jobs of a lane have shared it, a lease between them lasts this part. So at any moment their
shares are off by no more than that part of the time, and less and less is lost by switching."""
LONGEST_LEASE_S = 1.0
"""But no longer than this, unless the quantum is."""
NEW_FOR_S = 1.0
"""Leases of others are short for a newcomer's sake for this long, or where it is next. It may not be for hours, say
because it is the least urgent."""
ROUNDING_S = 1e-9


def start_competing(st: State, job: Job) -> None:
    """The job is in a lane and ready. Call it whenever either became true; it checks both."""
    if job.competing:
        st.policy.on_competing(job)
        lane = st.leases[_lane(job)]
        if job not in lane.ready and not job.holds:
            lane.newcomers[job.job_id] = st.now
        put_in_order(st, lane, job)


def stop_competing(st: State, job: Job) -> None:
    if job.lane is not None and job in st.leases[job.lane].ready:
        st.leases[job.lane].ready.discard(job)
        st.leases[job.lane].newcomers.pop(job.job_id, None)
        st.policy.on_resting(job)


def newcomer_since(st: State, job: Job) -> float | None:
    return None if job.lane is None else st.leases[job.lane].newcomers.get(job.job_id)


def set_newcomer(st: State, job: Job, since: float | None) -> None:
    """A job that left the order of its lane for a moment is as new there as it was before."""
    if job.lane is None:
        return
    newcomers = st.leases[job.lane].newcomers
    newcomers.pop(job.job_id, None)
    if since is not None:
        newcomers[job.job_id] = since


def join(st: State, lane: LaneLeases) -> None:
    """A job comes to the lane. From now on it is shared anew."""
    lane.joined_at = st.now
    lane.had_s.clear()


def end_lease(st: State, job: Job) -> None:
    if job.lease is Lease.PROMISED:
        withdraw(st, job)
    elif job.lease is not Lease.NONE:
        job.lease = Lease.NONE
        st.leases[_lane(job)].holder = None
        st.running -= 1
        set_stuck(st, job, None)


def promise(st: State, holder: Job) -> None:
    """The holder is about to stop. If its lane has a next one that the policy would run then, that one is told."""
    lane = st.leases[_lane(holder)]
    if lane.heir is not None or holder.stalled or holder.stuck:
        return
    if holder.lease is Lease.HELD:
        _revoke(st, holder)
    heir = lane.ready.first_entry(besides={holder.job_id, *st.vacating})
    # One that waits in mid-iteration takes its part of the lane back first; there is nothing quick about that.
    if heir is None or heir[2].mid_iteration:
        return
    entries = [entry for entry in first_of_each_lane(st) if entry[2].lane != holder.lane]
    insort(entries, heir, key=rank)
    if heir[2] in st.policy.choose([entry[2] for entry in entries], st.moment):
        lane.heir = heir[2]
        lane.heir.lease = Lease.PROMISED
        st.emit(PromiseLease(lane.heir.job_id, _lane(holder), holder.job_id), lane.heir)


def withdraw(st: State, job: Job) -> None:
    """What was promised in the lane of this job, the heir or the one before it."""
    lane = st.leases[_lane(job)]
    heir, lane.heir = lane.heir, None
    if heir is not None:
        heir.lease = Lease.NONE
        st.emit(WithdrawPromise(heir.job_id, _lane(heir)), heir)


def set_stuck(st: State, job: Job, why: Stuck | None) -> None:
    """None: it is not, or not any more."""
    was, job.stuck = job.stuck, why
    if (was is None) != (why is None):
        st.stuck += 1 if why else -1
        st.lanes.set_stuck(_lane(job), why is not None)


def serve(st: State, job: Job, ran_s: float, gpu_time_s: float, iterations: int) -> None:
    """It ran for so long, and that much of the GPU's time was its own."""
    job.ran_at = st.now
    job.serve(ran_s, gpu_time_s, iterations)
    st.policy.on_served(job, gpu_time_s, iterations)
    if job.lane is not None:
        lane = st.leases[job.lane]
        lane.had_s[job.job_id] = lane.had_s.get(job.job_id, 0.0) + ran_s
        if job in lane.ready:
            put_in_order(st, lane, job)


def put_in_order(st: State, lane: LaneLeases, job: Job) -> None:
    lane.ready.put(job, st.policy.lease_order(job), st.policy.group(job))


def first_of_each_lane(st: State) -> list[Entry]:
    """The job each lane would run next, in lease order over all lanes."""
    entries = []
    for lane in st.leases.values():
        if lane.holder is not None and (lane.holder.stalled or lane.holder.stuck):
            continue
        if lane.heir is not None:
            entries.append(lease_entry(st.policy, lane.heir))
            continue
        entry = lane.ready.first_entry(besides=st.vacating)
        if entry is not None:
            entries.append(entry)
    entries.sort(key=rank)
    return entries


def would_run(st: State, job: Job, firsts: list[Entry] | None = None) -> bool:
    """Would the policy run this job now if it were the first of a lane of its own?

    `firsts` is what `first_of_each_lane` said, where the caller has it.
    """
    entries = [entry for entry in firsts or first_of_each_lane(st) if entry[2] is not job]
    insort(entries, lease_entry(st.policy, job), key=rank)
    return job in st.policy.choose([entry[2] for entry in entries], st.moment)


def settle(st: State) -> None:
    firsts = [entry[2] for entry in first_of_each_lane(st)]
    picked = set(map(id, st.policy.choose(firsts, st.moment)))
    # Only what was offered counts: a policy cannot put a job on the GPU that is not ready.
    chosen = {job.lane: job for job in firsts if id(job) in picked}
    contended = len(chosen) < len(firsts) or (len(firsts) > 1 and st.policy.rotates is Rotation.ACROSS_LANES)
    for lane_id, lane in st.leases.items():
        wanted = chosen.get(lane_id)
        if lane.holder is None:
            heir, lane.heir = lane.heir, None
            next_one = heir or wanted
            if next_one is not None:
                _grant(st, lane_id, lane, next_one)
            stays = heir is wanted and not (heir and (heir.paused or heir.job_id in st.vacating))
            if heir is not None and heir.lease is Lease.HELD and not stays:
                # It was promised before that was known.
                _revoke_in_time(st, lane, heir, wanted)
        elif wanted is not lane.holder and lane.holder.lease is Lease.HELD and not lane.holder.stalled:
            _revoke_in_time(st, lane, lane.holder, wanted)
        contended = contended or len(lane.ready) > 1
    if contended and st.policy.rotates is not Rotation.NEVER:
        _wake_for_rotation(st)


def hold(st: State, lane: LaneLeases, job: Job) -> None:
    lane.holder = job
    job.lease = Lease.HELD
    lane.newcomers.pop(job.job_id, None)
    job.granted_at = job.ran_at = st.now
    st.running += 1


def _grant(st: State, lane_id: LaneId, lane: LaneLeases, job: Job) -> None:
    hold(st, lane, job)
    job.mid_iteration = False
    st.emit(GrantLease(job.job_id, lane_id), job)
    if st.config.quantum_s == 0 and len(lane.ready) > 1 and st.policy.rotates is not Rotation.NEVER:
        # Switching at every boundary: the job is told at once that its first iteration is its last for now,
        # because a boundary that is not revoked sends no message and so could not be decided on.
        _revoke(st, job)


def _revoke(st: State, job: Job) -> None:
    job.lease = Lease.REVOKED
    st.emit(RevokeLease(job.job_id), job)


def _lasts_s(st: State, lane: LaneLeases, holder: Job, wanted: Job | None) -> float:
    """How long its lease lasts at least, if this one is next. None: the lane is to stand idle, for others to get even.

    The first iteration after a pause is slower: the processor's caches have gone cold. So jobs that take turns take
    longer and longer ones, while nobody joins them. One that has only come, or was away, does not wait for all that: a
    person may be waiting for it.
    """
    quantum_s = st.config.quantum_s
    if quantum_s == 0 or wanted is None or not _may_be_long(st):
        return quantum_s
    if wanted.job_id in lane.newcomers or any(st.now < at + NEW_FOR_S for at in lane.newcomers.values()):
        return quantum_s
    longest_s = min((holder.granted_at - lane.joined_at) * GROWS, LONGEST_LEASE_S)
    return max(quantum_s, longest_s * _weight_in(lane, holder))


def _may_be_long(st: State) -> bool:
    """Not where a policy holds one lane back for another: while a lease lasts, whoever is next there gets no further,
    and the other lanes would stand idle until it does."""
    return len(st.leases) == 1 or st.policy.rotates is not Rotation.ACROSS_LANES


def _weight_in(lane: LaneLeases, job: Job) -> float:
    """1 for a job that gets as much of the lane as the others do, or more; for one that gets less, so much less.

    What it has in one go, the others have to have in one go as well, each by its weight, before it runs again.
    """
    whole_s = sum(lane.had_s.values())
    return min(1.0, lane.had_s.get(job.job_id, 0.0) * len(lane.had_s) / whole_s) if whole_s else 1.0


def _revoke_in_time(st: State, lane: LaneLeases, holder: Job, wanted: Job | None) -> None:
    over_at = holder.granted_at + _lasts_s(st, lane, holder, wanted)
    if st.now + ROUNDING_S >= over_at or holder.paused or holder.job_id in st.vacating:
        _revoke(st, holder)
    else:
        st.wake_at(over_at)


def _wake_for_rotation(st: State) -> None:
    """Asks again when the first lease has lasted, and every quantum from then on.

    Not much more often than a holder gets to a boundary: before that nothing could be done about the answer. And not
    for a holder that is revoked already: it reports when it gets there.
    """
    shortest = max(st.config.quantum_s, SHORTEST_TICK_S)
    for lane in st.leases.values():
        if lane.holder is not None and lane.holder.lease is Lease.HELD:
            tick = max(shortest, min(lane.holder.iteration_s, LONGEST_TICK_S))
            following = lane.ready.first_entry(besides={lane.holder.job_id})
            lasts_s = _lasts_s(st, lane, lane.holder, following[2] if following is not None else None)
            over_at = lane.holder.granted_at + max(tick, lasts_s)
            st.wake_at(over_at if st.now + ROUNDING_S < over_at else st.now + tick)


def _lane(job: Job) -> LaneId:
    assert job.lane is not None
    return job.lane
