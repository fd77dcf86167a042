"""What the scheduler knows of the world: footprints, jobs, the settings of one GPU.

Everything here is plain data. `Job` is changed by the scheduler alone; a policy reads it.
Sizes are whole bytes, times are seconds on whatever clock the caller of `Scheduler.handle` uses.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

JobId = str
LaneId = int


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory a job needs on the GPU."""

    persistent_bytes: int
    """Lives across iterations: parameters, optimizer state. Can be paged to the host."""
    ephemeral_bytes: int
    """Lives within an iteration: activations, gradients, workspaces. Comes out of a lane."""
    internal_bytes: int = 0
    """Outside any allocator: the CUDA context, library code. Stays as long as the process does."""

    def __post_init__(self) -> None:
        if min(self.persistent_bytes, self.ephemeral_bytes, self.internal_bytes) < 0:
            raise ValueError(f"a footprint has a negative part: {self}")

    @property
    def fixed_bytes(self) -> int:
        """What the job occupies outside of any lane while it is resident."""
        return self.persistent_bytes + self.internal_bytes

    @property
    def total_bytes(self) -> int:
        """What the job needs to run alone."""
        return self.persistent_bytes + self.ephemeral_bytes + self.internal_bytes

    def covers(self, other: Footprint) -> bool:
        return (
            self.persistent_bytes >= other.persistent_bytes
            and self.ephemeral_bytes >= other.ephemeral_bytes
            and self.internal_bytes >= other.internal_bytes
        )

    def enclosing(self, other: Footprint) -> Footprint:
        """What serves both: the larger of each kind."""
        return Footprint(
            max(self.persistent_bytes, other.persistent_bytes),
            max(self.ephemeral_bytes, other.ephemeral_bytes),
            max(self.internal_bytes, other.internal_bytes),
        )

    def common(self, other: Footprint) -> Footprint:
        """The part that both have: the smaller of each kind."""
        return Footprint(
            min(self.persistent_bytes, other.persistent_bytes),
            min(self.ephemeral_bytes, other.ephemeral_bytes),
            min(self.internal_bytes, other.internal_bytes),
        )


LIGHTEST, HEAVIEST = 1e-3, 1e3
"""Weights."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job as it was asked for. What is not known is None, never a guess."""

    job_id: JobId
    footprint: Footprint
    """What is reserved for the job when it is admitted."""
    footprint_known: bool = True
    """Declared or seen before, rather than a first reservation to grow from."""
    owner: int = 0
    """The uid the job belongs to. Lanes are shared within an owner unless told otherwise."""
    owner_weight: float = 1.0
    """How much the owner gets where users share: 2 is twice as much as 1. The same for all jobs of an owner."""
    priority: int = 0
    """Larger is more urgent."""
    weight: float = 1.0
    length_s: float | None = None
    """GPU time of the whole job when it runs alone."""
    iterations: int | None = None
    utilization: float | None = None
    """The part of the GPU the job keeps busy when it runs alone, 0 to 1."""

    def __post_init__(self) -> None:
        for what, weight in (("weight", self.weight), ("weight of its owner", self.owner_weight)):
            if not LIGHTEST <= weight <= HEAVIEST:
                # Beyond, what one job got would drown in the rounding of what another did.
                raise ValueError(
                    f"job {self.job_id}: {what} is {weight}, it must be a number from {LIGHTEST:g} to {HEAVIEST:g}"
                )
        if self.length_s is not None and not 0 <= self.length_s < float("inf"):
            raise ValueError(f"job {self.job_id}: length is {self.length_s} s, it must be a number, 0 or more")
        if self.iterations is not None and self.iterations < 0:
            raise ValueError(f"job {self.job_id}: {self.iterations} iterations, there cannot be less than 0")
        if self.utilization is not None and not 0 <= self.utilization <= 1:
            raise ValueError(f"job {self.job_id}: utilization {self.utilization} is not in 0 to 1")


class Phase(Enum):
    """Where a job's memory is."""

    WAITING = "waiting"
    """Accepted; nothing on the GPU yet."""
    PARKED = "parked"
    """Its persistent memory is on the GPU, but it has no lane."""
    RESIDENT = "resident"
    """In a lane: it can run."""
    PAGING_OUT = "paging-out"
    PAGED_OUT = "paged-out"
    """Its persistent memory is on the host; only internal memory is left on the GPU."""
    PAGING_IN = "paging-in"
    """In a lane, its persistent memory on the way back."""


QUEUED_PHASES = frozenset({Phase.WAITING, Phase.PARKED, Phase.PAGED_OUT})
"""Phases in which a job waits for memory."""
LANE_PHASES = frozenset({Phase.RESIDENT, Phase.PAGING_IN})


class Lease(Enum):
    NONE = "none"
    PROMISED = "promised"
    """The job runs as soon as the one before it in its lane stops, perhaps before the scheduler hears of it."""
    HELD = "held"
    REVOKED = "revoked"
    """To be given up at the next boundary; until then the job still runs."""


class Stuck(Enum):
    """Why nobody counts on a job that holds a lease."""

    SILENT = "silent"
    """It has passed no boundary for long."""
    STOPPED = "stopped"
    """Its process is stopped, as by Ctrl-Z."""


BEGINS_S = 10.0
"""So long a job that has its memory may take to begin: it loads its model, say, and its data. Meanwhile it need not
give that memory up, and others are kept on the GPU that can compute. What is urgent does not wait for that."""
FADES = 0.8
"""What an iteration counts for when another one has ended, in how long one takes."""
STORY_LENGTH = 32


