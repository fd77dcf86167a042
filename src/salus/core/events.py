"""What can happen to a scheduler. Each is a fact, named in the past tense.

The caller delivers events in the order of time. Two duties of the caller keep the accounts honest:
- before an event that can change who runs, it reports with `IterationFinished` what each lease holder used since its
  last report (the counters are at hand, on a shared page; a report in passing decides nothing and costs little);
- memory counts as free only when the caller says so (`PageOutFinished`, `LaneReleased`, `JobLeft`).
"""

from __future__ import annotations

from dataclasses import dataclass

from salus.core.model import Footprint, JobId, JobSpec, LaneId
from salus.core.policies.base import Policy


@dataclass(frozen=True, slots=True)
class JobArrived:
    job: JobSpec
    paused: bool = False
    """It was paused before a restart of the caller."""


@dataclass(frozen=True, slots=True)
class JobReturned:
    """After a restart of the caller: the job was here before, and this is where it is now."""

    job: JobSpec
    footprint: Footprint
    """What it has; nothing: it waits for its first memory."""
    lane_id: LaneId | None = None
    """The lane it was in."""
    on_host: bool = False
    """Its persistent memory is paged out."""
    mid_iteration: bool = False
    """And it was paged out in mid-iteration."""
    holds: bool = False
    """It holds a lease, and may be in the middle of an iteration."""
    ready: bool = False
    iterations: int = 0
    ran_s: float = 0.0
    """For how long it ran."""
    gpu_time_s: float = 0.0
    """And how much of the GPU's time was its own."""
    paused: bool = False


@dataclass(frozen=True, slots=True)
class RecoveryBegan:
    """The caller was restarted. Until `RecoveryFinished` nobody gets memory or a lease: not all that is in use is known
    yet."""


@dataclass(frozen=True, slots=True)
class RecoveryFinished:
    pass


@dataclass(frozen=True, slots=True)
class JobReady:
    """The job wants to use the device from now on: to run iterations, or to have its memory back."""

    job_id: JobId


@dataclass(frozen=True, slots=True)
class JobIdled:
    """The job is between iterations and wants nothing; a lease it held is over."""

    job_id: JobId


@dataclass(frozen=True, slots=True)
class IterationFinished:
    """A lease holder's use of the GPU since its last report."""

    job_id: JobId
    gpu_time_s: float
    """For which it ran, whoever ran beside it in other lanes; the scheduler knows who did."""
    iterations: int = 1
    """0 when the job is in the middle of a long one and this is the time it took so far."""
    yielded: bool = False
    """The job stopped at this boundary and gave its lease up; nothing of it lives in the lane."""


@dataclass(frozen=True, slots=True)
class JobYielding:
    """A lease holder is about to give its lease up at a boundary, and does not run before it has.

    So the next one can be told (`PromiseLease`) before the device is free, and the two settle it between them.
    """

    job_id: JobId


@dataclass(frozen=True, slots=True)
class PromiseRefused:
    """The job could not be told that it is next. It waits like any other."""

    job_id: JobId


@dataclass(frozen=True, slots=True)
class FootprintChanged:
    """The job's footprint was measured. A larger one takes effect once there is room (`AllowGrowth`)."""

    job_id: JobId
    footprint: Footprint


@dataclass(frozen=True, slots=True)
class UtilizationMeasured:
    job_id: JobId
    utilization: float


@dataclass(frozen=True, slots=True)
class MemoryWanted:
    """A lease holder is stalled in an allocation until its footprint may be this large."""

    job_id: JobId
    footprint: Footprint


@dataclass(frozen=True, slots=True)
class JobStuck:
    """A lease holder has passed no boundary for long; or, with `stuck` false, it has at last."""

    job_id: JobId
    stuck: bool = True
    stopped: bool = False
    """Its process is stopped; or, with `stuck` false, it goes on."""


@dataclass(frozen=True, slots=True)
class JobChanged:
    """From now on the job has this weight and this priority."""

    job_id: JobId
    weight: float
    priority: int


@dataclass(frozen=True, slots=True)
class JobPaused:
    """A person paused the job. A lease it holds ends at its next boundary, and it gets none until `JobResumed`.

    Meanwhile the job counts as idle: others may have its memory.
    """

    job_id: JobId


@dataclass(frozen=True, slots=True)
class JobResumed:
    job_id: JobId


@dataclass(frozen=True, slots=True)
class JobLeft:
    """The job ended or died, and its own memory is gone from the GPU."""

    job_id: JobId


@dataclass(frozen=True, slots=True)
class PageOutFinished:
    job_id: JobId


@dataclass(frozen=True, slots=True)
class PageOutFailed:
    """The job could not be moved to the host; everything is where it was."""

    job_id: JobId


@dataclass(frozen=True, slots=True)
class PageInFinished:
    job_id: JobId


@dataclass(frozen=True, slots=True)
class LaneReleased:
    """The memory that a lane gave up (`CloseLane`, or `ResizeLane` to less) is free: it occupies `size_bytes` now."""

    lane_id: LaneId
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ContextWanted:
    """The process of a job that waits for its first memory is about to make its context on the GPU, or is gone.

    Its context takes what the job has as internal bytes. Of a job that has memory nothing need be said: it may.
    """

    job_id: JobId
    wanted: bool = True


@dataclass(frozen=True, slots=True)
class OutsideMemoryChanged:
    """Others, who are none of ours, use this much of the GPU's memory now. It is not there to be given out."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class TimerFired:
    pass


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    policy: Policy


Event = (
    JobArrived
    | JobReturned
    | RecoveryBegan
    | RecoveryFinished
    | JobReady
    | JobIdled
    | IterationFinished
    | PromiseRefused
    | JobYielding
    | FootprintChanged
    | UtilizationMeasured
    | MemoryWanted
    | JobStuck
    | JobChanged
    | JobPaused
    | JobResumed
    | JobLeft
    | PageOutFinished
    | PageOutFailed
    | PageInFinished
    | LaneReleased
    | ContextWanted
    | OutsideMemoryChanged
    | TimerFired
    | PolicyChanged
)
