"""A made-up GPU that obeys a scheduler and asserts on every misuse.

It keeps its own books, from the actions alone: if the scheduler's idea of the hardware ever parts from what its own
orders add up to, a test fails here, whatever `validate` says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from salus.core import actions as act
from salus.core import events as ev
from salus.core.model import Footprint, GpuConfig, JobSpec, Lease
from salus.core.policies import SHIPPED, Policy, build
from salus.core.scheduler import Scheduler

GIB = 2**30
MOST_ANSWERS = 1000
"""To what was ordered at one moment. With a few dozen jobs, more is something that goes on for ever."""
CLASSES = {policy.name: policy for policy in SHIPPED}


def make_policy(spec: str) -> Policy:
    return build(spec, CLASSES)


def footprint(persistent: float, ephemeral: float, internal: float = 0) -> Footprint:
    """In GiB."""
    return Footprint(int(persistent * GIB), int(ephemeral * GIB), int(internal * GIB))


@dataclass
class Place:
    """What the GPU knows of a job."""

    footprint: Footprint
    context_bytes: int = 0
    """Made before it has memory."""
    on_gpu: bool = False
    started: bool = False
    lane: int | None = None
    holds_lease: bool = False
    revoked: bool = False
    stalled: bool = False
    promised: bool = False
    """It may run before the scheduler hears that the one before it has stopped."""
    paused: bool = False


@dataclass
class World:
    policy: str = "fair"
    capacity: float = 16
    quantum_s: float = 0.0
    host_bytes: int | None = None
    share_between_users: bool = False
    now: float = 0.0
    places: dict[str, Place] = field(default_factory=dict)
    lanes: dict[int, int] = field(default_factory=dict)
    """Bytes that each lane occupies."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of each open lane that may be used."""
    owners: dict[int, int] = field(default_factory=dict)
    answers: deque[ev.Event] = field(default_factory=deque)
    """What was ordered and has yet to happen."""
    timer_s: float | None = None
    log: list[act.Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = GpuConfig(
            capacity_bytes=int(self.capacity * GIB),
            quantum_s=self.quantum_s,
            host_bytes=self.host_bytes,
            share_lanes_between_users=self.share_between_users,
            idle_patience_s=1.0,
        )
        self.scheduler = Scheduler(self.config, make_policy(self.policy))

    # Events

    def send(self, event: ev.Event) -> list[act.Action]:
        actions = self.scheduler.handle(event, self.now)
        for action in actions:
            self._obey(action)
            self._check_memory()
        self.log += actions
        self.scheduler.validate()
        self._check_agreement()
        return actions

    def arrive(self, job_id: str, needs: Footprint, *, ready: bool = True, **spec: object) -> list[act.Action]:
        self.places[job_id] = Place(needs)
        actions = self.send(ev.JobArrived(JobSpec(job_id, needs, **spec)))  # type: ignore[arg-type]
        if ready and job_id in self.places:
            actions += self.send(ev.JobReady(job_id))
        return actions

    def iterate(self, job_id: str, gpu_time_s: float = 0.01, iterations: int = 1) -> list[act.Action]:
        """A lease holder ends an iteration; it yields if it was told to."""
        place = self.places[job_id]
        assert place.holds_lease and not place.stalled, f"{job_id} cannot run"
        self.now += gpu_time_s
        return self._boundary(job_id, gpu_time_s, iterations)

    def announce(self, job_id: str) -> list[act.Action]:
        """A lease holder is about to stop."""
        return self.send(ev.JobYielding(job_id))

    def idle(self, job_id: str) -> list[act.Action]:
        place = self.places[job_id]
        heir = self.heir_of(job_id)
        place.holds_lease = place.revoked = False
        return self._expect_heir(heir, self.send(ev.JobIdled(job_id)))

    def leave(self, job_id: str) -> list[act.Action]:
        heir = self.heir_of(job_id)
        place = self.places.pop(job_id)
        self.answers = deque(event for event in self.answers if getattr(event, "job_id", None) != job_id)
        place.on_gpu = False
        return self._expect_heir(heir, self.send(ev.JobLeft(job_id)))

    def pause(self, job_id: str) -> list[act.Action]:
        place = self.places[job_id]
        place.paused = True
        actions = self.send(ev.JobPaused(job_id))
        assert not place.holds_lease or place.revoked or place.stalled, "a paused job goes on after its boundary"
        return actions

    def resume(self, job_id: str) -> list[act.Action]:
        self.places[job_id].paused = False
        return self.send(ev.JobResumed(job_id))

    def ask_for_context(self, job_id: str, wanted: bool = True) -> list[act.Action]:
        if not wanted:
            self.places[job_id].context_bytes = 0
        return self.send(ev.ContextWanted(job_id, wanted))

    def want(self, job_id: str, needs: Footprint) -> list[act.Action]:
        self.places[job_id].stalled = True
        return self.send(ev.MemoryWanted(job_id, needs))

    def measure(self, job_id: str, needs: Footprint) -> list[act.Action]:
        """What is smaller than before counts at once; what is larger, only when it is allowed."""
        place = self.places[job_id]
        place.footprint = place.footprint.common(needs) if place.started else needs
        return self.send(ev.FootprintChanged(job_id, needs))

    def answer(self) -> list[act.Action]:
        """The oldest thing that was ordered has happened."""
        event = self.answers.popleft()
        match event:
            case ev.LaneReleased(lane_id, size_bytes):
                # What was asked for since then counts: a shrunk lane may have grown again, or been closed.
                held = max(min(size_bytes, self.lanes.pop(lane_id, 0)), self.sizes.get(lane_id, 0))
                if held or lane_id in self.sizes:
                    self.lanes[lane_id] = held
            case ev.PageOutFinished(job_id):
                place = self.places[job_id]
                place.on_gpu = False
                place.lane = None
                place.holds_lease = place.revoked = False
        return self.send(event)

    def fail_page_out(self) -> list[act.Action]:
        """One that was told to go to the host cannot; everything is where it was."""
        event = next((event for event in self.answers if isinstance(event, ev.PageOutFinished)), None)
        if event is None:
            return []
        self.answers.remove(event)
        return self.send(ev.PageOutFailed(event.job_id))

    def answer_all(self) -> None:
        answered = 0
        while self.answers:
            self.answer()
            answered += 1
            assert answered < MOST_ANSWERS, f"the same is ordered over and over: {self.log[-12:]}"

    def fire_timer(self) -> list[act.Action]:
        """Goes on to when the scheduler asked to be woken. One that did not ask is not woken."""
        if self.timer_s is None:
            return []
        self.now = max(self.now, self.timer_s)
        self.timer_s = None
        return self.send(ev.TimerFired())

    def go_on(self, seconds: float = 0.1, loads: Collection[str] = (), stuck: Collection[str] = ()) -> None:
        """Whoever can run does. Those that load their model give up a lease they get; those that are stuck nothing."""
        self.answer_all()
        for job_id in self.running():
            place = self.places[job_id]
            if place.holds_lease and not place.stalled and job_id not in stuck:
                (self.idle if job_id in loads else self.iterate)(job_id)
        self.now += seconds
        if self.timer_s is not None and self.timer_s <= self.now:
            self.fire_timer()

    # Looking

    def heir_of(self, job_id: str) -> str | None:
        """Who runs at once when this lease holder stops."""
        place = self.places[job_id]
        if not place.holds_lease:
            return None
        return next((other for other, p in self.places.items() if p.promised and p.lane == place.lane), None)

    def running(self) -> list[str]:
        return sorted(job_id for job_id, place in self.places.items() if place.holds_lease)

    def lane_of(self, job_id: str) -> int | None:
        return self.places[job_id].lane

    def drain(self, *, idle_to_the_end: bool = False, rounds: int = 3000) -> None:
        """Runs everybody to the end; fails if somebody never gets there.

        With `idle_to_the_end`, idle and paused jobs stay so until all the others are through: they must not be in the
        way.
        """
        left = dict.fromkeys(self.places, 2)
        for number in range(rounds):
            announced = number % 3 == 0
            self.answer_all()
            idle = [
                job_id
                for job_id, place in self.places.items()
                if not self.scheduler.jobs[job_id].ready
                and not place.holds_lease
                and (place.paused or not place.stalled)
            ]
            if not idle_to_the_end or len(idle) == len(self.places):
                for job_id in idle:
                    self.send(ev.JobReady(job_id))
                for job_id in [job_id for job_id, place in self.places.items() if place.paused]:
                    self.resume(job_id)
            for job_id in self.running():
                place = self.places[job_id]
                if place.stalled or not place.holds_lease:
                    continue
                if announced:
                    self.announce(job_id)
                self.iterate(job_id)
                left[job_id] -= 1
                if left[job_id] <= 0:
                    self.leave(job_id)
            if not self.places:
                self.answer_all()
                assert not self.lanes, "all jobs are gone and a lane is still there"
                assert self.scheduler.free_bytes == self.config.capacity_bytes
                return
            self.now += 0.5
            if self.timer_s is not None and self.timer_s <= self.now:
                self.fire_timer()
        stories = {job_id: list(self.scheduler.jobs[job_id].story) for job_id in self.places}
        raise AssertionError(f"these never finished: {stories}")

    # Orders

    def _boundary(self, job_id: str, gpu_time_s: float, iterations: int) -> list[act.Action]:
        place = self.places[job_id]
        heir = self.heir_of(job_id) if place.revoked else None
        yielded = place.revoked
        if yielded:
            place.holds_lease = place.revoked = False
        return self._expect_heir(heir, self.send(ev.IterationFinished(job_id, gpu_time_s, iterations, yielded=yielded)))

    def _expect_heir(self, heir: str | None, actions: list[act.Action]) -> list[act.Action]:
        """A promise is kept at once: the heir runs already."""
        granted = [action.job_id for action in actions if isinstance(action, act.GrantLease)]
        assert heir is None or heir in granted, f"{heir} was promised the lease, and {granted} got it"
        return actions

    def _obey(self, action: act.Action) -> None:
        match action:
            case act.RefuseJob(job_id):
                assert not self.places[job_id].on_gpu
                del self.places[job_id]
            case act.OpenLane(lane_id, size_bytes, owner):
                assert lane_id not in self.lanes, "a lane was opened twice"
                self.lanes[lane_id] = self.sizes[lane_id] = size_bytes
                self.owners[lane_id] = owner
            case act.ResizeLane(lane_id, size_bytes):
                if size_bytes < self.sizes[lane_id]:
                    self.answers.append(ev.LaneReleased(lane_id, size_bytes))
                self.sizes[lane_id] = size_bytes
                self.lanes[lane_id] = max(self.lanes[lane_id], size_bytes)
            case act.CloseLane(lane_id):
                inside = [job_id for job_id, place in self.places.items() if place.lane == lane_id]
                assert not inside, f"lane {lane_id} was closed with {inside} in it"
                del self.sizes[lane_id]
                self.answers.append(ev.LaneReleased(lane_id))
            case act.AdmitJob(job_id, lane_id, needs):
                place = self.places[job_id]
                assert place.lane is None and lane_id in self.sizes and not place.paused
                assert needs.ephemeral_bytes <= self.sizes[lane_id]
                place.lane, place.footprint, place.on_gpu, place.started = lane_id, needs, True, True
                place.context_bytes = 0
            case act.AllowContext(job_id):
                place = self.places[job_id]
                assert not place.started and not place.context_bytes and not place.paused
                place.context_bytes = self.scheduler.jobs[job_id].footprint.internal_bytes
            case act.LeaveLane(job_id, lane_id):
                place = self.places[job_id]
                assert place.lane == lane_id and not place.holds_lease, "a running job was taken out of its lane"
                assert not place.promised, "a job that may run was taken out of its lane"
                place.lane = None
            case act.GrantLease(job_id, lane_id):
                place = self.places[job_id]
                others = [other for other in self.places.values() if other.lane == lane_id and other.holds_lease]
                assert place.lane == lane_id and not others, "two leases in one lane"
                assert place.on_gpu and not place.stalled
                # What was promised is kept.
                assert self.scheduler.jobs[job_id].ready or place.promised, "a lease for a job that is not ready"
                assert not place.paused or place.promised, "a lease for a job that is paused"
                heirs = [other for other, p in self.places.items() if p.lane == lane_id and p.promised]
                assert heirs in ([], [job_id]), f"{heirs} may run already"
                place.holds_lease, place.promised = True, False
            case act.PromiseLease(job_id, lane_id, after):
                place, before = self.places[job_id], self.places[after]
                assert before.holds_lease and before.lane == place.lane == lane_id and not before.stalled
                assert place.on_gpu and not place.holds_lease and not place.stalled
                assert not any(p.promised for p in self.places.values() if p.lane == lane_id), "two heirs in one lane"
                assert self.scheduler.jobs[job_id].ready and not place.paused
                place.promised = True
            case act.WithdrawPromise(job_id, _):
                if job_id in self.places:
                    assert self.places[job_id].promised
                    self.places[job_id].promised = False
            case act.RevokeLease(job_id):
                place = self.places[job_id]
                assert place.holds_lease and not place.revoked, "revoked what was not held"
                place.revoked = True
            case act.AllowGrowth(job_id, needs):
                place = self.places[job_id]
                place.footprint, place.stalled = needs, False
            case act.RefuseGrowth(job_id):
                self.places[job_id].stalled = False
            case act.PageOut(job_id, with_lane):
                place = self.places[job_id]
                assert with_lane == place.holds_lease, "only a stalled job is paged out while it holds a lease"
                assert not place.promised, "a job that may run was paged out"
                assert not with_lane or place.stalled
                self.answers.append(ev.PageOutFinished(job_id))
            case act.PageIn(job_id):
                self.answers.append(ev.PageInFinished(job_id))
            case act.SetTimer(at_s):
                assert at_s > self.now, "a timer in the past would fire for ever"
                self.timer_s = at_s

    def _check_memory(self) -> None:
        used = sum(self.lanes.values())
        for place in self.places.values():
            if place.on_gpu:
                used += place.footprint.fixed_bytes
            elif place.started:
                used += place.footprint.internal_bytes
            used += place.context_bytes
        assert used <= self.config.capacity_bytes, f"{used} bytes on a GPU of {self.config.capacity_bytes}"
        for lane_id, size in self.sizes.items():
            needs = [p.footprint.ephemeral_bytes for p in self.places.values() if p.lane == lane_id]
            assert not needs or max(needs) <= size, f"lane {lane_id} is smaller than a job in it needs"

    def _check_agreement(self) -> None:
        for job_id, job in self.scheduler.jobs.items():
            place = self.places[job_id]
            assert place.holds_lease == job.holds, job_id
            assert place.promised == (job.lease is Lease.PROMISED), job_id
            assert not place.holds_lease or job.asks, f"{job_id} holds a lease and is not ready"
            assert place.lane == job.lane, job_id
            assert place.paused == job.paused, job_id
            if job.lane is not None and not self.share_between_users:
                assert self.owners[job.lane] == job.spec.owner, f"{job_id} is in a lane of another user"
