"""What a scheduler orders. The caller carries actions out in the order they come."""

from __future__ import annotations

from dataclasses import dataclass

from salus.core.model import Footprint, JobId, LaneId


@dataclass(frozen=True, slots=True)
class AcceptJob:
    """The job could run alone on this GPU: it will run, and at worst waits."""

    job_id: JobId


@dataclass(frozen=True, slots=True)
class RefuseJob:
    """The job could never run on this GPU; `reason` has the numbers. It is forgotten."""

    job_id: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class OpenLane:
    lane_id: LaneId
    size_bytes: int
    owner: int


@dataclass(frozen=True, slots=True)
class ResizeLane:
    """A larger size may be used at once. A smaller one is answered with `LaneReleased` when the memory is free."""

    lane_id: LaneId
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CloseLane:
    """Nobody is in the lane. Answered with `LaneReleased`."""

    lane_id: LaneId


@dataclass(frozen=True, slots=True)
class AdmitJob:
    """The job has memory: what it reserved, and a place in the lane. It may not run yet."""

    job_id: JobId
    lane_id: LaneId
    footprint: Footprint


@dataclass(frozen=True, slots=True)
class AllowContext:
    """The answer to `ContextWanted`, unless the job is admitted first: its process may make its context."""

    job_id: JobId


@dataclass(frozen=True, slots=True)
class LeaveLane:
    """The job gives the lane up; its persistent memory stays. It gets a lane again by `AdmitJob`."""

    job_id: JobId
    lane_id: LaneId


@dataclass(frozen=True, slots=True)
class GrantLease:
    """The job may run iterations. One that was paged out in mid-iteration first takes its part of the lane back."""

    job_id: JobId
    lane_id: LaneId


@dataclass(frozen=True, slots=True)
class PromiseLease:
    """The lease of the lane is the job's when `after` gives it up. It is granted (`GrantLease`) when that is heard of.

    From now on the job counts as one that runs: it keeps its lane and its memory.
    """

    job_id: JobId
    lane_id: LaneId
    after: JobId


@dataclass(frozen=True, slots=True)
class WithdrawPromise:
    """The job cannot have what it was promised: it is gone or idle, or the holder waits for memory and yields later."""

    job_id: JobId
    lane_id: LaneId


@dataclass(frozen=True, slots=True)
class RevokeLease:
    """The job is to stop at its next boundary."""

    job_id: JobId


@dataclass(frozen=True, slots=True)
class AllowGrowth:
    """The job's reservation is now this footprint."""

    job_id: JobId
    footprint: Footprint


@dataclass(frozen=True, slots=True)
class RefuseGrowth:
    """The larger footprint cannot be had; the job's allocation fails as the framework's out-of-memory error."""

    job_id: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class PageOut:
    """Move the job's persistent memory to the host; answered with `PageOutFinished` or `PageOutFailed`.

    `with_lane`: the job is stalled in mid-iteration, so what it has in the lane is moved as well.
    """

    job_id: JobId
    with_lane: bool = False


@dataclass(frozen=True, slots=True)
class PageIn:
    """Bring the job's persistent memory back; answered with `PageInFinished`."""

    job_id: JobId


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Deliver `TimerFired` at `at_s`. There is one timer; the newest order counts."""

    at_s: float


Action = (
    AcceptJob
    | RefuseJob
    | OpenLane
    | ResizeLane
    | CloseLane
    | AdmitJob
    | AllowContext
    | LeaveLane
    | GrantLease
    | PromiseLease
    | WithdrawPromise
    | RevokeLease
    | AllowGrowth
    | RefuseGrowth
    | PageOut
    | PageIn
    | SetTimer
)