@dataclass(slots=True, eq=False)
class Job:
    """A job and what has become of it. Policies read it; only the scheduler writes."""

    spec: JobSpec
    arrival: int
    """1 for the first job of this GPU, 2 for the second; breaks every tie."""
    arrived_at: float

    footprint: Footprint
    """The reservation. Growth and measurement change it, the spec keeps what was asked for."""
    footprint_known: bool
    utilization: float | None

    phase: Phase = Phase.WAITING
    lane: LaneId | None = None
    lease: Lease = Lease.NONE
    asks: bool = False
    """Its process wants to run an iteration now."""
    paused: bool = False
    """A person stopped it. Until it is resumed it counts as idle, whatever its process asks for."""

    since: float = 0.0
    """When the present phase began."""
    on_gpu_since: float = 0.0
    """When its persistent memory came to the GPU. Changing lanes does not change it."""
    idle_since: float = 0.0
    granted_at: float = 0.0
    ran_at: float = 0.0
    """When it was last known to run: at a grant or a report."""
    blocked_at: int = -1
    """The count of freed memory (`LaneTable.freed`) at which no place was found for the job."""
    no_room_at: tuple[int, int] = (-1, -1)
    """What the GPU was like (memory freed, jobs on it) when no room could be made for the job, at `no_room_since`."""
    no_room_since: float = float("-inf")
    overtaken: int = 0
    """How many jobs that came later in the order got memory while this one waited."""

    context_bytes: int = 0
    """While it waits for its first memory: what its process has on the GPU already."""
    wanted: Footprint | None = None
    """A larger footprint that was asked for and not granted yet. Until it is, the job gets no new lease."""
    stalled: bool = False
    """Blocked in an allocation, in the middle of an iteration, until it has what it wants."""
    stuck: Stuck | None = None
    """It holds a lease, and nobody counts on it: why."""
    mid_iteration: bool = False
    """Paged out while stalled in an allocation: its part of the lane is on the host too."""

    stays_until: float = float("-inf")
    """It could not be paged out, and is not tried again before."""
    kept_since: float = float("-inf")
    """When, this time on the GPU, it was first kept there while a newcomer loads."""
    host_bytes: int = 0
    """Host memory that holds what was paged out."""

    iterations_done: int = 0
    attained_s: float = 0.0
    """GPU time used so far: of a time in which several ran, each in a lane of its own, an equal part."""
    ran_s: float = 0.0
    """For how long it ran, whoever did beside it."""
    iteration_s: float = 0.0
    """How long an iteration takes, lately; in the first one, what it has taken up to now."""
    uncounted_s: float = 0.0
    """How long it ran since iterations were last counted."""

    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    @property
    def job_id(self) -> JobId:
        return self.spec.job_id

    @property
    def ready(self) -> bool:
        """Would run an iteration now."""
        return self.asks and not self.paused

    @property
    def competing(self) -> bool:
        """Could run an iteration at once if it were given a lease."""
        return self.ready and self.phase is Phase.RESIDENT and self.wanted is None

    @property
    def holds(self) -> bool:
        """It runs."""
        return self.lease is Lease.HELD or self.lease is Lease.REVOKED

    def serve(self, ran_s: float, gpu_time_s: float, iterations: int) -> None:
        """It ran for so long since the last time, had that much of the GPU, and ended so many iterations."""
        self.ran_s += ran_s
        self.attained_s += gpu_time_s
        self.uncounted_s += ran_s
        if iterations:
            # The first ones of a script are no measure of the others: what lies back counts less and less.
            old = FADES**iterations if self.iterations_done else 0.0
            self.iteration_s = old * self.iteration_s + (1 - old) * self.uncounted_s / iterations
            self.uncounted_s = 0.0
        elif not self.iterations_done:
            self.iteration_s = self.uncounted_s
        self.iterations_done += iterations

    @property
    def remaining_s(self) -> float | None:
        """GPU time still to go, by what was declared; None where nothing was.

        A job that has outlived its declared length is as good as undeclared.
        """
        total, length = self.spec.iterations, self.spec.length_s
        left: float | None
        if total is not None and length is not None:
            left = length * (1 - self.iterations_done / total) if total else 0.0
        elif total is not None:
            # Of the time that it runs, that part of the GPU's time has been its own so far.
            part = self.attained_s / self.ran_s if self.ran_s else 1.0
            left = (total - self.iterations_done) * self.iteration_s * part if self.iterations_done else None
        elif length is not None:
            left = length - self.attained_s
        else:
            left = None
        return left if left is not None and left >= 0 else None

    def to_admit_bytes(self) -> int:
        """What admission adds to the GPU outside of lanes: nothing that is there already."""
        if self.phase is Phase.PARKED:
            return 0
        if self.phase is Phase.PAGED_OUT:
            return self.footprint.persistent_bytes
        return self.footprint.fixed_bytes - self.context_bytes


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """The settings of one scheduler."""

    capacity_bytes: int
    quantum_s: float = 0.02
    """A lease is not revoked before it has lasted this long; 0 switches at every boundary."""
    host_bytes: int | None = None
    """Host memory for paged-out jobs: None is unlimited, 0 turns paging off."""
    share_lanes_between_users: bool = False
    idle_patience_s: float = 2.0
    """A job that has been idle this long gives its memory up to one that waits."""

    def __post_init__(self) -> None:
        if self.capacity_bytes <= 0:
            raise ValueError(f"capacity is {self.capacity_bytes} bytes, it must be above 0")
        if self.quantum_s < 0:
            raise ValueError(f"quantum is {self.quantum_s} s, it cannot be negative")
