"""The state of one scheduler, and the few things every part of it does to that state.

`memory` decides who is on the GPU, `leases` who runs there; both work on this. It has no opinions of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from salus.core.actions import Action
from salus.core.lanes import LaneTable
from salus.core.model import GpuConfig, Job, JobId, LaneId, Phase
from salus.core.order import OrderedJobs
from salus.core.policies.base import Moment, Policy


@dataclass(slots=True)
class LaneLeases:
    """Who runs in a lane, and who wants to."""

    ready: OrderedJobs = field(default_factory=OrderedJobs)
    """Jobs that could run at once, the holder among them, in the policy's lease order."""
    holder: Job | None = None
    heir: Job | None = None
    """To whom the lease was promised."""
    newcomers: dict[JobId, float] = field(default_factory=dict)
    """Those of the ready that have come, for the first time or after a pause, and have had no lease since; and when."""
    joined_at: float = float("-inf")
    """When a job last came to the lane."""
    had_s: dict[JobId, float] = field(default_factory=dict)
    """How long each of its jobs has run since then."""


class State:
    def __init__(self, config: GpuConfig, policy: Policy) -> None:
        self.config = config
        self.policy = policy
        self.now = float("-inf")
        self.jobs: dict[JobId, Job] = {}
        self.arrivals = 0
        self.lanes = LaneTable(config.capacity_bytes, share_between_users=config.share_lanes_between_users)
        self.leases: dict[LaneId, LaneLeases] = {}
        self.running = 0
        """Lanes in which a job holds the lease."""
        self.stuck = 0
        """Those of them in which it does nothing with it."""
        self.waiting = OrderedJobs()
        """Jobs that wait for memory, in the policy's memory order."""
        self.returning = OrderedJobs()
        """Those of them that hold memory on the GPU already: parked or paged out."""
        self.on_gpu: dict[JobId, Job] = {}
        """Jobs with persistent memory on the GPU, wholly or in part."""
        self.at_the_door: dict[JobId, Job] = {}
        """Waiting jobs whose processes wait to make their contexts."""
        self.growing: list[Job] = []
        """Stalled jobs; the first is the one that may grow, the others wait for their turn."""
        self.grows_first: Job | None = None
        """The one that others were displaced for in the middle of its iteration: it comes before them until its end."""
        self.grows_first_until = float("-inf")
        self.room_for: Job | None = None
        """The waiting job that others were displaced for last, until it has its memory."""
        self.vacating: set[JobId] = set()
        """Lease holders that are to give up their lease at the next boundary, to make room or to let another grow."""
        self.told: set[JobId] = set()
        """Those of them that are to make room. The policy's order changes while they run to their boundaries, and they
        stay the ones to make it."""
        self.told_before: set[JobId] = set()
        """Those that were, at the last decision."""
        self.coming: tuple[int, float] = (0, self.now)
        """How much is about to be free, and since when it is that much."""
        self.host_used_bytes = 0
        self.recovering = False
        """Jobs from before a restart are still coming back."""
        self.timer_at: float | None = None
        self.timer_due: float | None = None
        self.actions: list[Action] = []

    @property
    def moment(self) -> Moment:
        return Moment(self.now, self.config.quantum_s)

    @property
    def paging_allowed(self) -> bool:
        return self.config.host_bytes != 0

    def host_has_room(self, size_bytes: int) -> bool:
        return self.config.host_bytes is None or self.host_used_bytes + size_bytes <= self.config.host_bytes

    def emit(self, action: Action, job: Job | None = None) -> None:
        self._emit_lane_actions()
        self.actions.append(action)
        if job is not None:
            self.tell(job, f"-> {type(action).__name__}")

    def take_actions(self) -> list[Action]:
        self._emit_lane_actions()
        actions, self.actions = self.actions, []
        return actions

    def tell(self, job: Job, what: str) -> None:
        """Adds a line to the job's story."""
        job.story.append(f"{self.now:.6f} {what}")

    def enter_phase(self, job: Job, phase: Phase) -> None:
        job.phase = phase
        job.since = self.now

    def wake_at(self, at_s: float) -> None:
        if self.timer_due is None or at_s < self.timer_due:
            self.timer_due = at_s

    def _emit_lane_actions(self) -> None:
        if self.lanes.out:
            self.actions.extend(self.lanes.out)
            self.lanes.out.clear()
