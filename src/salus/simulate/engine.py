"""The simulated world: a clock, GPUs that run iterations, and jobs that follow the scheduler's orders.

The scheduler is the real one; only the hardware is made up. The model:
- A job alone needs `iteration_s` for an iteration. Jobs in parallel lanes slow each other down by the same factor once
  their utilizations add up to more than the whole GPU: two jobs of 0.8 run 1.6 times slower. Together they get
  `side_by_side` of that done: less than 1 where a GPU loses time between processes, more where they fill each other's
  gaps better than their utilizations say.
- A revoked job runs on to the end of its iteration, and runs at least one in each lease.
- A lease that goes to another job than the last in that lane starts with `switch_s`; paging takes its bytes over
  `page_bytes_per_s`. Lanes open, close and change size in no time.

Nothing is stepped: between two decisions every running job's progress is a straight line. Each GPU has a progress clock
that runs slower than time by the common factor, so that a job's next boundary is a fixed point on it whatever the
other lanes do; only the next such point of each GPU has to be looked at.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from salus.core import actions as act
from salus.core import events as ev
from salus.core.model import GpuConfig, JobId, LaneId
from salus.core.placement import Cluster, Placed
from salus.core.policies import Policy
from salus.core.scheduler import Scheduler
from salus.errors import InvariantBroken
from salus.simulate.trace import TraceJob

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Hardware:
    """The made-up machine."""

    gpus: int
    memory_bytes: int
    host_bytes: int | None = None
    quantum_s: float = 1.0
    switch_s: float = 0.0001
    page_bytes_per_s: float = 12e9
    side_by_side: float = 1.0


@dataclass(slots=True)
class JobRecord:
    """What became of a job."""

    job: TraceJob
    gpu: int = -1
    started_s: float = math.nan
    finished_s: float = math.nan
    leases: int = 0
    paged_out: int = 0

    @property
    def jct_s(self) -> float:
        return self.finished_s - self.job.submit_s

    @property
    def queuing_s(self) -> float:
        """From submission to the first iteration."""
        return self.started_s - self.job.submit_s


@dataclass(frozen=True, slots=True)
class Segment:
    """A job held the lease of a lane."""

    job_id: JobId
    gpu: int
    lane: LaneId
    start_s: float
    end_s: float


@dataclass(slots=True)
class Outcome:
    """A whole simulated history."""

    policy: str
    hardware: Hardware
    records: list[JobRecord]
    busy_s: float = 0.0
    """GPU time kept busy, over all GPUs."""
    segments: list[Segment] = field(default_factory=list)


@dataclass(slots=True)
class _Run:
    """A job that holds a lease."""

    record: JobRecord
    lane: LaneId
    granted_s: float
    begins_at: float
    """On the GPU's progress clock."""
    first: int
    """Iterations done before this lease."""
    stop_at_iteration: int
    reported: int
    reported_s: float

    def point(self) -> float:
        """Where on the progress clock the run stops."""
        return self.begins_at + (self.stop_at_iteration - self.first) * self.record.job.iteration_s

    def iterations_at(self, progress: float) -> int:
        done = math.floor((progress - self.begins_at) / self.record.job.iteration_s + ROUNDING)
        return min(self.stop_at_iteration, self.first + max(0, done))


class _Gpu:
    """One GPU: its progress clock, the jobs that run, what is under way."""

    def __init__(self, index: int, side_by_side: float = 1.0) -> None:
        self.index = index
        self.now = 0.0
        self.progress = 0.0
        self.load = 0.0
        self.slower = 1.0
        """By this factor, than alone."""
        self._side_by_side = side_by_side
        self.busy_s = 0.0
        self.runs: dict[JobId, _Run] = {}
        self.last_in_lane: dict[LaneId, JobId] = {}
        self.timer_s: float | None = None
        self.paging: list[tuple[float, int, ev.Event]] = []
        self.version = 0

    def advance(self, now: float) -> None:
        elapsed = now - self.now
        if elapsed > 0:
            self.progress += elapsed / self.slower
            self.busy_s += elapsed * min(1.0, self.load)
            self.now = now

    def set_load(self) -> None:
        # Added up anew each time: a running sum would drift.
        self.load = sum(_load(run.record.job) for run in self.runs.values())
        self.slower = max(1.0, self.load / (self._side_by_side if len(self.runs) > 1 else 1.0))

    def next_s(self) -> float:
        """When the next thing happens here."""
        soonest = math.inf if self.timer_s is None else self.timer_s
        if self.paging:
            soonest = min(soonest, self.paging[0][0])
        if self.runs:
            point = min(run.point() for run in self.runs.values())
            soonest = min(soonest, self.now + max(0.0, point - self.progress) * self.slower)
        return soonest


