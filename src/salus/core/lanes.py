"""The memory of one GPU: who occupies how much, and into which lane a job goes.

Lane assignment is Algorithm 1 of the Salus paper, with two repairs: step 2 too must have room for the
job's own memory, and step 3 never shrinks a lane below what its other jobs need.

Memory that is given up is counted until the caller says it is free: a process unmaps a chunk when it
gets to it, not when it is told. So a lane has a size that may be used and the bytes it still holds, and
    fixed bytes of the jobs + bytes held by the lanes <= capacity
is true of the hardware at every moment, not only of the plan.

This module knows sizes and job ids. Leases, policies and time are none of its business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from salus.core.actions import Action, CloseLane, OpenLane, ResizeLane
from salus.core.model import JobId, LaneId


class Step(Enum):
    """The step of Algorithm 1 that found the place."""

    NEW = 1
    JOIN = 2
    GROW = 3


@dataclass(frozen=True, slots=True)
class Place:
    step: Step
    lane_id: LaneId | None
    """None for a new lane."""
    size_bytes: int
    """The size of the lane with the job in it."""


@dataclass(slots=True)
class Lane:
    lane_id: LaneId
    owner: int
    size_bytes: int
    held_bytes: int
    needs: dict[JobId, int] = field(default_factory=dict)
    """Ephemeral bytes of each job in the lane."""
    stuck: bool = False
    """Whoever runs in it does not come to an end: nobody is sent there."""

    def copy(self, held_bytes: int) -> Lane:
        return Lane(self.lane_id, self.owner, self.size_bytes, held_bytes, dict(self.needs), self.stuck)


class LaneTable:
    def __init__(self, capacity_bytes: int, *, share_between_users: bool = False) -> None:
        self.capacity_bytes = capacity_bytes
        self.share_between_users = share_between_users
        self.lanes: dict[LaneId, Lane] = {}
        self.closing: dict[LaneId, int] = {}
        """Bytes that closed lanes still hold."""
        self.fixed_bytes = 0
        """Persistent and internal bytes of all jobs on the GPU."""
        self.leaving_bytes = 0
        """The part of fixed_bytes that is being paged out."""
        self.lane_bytes = 0
        """Bytes held by lanes, open or closing."""
        self.open_bytes = 0
        """The sizes of the open lanes, added up."""
        self.outside_bytes = 0
        """Used by others, who are none of ours. The safety condition is about ours; this is only never given out."""
        self.freed = 0
        """Goes up whenever memory became free: who did not fit before need not be tried again until it does."""
        self.out: list[Action] = []
        """What was done to lanes, for the scheduler to pass on."""
        self._released_at_once = False
        self._next_id: LaneId = 1

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.fixed_bytes - self.lane_bytes - self.outside_bytes

    @property
    def coming_bytes(self) -> int:
        """What will be free once everything under way has finished."""
        return self.leaving_bytes + self.lane_bytes - self.open_bytes

    def find(self, fixed_bytes: int, ephemeral_bytes: int, owner: int, *, spare_bytes: int = 0) -> Place | None:
        """Algorithm 1. `fixed_bytes` is what the job adds outside of lanes; `spare_bytes` counts as free too."""
        free = self.free_bytes + spare_bytes - fixed_bytes
        if free < 0:
            return None
        if ephemeral_bytes <= free:
            return Place(Step.NEW, None, ephemeral_bytes)
        joinable = [
            lane for lane in self.lanes.values() if (self.share_between_users or lane.owner == owner) and not lane.stuck
        ]
        large = [lane for lane in joinable if lane.size_bytes >= ephemeral_bytes]
        if large:
            best = min(large, key=lambda lane: (lane.size_bytes, len(lane.needs), lane.lane_id))
            return Place(Step.JOIN, best.lane_id, best.size_bytes)
        for lane in sorted(joinable, key=lambda lane: (lane.size_bytes, lane.lane_id)):
            if ephemeral_bytes - lane.held_bytes <= free:
                return Place(Step.GROW, lane.lane_id, ephemeral_bytes)
        return None

    def enter(self, place: Place, job_id: JobId, ephemeral_bytes: int, owner: int) -> LaneId:
        """Puts a job where `find` said. A new or larger lane is one that others may join."""
        if place.step is not Step.JOIN:
            self.freed += 1
        if place.lane_id is None:
            lane = Lane(self._next_id, owner, place.size_bytes, place.size_bytes)
            self._next_id += 1
            self.lanes[lane.lane_id] = lane
            self.lane_bytes += lane.held_bytes
            self.open_bytes += lane.size_bytes
            self.out.append(OpenLane(lane.lane_id, lane.size_bytes, owner))
        else:
            lane = self.lanes[place.lane_id]
        lane.needs[job_id] = ephemeral_bytes
        self._fit(lane)
        return lane.lane_id

    def restore(self, lane_id: LaneId | None, job_id: JobId, ephemeral_bytes: int, owner: int) -> LaneId:
        """Puts a job into the lane it was in before a restart, or into a new one."""
        if lane_id is None or lane_id in self.closing:
            return self.enter(Place(Step.NEW, None, ephemeral_bytes), job_id, ephemeral_bytes, owner)
        if lane_id in self.lanes:
            return self.enter(Place(Step.GROW, lane_id, ephemeral_bytes), job_id, ephemeral_bytes, owner)
        # Ids of lanes that were restored in another order are below the next new one.
        self._next_id, after = lane_id, self._next_id
        self.enter(Place(Step.NEW, None, ephemeral_bytes), job_id, ephemeral_bytes, owner)
        self._next_id = max(after, lane_id + 1)
        return lane_id

    def leave(self, lane_id: LaneId, job_id: JobId) -> None:
        """Takes a job out; the lane shrinks to what the others need, or closes."""
        lane = self.lanes[lane_id]
        del lane.needs[job_id]
        if lane.needs:
            self._fit(lane)
            return
        del self.lanes[lane_id]
        self.open_bytes -= lane.size_bytes
        self.out.append(CloseLane(lane_id))
        self.closing[lane_id] = lane.held_bytes
        if self._released_at_once:
            self.released(lane_id, 0)

    def add_fixed(self, size_bytes: int) -> None:
        self.fixed_bytes += size_bytes

    def free_fixed(self, size_bytes: int) -> None:
        self.fixed_bytes -= size_bytes
        self.freed += 1

    def set_outside(self, size_bytes: int) -> None:
        if size_bytes < self.outside_bytes:
            self.freed += 1
        self.outside_bytes = size_bytes

    def set_need(self, lane_id: LaneId, job_id: JobId, ephemeral_bytes: int) -> None:
        lane = self.lanes[lane_id]
        lane.needs[job_id] = ephemeral_bytes
        self._fit(lane)

    def set_stuck(self, lane_id: LaneId, stuck: bool) -> None:
        self.lanes[lane_id].stuck = stuck
        if not stuck:
            self.freed += 1

    def growth_bytes(self, lane_id: LaneId, ephemeral_bytes: int) -> int:
        """What a lane would take from the free memory to serve a need of this size."""
        return max(0, ephemeral_bytes - self.lanes[lane_id].held_bytes)

    def released(self, lane_id: LaneId, size_bytes: int) -> None:
        """The lane occupies only this much now. An answer that was overtaken by a new growth changes nothing."""
        self.freed += 1
        if lane_id in self.closing:
            if size_bytes < self.closing[lane_id]:
                self.lane_bytes -= self.closing[lane_id] - size_bytes
                self.closing[lane_id] = size_bytes
            if size_bytes == 0:
                del self.closing[lane_id]
        elif lane_id in self.lanes:
            lane = self.lanes[lane_id]
            held = max(lane.size_bytes, min(size_bytes, lane.held_bytes))
            self.lane_bytes -= lane.held_bytes - held
            lane.held_bytes = held

    def trial(self) -> LaneTable:
        """A copy to plan on, in which everything under way has finished and memory is free as soon as it is left."""
        copy = LaneTable(self.capacity_bytes, share_between_users=self.share_between_users)
        copy.lanes = {lane_id: lane.copy(lane.size_bytes) for lane_id, lane in self.lanes.items()}
        copy.lane_bytes = copy.open_bytes = self.open_bytes
        copy.fixed_bytes = self.fixed_bytes - self.leaving_bytes
        copy.outside_bytes = self.outside_bytes
        copy._next_id = self._next_id
        copy._released_at_once = True
        return copy

    def _fit(self, lane: Lane) -> None:
        """Makes the lane as large as its largest need."""
        size = max(lane.needs.values())
        if size == lane.size_bytes:
            return
        self.open_bytes += size - lane.size_bytes
        lane.size_bytes = size
        self.out.append(ResizeLane(lane.lane_id, size))
        if size > lane.held_bytes:
            self.lane_bytes += size - lane.held_bytes
            lane.held_bytes = size
        elif self._released_at_once:
            self.released(lane.lane_id, size)
