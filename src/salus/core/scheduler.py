"""The scheduler of one GPU: events in, actions out.

`handle` is the only way in. Each event has a handler that notes the fact; then memory is settled, then leases, and
what that takes is returned as actions. No clock is read here: time is what the caller says it is.

Safety, true after every event (`validate` checks it, from scratch):
- persistent and internal bytes of the jobs on the GPU + bytes held by the lanes <= capacity;
- a lane is at least as large as the largest ephemeral footprint of the jobs in it;
- one lease at most in a lane, and one promise, to a job that is there and wants to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from salus.core import admission, changes, contexts, growth, leases, memory, room, snapshot
from salus.core import events as ev
from salus.core.actions import AcceptJob, Action, AllowGrowth, RefuseJob, SetTimer
from salus.core.lanes import Lane
from salus.core.model import QUEUED_PHASES, GpuConfig, Job, JobId, Lease, Phase, Stuck
from salus.core.policies.base import Policy
from salus.core.state import State
from salus.errors import InvariantBroken, RequestRejected


class Scheduler:
    def __init__(self, config: GpuConfig, policy: Policy) -> None:
        self._state = State(config, policy)
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.JobArrived: self._on_job_arrived,
            ev.JobReturned: self._on_job_returned,
            ev.RecoveryBegan: self._on_recovery_began,
            ev.RecoveryFinished: self._on_recovery_finished,
            ev.JobReady: self._on_job_ready,
            ev.JobIdled: self._on_job_idled,
            ev.IterationFinished: self._on_iteration_finished,
            ev.JobYielding: self._on_job_yielding,
            ev.PromiseRefused: self._on_promise_refused,
            ev.FootprintChanged: self._on_footprint_changed,
            ev.UtilizationMeasured: self._on_utilization_measured,
            ev.MemoryWanted: self._on_memory_wanted,
            ev.JobStuck: self._on_job_stuck,
            ev.JobChanged: self._on_job_changed,
            ev.JobPaused: self._on_job_paused,
            ev.JobResumed: self._on_job_resumed,
            ev.JobLeft: self._on_job_left,
            ev.PageOutFinished: self._on_page_out_finished,
            ev.PageOutFailed: self._on_page_out_failed,
            ev.PageInFinished: self._on_page_in_finished,
            ev.LaneReleased: self._on_lane_released,
            ev.ContextWanted: self._on_context_wanted,
            ev.OutsideMemoryChanged: self._on_outside_memory_changed,
            ev.TimerFired: self._on_timer_fired,
            ev.PolicyChanged: self._on_policy_changed,
        }

    def handle(self, event: ev.Event, now: float) -> list[Action]:
        """Takes a fact in, gives back what is to be done about it. What cannot be true is rejected."""
        st = self._state
        if not st.now <= now < float("inf"):
            raise RequestRejected(f"{type(event).__name__} at {now} is not after the last event, at {st.now}")
        before, st.now = st.now, now
        try:
            self._handlers[type(event)](event)
        except RequestRejected:
            st.now = before
            raise
        if isinstance(event, ev.IterationFinished) and not (event.yielded or st.growing):
            # A report in passing. Decisions are made at boundaries that were asked for, and on timers.
            return st.take_actions()
        if st.recovering:
            return st.take_actions()
        memory.settle(st)
        leases.settle(st)
        self._set_timer()
        return st.take_actions()

    # For a journal that is cut into segments.

    def snapshot(self) -> dict[str, Any]:
        """Everything it knows, in what JSON has. Not from inside `handle`."""
        return snapshot.take(self._state)

    @classmethod
    def restore(cls, plain: dict[str, Any], policy: Policy) -> Scheduler:
        """A scheduler that goes on exactly as the one in the snapshot. `policy` is a new one of the same kind."""
        state = snapshot.restore(plain, policy)
        scheduler = cls(state.config, policy)
        scheduler._state = state
        return scheduler

    # What others may look at.

    @property
    def config(self) -> GpuConfig:
        return self._state.config

    @property
    def policy(self) -> Policy:
        return self._state.policy

    @property
    def jobs(self) -> dict[JobId, Job]:
        """All jobs in the system. To read, not to change."""
        return self._state.jobs

    @property
    def lanes(self) -> dict[int, Lane]:
        """All open lanes. To read, not to change."""
        return self._state.lanes.lanes

    @property
    def free_bytes(self) -> int:
        return self._state.lanes.free_bytes

    @property
    def queue(self) -> list[Job]:
        """Jobs that wait for memory, the next one first."""
        return list(self._state.waiting)

    @property
    def queue_length(self) -> int:
        return len(self._state.waiting)

    def next_in_lane(self, holder_id: JobId) -> JobId | None:
        """Who would run in the lane if its holder stopped now: its heir, or else a guess, for getting ready."""
        lane = self._state.leases.get(self._job(holder_id).lane or 0)
        if lane is not None and lane.heir is not None:
            return lane.heir.job_id
        entry = lane.ready.first_entry(besides={holder_id}) if lane is not None else None
        return None if entry is None else entry[2].job_id

    def unstarted(self) -> Iterator[Job]:
        """Waiting jobs, the next one first, that hold nothing on this GPU yet and so could as well go to another."""
        return (job for job in self._state.waiting if job.phase is Phase.WAITING and not job.context_bytes)

    def explain(self, job_id: JobId) -> admission.Waiting | None:
        """Why the job does not run now; None if it does."""
        return admission.explain(self._state, self._job(job_id))

    # Events.

    def _on_job_arrived(self, event: ev.JobArrived) -> None:
        st, spec = self._state, event.job
        if spec.job_id in st.jobs:
            raise RequestRejected(f"there is a job {spec.job_id} already; give this one another id")
        reason = admission.why_refused(spec.footprint, st.config)
        if reason is not None:
            st.emit(RefuseJob(spec.job_id, reason))
            return
        st.arrivals += 1
        job = Job(
            spec=spec,
            arrival=st.arrivals,
            arrived_at=st.now,
            footprint=spec.footprint,
            footprint_known=spec.footprint_known,
            utilization=spec.utilization,
            since=st.now,
            idle_since=st.now,
            paused=event.paused,
        )
        st.tell(job, "JobArrived")
        # In this order: a policy that fails here leaves nothing behind.
        st.policy.on_arrived(job)
        room.enqueue(st, job)
        st.jobs[spec.job_id] = job
        st.emit(AcceptJob(spec.job_id), job)

    def _on_job_returned(self, event: ev.JobReturned) -> None:
        st, spec = self._state, event.job
        if spec.job_id in st.jobs:
            raise RequestRejected(f"there is a job {spec.job_id} already; it cannot come back")
        st.arrivals += 1
        job = Job(
            spec=spec,
            arrival=st.arrivals,
            arrived_at=st.now,
            footprint=event.footprint,
            footprint_known=True,
            utilization=spec.utilization,
            since=st.now,
            idle_since=st.now,
            asks=event.ready or event.holds,
            paused=event.paused,
            iterations_done=event.iterations,
            attained_s=event.gpu_time_s,
            ran_s=event.ran_s,
            iteration_s=event.ran_s / max(1, event.iterations),
        )
        st.tell(job, "JobReturned")
        st.policy.on_arrived(job)
        st.jobs[spec.job_id] = job
        st.emit(AcceptJob(spec.job_id), job)
        memory.restore(st, job, event)

    def _on_recovery_began(self, event: ev.RecoveryBegan) -> None:
        self._state.recovering = True

    def _on_recovery_finished(self, event: ev.RecoveryFinished) -> None:
        self._state.recovering = False

    def _on_job_ready(self, event: ev.JobReady) -> None:
        job = self._job(event.job_id, event)
        if not job.asks:
            job.asks = True
            self._state.policy.on_ready(job)
            if job.phase in QUEUED_PHASES:
                room.enqueue(self._state, job)
            leases.start_competing(self._state, job)

    def _on_job_idled(self, event: ev.JobIdled) -> None:
        st, job = self._state, self._job(event.job_id, event)
        if job.stalled:
            raise RequestRejected(f"job {job.job_id} waits for memory in the middle of an iteration; it cannot be idle")
        if job.asks:
            job.asks = False
            job.idle_since = st.now
        leases.stop_competing(st, job)
        if job.phase is Phase.RESIDENT:
            leases.end_lease(st, job)
        elif job.phase in QUEUED_PHASES:
            room.enqueue(st, job)

    def _on_iteration_finished(self, event: ev.IterationFinished) -> None:
        st, job = self._state, self._job(event.job_id, event)
        if not 0 <= event.gpu_time_s < float("inf") or event.iterations < 0:
            raise RequestRejected(f"job {job.job_id} reports what cannot be: {event}")
        # Those who run in other lanes at the same time have the GPU too; not those who wait for memory there.
        stalled = sum(other.stalled and other.holds and not other.stuck for other in st.growing)
        at_once = max(1, st.running - st.stuck - stalled)
        if event.yielded:
            if not job.holds or job.stalled:
                raise RequestRejected(
                    f"job {job.job_id} gives up a lease that it cannot give up now: {job.lease.value}"
                )
            leases.end_lease(st, job)
        leases.serve(st, job, event.gpu_time_s, event.gpu_time_s / at_once, event.iterations)

    def _on_job_yielding(self, event: ev.JobYielding) -> None:
        job = self._job(event.job_id, event)
        if job.holds and not self._state.recovering:
            leases.promise(self._state, job)

    def _on_promise_refused(self, event: ev.PromiseRefused) -> None:
        job = self._job(event.job_id, event)
        if job.lease is Lease.PROMISED:
            leases.withdraw(self._state, job)

    def _on_footprint_changed(self, event: ev.FootprintChanged) -> None:
        st, job = self._state, self._job(event.job_id, event)
        job.footprint_known = True
        if job.phase is Phase.WAITING:
            reason = admission.why_refused(event.footprint, st.config)
            if reason is not None:
                st.emit(RefuseJob(job.job_id, reason), job)
                self._forget(job)
                return
            job.footprint = event.footprint
            room.enqueue(st, job)
            return
        growth.lower(st, job, job.footprint.common(event.footprint))
        if not job.footprint.covers(event.footprint):
            growth.want(st, job, event.footprint, stalled=False)
        if job.phase in QUEUED_PHASES:
            room.enqueue(st, job)

    def _on_utilization_measured(self, event: ev.UtilizationMeasured) -> None:
        job = self._job(event.job_id, event)
        if not 0 <= event.utilization <= 1:
            raise RequestRejected(f"job {job.job_id}: utilization {event.utilization} is not in 0 to 1")
        job.utilization = event.utilization

    def _on_memory_wanted(self, event: ev.MemoryWanted) -> None:
        st, job = self._state, self._job(event.job_id, event)
        if not job.holds or job.phase is not Phase.RESIDENT:
            raise RequestRejected(f"job {job.job_id} asks for memory without a lease; it must be granted one first")
        if job.footprint.covers(event.footprint):
            st.emit(AllowGrowth(job.job_id, job.footprint), job)
        else:
            # It does not stop before it has that, and what it was to leave may be needed for it.
            leases.withdraw(st, job)
            growth.want(st, job, event.footprint, stalled=True)

    def _on_job_stuck(self, event: ev.JobStuck) -> None:
        job = self._job(event.job_id, event)
        if job.holds:
            why = Stuck.STOPPED if event.stopped else Stuck.SILENT
            leases.set_stuck(self._state, job, why if event.stuck else None)

    def _on_job_changed(self, event: ev.JobChanged) -> None:
        changes.change(self._state, self._job(event.job_id, event), event.weight, event.priority)

    def _on_job_paused(self, event: ev.JobPaused) -> None:
        changes.pause(self._state, self._job(event.job_id, event))

    def _on_job_resumed(self, event: ev.JobResumed) -> None:
        changes.resume(self._state, self._job(event.job_id, event))

    def _on_job_left(self, event: ev.JobLeft) -> None:
        self._forget(self._job(event.job_id, event))

    def _on_page_out_finished(self, event: ev.PageOutFinished) -> None:
        job = self._job(event.job_id, event)
        if job.phase is not Phase.PAGING_OUT:
            raise RequestRejected(f"job {job.job_id} was not being paged out; it is {job.phase.value}")
        memory.page_out_finished(self._state, job)

    def _on_page_out_failed(self, event: ev.PageOutFailed) -> None:
        job = self._job(event.job_id, event)
        if job.phase is not Phase.PAGING_OUT:
            raise RequestRejected(f"job {job.job_id} was not being paged out; it is {job.phase.value}")
        memory.page_out_failed(self._state, job)

    def _on_page_in_finished(self, event: ev.PageInFinished) -> None:
        job = self._job(event.job_id, event)
        if job.phase is not Phase.PAGING_IN:
            raise RequestRejected(f"job {job.job_id} was not being paged in; it is {job.phase.value}")
        memory.page_in_finished(self._state, job)

    def _on_lane_released(self, event: ev.LaneReleased) -> None:
        self._state.lanes.released(event.lane_id, event.size_bytes)

    def _on_context_wanted(self, event: ev.ContextWanted) -> None:
        job = self._job(event.job_id, event)
        if event.wanted:
            contexts.want(self._state, job)
        else:
            contexts.give_up(self._state, job)

    def _on_outside_memory_changed(self, event: ev.OutsideMemoryChanged) -> None:
        if event.size_bytes < 0:
            raise RequestRejected(f"others cannot use {event.size_bytes} bytes")
        self._state.lanes.set_outside(event.size_bytes)

    def _on_timer_fired(self, event: ev.TimerFired) -> None:
        self._state.timer_at = None

    def _on_policy_changed(self, event: ev.PolicyChanged) -> None:
        st = self._state
        st.policy = event.policy
        queued = [job for job in st.jobs.values() if job.phase in QUEUED_PHASES]
        # Keys of two policies cannot be compared, so every list is emptied before the first new key goes in.
        for jobs in (st.waiting, st.returning, *(lane.ready for lane in st.leases.values())):
            jobs.clear()
        for job in st.jobs.values():
            st.policy.on_arrived(job)
        for job in queued:
            room.enqueue(st, job)
        for job in st.on_gpu.values():
            leases.start_competing(st, job)

    # Helpers.

    def _job(self, job_id: JobId, event: ev.Event | None = None) -> Job:
        job = self._state.jobs.get(job_id)
        if job is None:
            raise RequestRejected(f"there is no job {job_id}")
        if event is not None:
            self._state.tell(job, type(event).__name__)
        return job

    def _forget(self, job: Job) -> None:
        memory.forget(self._state, job)
        self._state.policy.on_left(job)

    def _set_timer(self) -> None:
        st = self._state
        due, st.timer_due = st.timer_due, None
        if due is not None and (st.timer_at is None or due < st.timer_at or st.timer_at < st.now):
            st.timer_at = due
            st.emit(SetTimer(due))

    # The invariants.

    def validate(self) -> None:
        """Checks everything that must always be true, from scratch; raises `InvariantBroken` with a story."""
        st = self._state
        lanes = st.lanes
        fixed = sum(_fixed_on_gpu(job) for job in st.jobs.values())
        held = sum(lane.held_bytes for lane in lanes.lanes.values()) + sum(lanes.closing.values())
        leaving = sum(job.footprint.persistent_bytes for job in st.jobs.values() if job.phase is Phase.PAGING_OUT)
        _require(fixed == lanes.fixed_bytes, f"fixed bytes are {fixed}, counted as {lanes.fixed_bytes}")
        _require(held == lanes.lane_bytes, f"lanes hold {held} bytes, counted as {lanes.lane_bytes}")
        _require(leaving == lanes.leaving_bytes, f"{leaving} bytes are leaving, counted as {lanes.leaving_bytes}")
        _require(fixed + held <= lanes.capacity_bytes, f"{fixed} + {held} bytes are on a GPU of {lanes.capacity_bytes}")
        hosted = sum(job.host_bytes for job in st.jobs.values())
        _require(hosted == st.host_used_bytes, f"the host holds {hosted} bytes, counted as {st.host_used_bytes}")
        _require(st.host_has_room(0), f"the host holds {hosted} bytes, it may hold {st.config.host_bytes}")
        run = sum(lane.holder is not None for lane in st.leases.values())
        _require(run == st.running, f"{run} jobs hold a lease, counted as {st.running}")
        stuck = sum(job.stuck is not None for job in st.jobs.values())
        _require(stuck == st.stuck, f"{stuck} jobs are stuck, counted as {st.stuck}")
        _require(set(lanes.lanes) == set(st.leases), "a lane has no list of leases, or the other way round")
        for lane in lanes.lanes.values():
            self._validate_lane(lane)
        for job, agrees in memory.check_phases(st):
            _require(agrees, f"job {job.job_id} is {job.phase.value} but listed elsewhere", job)
            grows = job.wanted is not None
            _require(grows == (job in st.growing), f"job {job.job_id} wants more and is not listed, or is", job)
            _require(grows or not job.stalled, f"job {job.job_id} stalls and wants nothing", job)
            _require(job.asks or job.lease is Lease.NONE, f"job {job.job_id} holds a lease and is not ready", job)
            goes_on = job.paused and job.lease is Lease.HELD and not (job.stalled or st.recovering)
            _require(not goes_on, f"job {job.job_id} is paused, and its lease was not revoked", job)
            waits = job.phase is Phase.WAITING
            _require(waits or not job.context_bytes, f"job {job.job_id} has memory, and a context besides", job)
            outside = job.job_id not in st.at_the_door or (waits and not job.context_bytes)
            _require(outside, f"job {job.job_id} asks for what it has", job)
            book = st.leases[job.lane] if job.lane is not None else None
            _require((book is not None and book.holder is job) == job.holds, f"job {job.job_id}: who runs?", job)
            inherits = book is not None and book.heir is job
            _require(inherits == (job.lease is Lease.PROMISED), f"job {job.job_id}: who is next?", job)

    def _validate_lane(self, lane: Lane) -> None:
        st = self._state
        book = st.leases[lane.lane_id]
        _require(bool(lane.needs), f"lane {lane.lane_id} is open and empty")
        largest = max(lane.needs.values())
        _require(lane.held_bytes >= lane.size_bytes >= largest, f"lane {lane.lane_id} is smaller than its jobs need")
        for job_id, need in lane.needs.items():
            job = st.jobs[job_id]
            _require(job.lane == lane.lane_id, f"job {job_id} is in lane {lane.lane_id} and does not know", job)
            _require(need == job.footprint.ephemeral_bytes, f"job {job_id} has a wrong need in its lane", job)
            _require((job in book.ready) == job.competing, f"job {job_id} is listed wrongly as ready", job)
            shared = st.config.share_lanes_between_users or job.spec.owner == lane.owner
            _require(shared, f"job {job_id} is in a lane of another user", job)
        for job in book.ready:
            _require(job.job_id in lane.needs, f"job {job.job_id} is ready in a lane it is not in", job)
        new = {job.job_id for job in book.ready if not job.holds}
        _require(book.newcomers.keys() <= new, f"lane {lane.lane_id} has newcomers that are not ready, or run")


def _fixed_on_gpu(job: Job) -> int:
    if job.phase in (Phase.WAITING, Phase.PAGED_OUT):
        return contexts.stays_bytes(job)
    return job.footprint.fixed_bytes


def _require(condition: bool, message: str, job: Job | None = None) -> None:
    if not condition:
        raise InvariantBroken(message, tuple(job.story) if job is not None else ())