class Simulation:
    """One trace under one policy. `on_event` is called after every event, for checks; `on_finish` after every job."""

    def __init__(
        self,
        jobs: Sequence[TraceJob],
        policy: Callable[[], Policy],
        hardware: Hardware,
        *,
        keep_segments: bool = False,
        on_finish: Callable[[int], None] | None = None,
        on_event: Callable[[Scheduler], None] | None = None,
    ) -> None:
        config = GpuConfig(
            capacity_bytes=hardware.memory_bytes, quantum_s=hardware.quantum_s, host_bytes=hardware.host_bytes
        )
        self._cluster = Cluster([Scheduler(config, policy()) for _ in range(hardware.gpus)])
        self._gpus = [_Gpu(index, hardware.side_by_side) for index in range(hardware.gpus)]
        self._hardware = hardware
        self._records = {job.job_id: JobRecord(job) for job in jobs}
        self._done: dict[JobId, int] = dict.fromkeys(self._records, 0)
        self._arrivals = sorted(jobs, key=lambda job: job.submit_s)
        self._outcome = Outcome(str(policy()), hardware, list(self._records.values()))
        self._keep_segments = keep_segments
        self._on_finish, self._on_event = on_finish, on_event
        self._finished = 0
        self._sequence = 0
        self._agenda: list[tuple[float, int, int]] = []
        """(time, GPU, version of that GPU when this was its next event)"""
        self._touched: set[int] = set()

    def run(self) -> Outcome:
        arrivals = deque(self._arrivals)
        while arrivals or self._agenda:
            if arrivals and (not self._agenda or arrivals[0].submit_s <= self._agenda[0][0]):
                self._arrive(arrivals.popleft())
            else:
                now, index, version = heapq.heappop(self._agenda)
                gpu = self._gpus[index]
                if version == gpu.version:
                    self._happen(gpu, now)
            self._plan()
        if self._finished < len(self._records):
            left = sum(math.isnan(record.finished_s) for record in self._records.values())
            raise InvariantBroken(f"policy {self._outcome.policy}: {left} accepted jobs never finished")
        self._outcome.busy_s = sum(gpu.busy_s for gpu in self._gpus)
        return self._outcome

    # What happens

    def _arrive(self, job: TraceJob) -> None:
        now = job.submit_s
        self._obey(self._cluster.arrive(job.spec(), now), now)
        gpu = self._gpus[self._cluster.gpu_of(job.job_id)]
        gpu.advance(now)
        self._deliver(ev.JobReady(job.job_id), gpu)

    def _happen(self, gpu: _Gpu, now: float) -> None:
        """Everything that is due on this GPU."""
        gpu.advance(now)
        self._touched.add(gpu.index)
        due = gpu.progress + ROUNDING * max(1.0, gpu.progress)
        for run in [run for run in gpu.runs.values() if run.point() <= due]:
            self._stop(gpu, run)
        while gpu.paging and gpu.paging[0][0] <= now:
            self._deliver(heapq.heappop(gpu.paging)[2], gpu)
        if gpu.timer_s is not None and gpu.timer_s <= now:
            gpu.timer_s = None
            self._deliver(ev.TimerFired(), gpu)

    def _stop(self, gpu: _Gpu, run: _Run) -> None:
        """A job reached the boundary at which it stops: it yields, or it is finished."""
        job, now = run.record.job, gpu.now
        del gpu.runs[job.job_id]
        gpu.set_load()
        self._done[job.job_id] = run.stop_at_iteration
        if self._keep_segments:
            self._outcome.segments.append(Segment(job.job_id, gpu.index, run.lane, run.granted_s, now))
        finished = run.stop_at_iteration == job.iterations
        report = ev.IterationFinished(
            job.job_id, now - run.reported_s, run.stop_at_iteration - run.reported, yielded=not finished
        )
        if not finished:
            self._deliver(report, gpu)
            return
        run.record.finished_s = now
        self._finished += 1
        self._deliver(report, gpu)
        self._deliver(ev.JobLeft(job.job_id), gpu)
        if self._on_finish is not None:
            self._on_finish(self._finished)

    def _deliver(self, event: ev.Event, gpu: _Gpu) -> None:
        self._report(gpu)
        self._obey(self._cluster.handle(event, gpu.now, gpu.index), gpu.now)

    def _report(self, gpu: _Gpu) -> None:
        """Tells the scheduler what the running jobs have used, as the live service does from the jobs' counters."""
        for run in gpu.runs.values():
            used = gpu.now - run.reported_s
            if used > 0:
                reached = run.iterations_at(gpu.progress)
                report = ev.IterationFinished(run.record.job.job_id, used, reached - run.reported)
                run.reported, run.reported_s = reached, gpu.now
                self._obey(self._cluster.handle(report, gpu.now, gpu.index), gpu.now)

    # What is ordered

    def _obey(self, orders: list[Placed], now: float) -> None:
        answers: list[tuple[ev.Event, int]] = []
        for placed in orders:
            gpu = self._gpus[placed.gpu]
            gpu.advance(now)
            self._touched.add(placed.gpu)
            match placed.action:
                case act.GrantLease(job_id, lane_id):
                    self._grant(gpu, job_id, lane_id)
                case act.RevokeLease(job_id):
                    run = gpu.runs[job_id]
                    reached = run.first + math.ceil(
                        (gpu.progress - run.begins_at) / run.record.job.iteration_s - ROUNDING
                    )
                    run.stop_at_iteration = min(run.stop_at_iteration, max(reached, run.first + 1))
                case act.SetTimer(at_s):
                    gpu.timer_s = at_s
                case act.CloseLane(lane_id):
                    gpu.last_in_lane.pop(lane_id, None)
                    answers.append((ev.LaneReleased(lane_id), gpu.index))
                case act.ResizeLane(lane_id, size_bytes):
                    answers.append((ev.LaneReleased(lane_id, size_bytes), gpu.index))
                case act.PageOut(job_id):
                    self._records[job_id].paged_out += 1
                    self._page(gpu, job_id, ev.PageOutFinished(job_id))
                case act.PageIn(job_id):
                    self._page(gpu, job_id, ev.PageInFinished(job_id))
                case act.AdmitJob(job_id):
                    self._records[job_id].gpu = placed.gpu
                case act.RefuseJob(job_id, reason):
                    raise InvariantBroken(f"job {job_id} of the trace was refused: {reason}")
        if self._on_event is not None:
            for scheduler in self._cluster.schedulers:
                self._on_event(scheduler)
        # Only now: an answer may bring orders that build on the last of these.
        for answer, index in answers:
            self._obey(self._cluster.handle(answer, now, index), now)

    def _grant(self, gpu: _Gpu, job_id: JobId, lane_id: LaneId) -> None:
        record = self._records[job_id]
        if record.leases == 0:
            record.started_s = gpu.now
        record.leases += 1
        switched = gpu.last_in_lane.get(lane_id, job_id) != job_id
        gpu.last_in_lane[lane_id] = job_id
        gpu.runs[job_id] = _Run(
            record=record,
            lane=lane_id,
            granted_s=gpu.now,
            begins_at=gpu.progress + (self._hardware.switch_s if switched else 0.0),
            first=self._done[job_id],
            stop_at_iteration=record.job.iterations,
            reported=self._done[job_id],
            reported_s=gpu.now,
        )
        gpu.set_load()

    def _page(self, gpu: _Gpu, job_id: JobId, event: ev.Event) -> None:
        size_bytes = self._records[job_id].job.footprint.persistent_bytes
        self._sequence += 1
        at_s = gpu.now + size_bytes / self._hardware.page_bytes_per_s
        heapq.heappush(gpu.paging, (at_s, self._sequence, event))

    def _plan(self) -> None:
        for index in self._touched:
            gpu = self._gpus[index]
            gpu.version += 1
            soonest = gpu.next_s()
            if soonest < math.inf:
                heapq.heappush(self._agenda, (max(soonest, gpu.now), index, gpu.version))
        self._touched.clear()


def _load(job: TraceJob) -> float:
    known = job.utilization if job.load is None else job.load
    return 1.0 if known is None else known
