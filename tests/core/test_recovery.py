"""After a restart: jobs come back, and nobody gets anything before all of them are known."""

from __future__ import annotations

import pytest

from salus.core import actions as act
from salus.core import events as ev
from salus.core.model import JobSpec, Lease, Phase
from salus.errors import RequestRejected
from tests.core.world import GIB, Place, World, footprint


def comes_back(world: World, job_id: str, needs, **where: object) -> list[act.Action]:
    place = Place(needs)
    world.places[job_id] = place
    place.started = True
    place.on_gpu = not where.get("on_host", False)
    place.holds_lease = bool(where.get("holds"))
    return world.send(ev.JobReturned(JobSpec(job_id, needs), needs, **where))  # type: ignore[arg-type]


def recovering(**settings: object) -> World:
    world = World(**settings)  # type: ignore[arg-type]
    world.send(ev.RecoveryBegan())
    return world


def test_nobody_runs_before_all_are_back():
    world = recovering(policy="rr")
    comes_back(world, "waits", footprint(1, 4), lane_id=3, ready=True)
    assert world.running() == [], "the holder of the lane may not be back yet"
    comes_back(world, "holds", footprint(1, 4), lane_id=3, holds=True)
    world.arrive("new", footprint(1, 2))
    assert world.lane_of("new") is None
    world.send(ev.RecoveryFinished())
    assert world.lane_of("waits") == world.lane_of("holds") == 3
    assert "holds" in world.running() and "waits" not in world.running()
    assert world.lane_of("new") is not None
    world.drain()


def test_lanes_keep_their_numbers_whatever_the_order():
    world = recovering()
    comes_back(world, "a", footprint(1, 2), lane_id=5, ready=True)
    comes_back(world, "b", footprint(1, 3), lane_id=2, ready=True)
    world.send(ev.RecoveryFinished())
    assert (world.lane_of("a"), world.lane_of("b")) == (5, 2)
    world.arrive("c", footprint(1, 1))
    assert world.lane_of("c") == 6
    world.drain()


def test_one_that_waits_for_its_first_memory_takes_none_and_waits_for_what_it_is_expected_to_need():
    world = recovering(policy="fifo")
    comes_back(world, "has", footprint(8, 6), lane_id=1, ready=True)
    world.places["new"] = Place(footprint(4, 2))
    world.send(ev.JobReturned(JobSpec("new", footprint(4, 2)), footprint(0, 0), ready=True))
    world.send(ev.RecoveryFinished())
    job = world.scheduler.jobs["new"]
    assert (job.phase, job.footprint) == (Phase.WAITING, footprint(4, 2))
    assert world.scheduler.free_bytes == 2 * GIB
    world.drain()


def test_one_that_was_paged_out_is_paged_in_when_it_is_its_turn():
    world = recovering()
    comes_back(world, "out", footprint(3, 2, 1), on_host=True, ready=True)
    job = world.scheduler.jobs["out"]
    assert job.phase is Phase.PAGED_OUT and job.host_bytes == 3 * GIB
    assert world.scheduler.free_bytes == 15 * GIB
    actions = world.send(ev.RecoveryFinished())
    assert any(isinstance(action, act.PageIn) for action in actions)
    world.drain()


def test_one_without_a_lane_keeps_its_memory():
    world = recovering()
    comes_back(world, "parked", footprint(3, 2, 1))
    assert world.scheduler.free_bytes == 12 * GIB
    world.send(ev.RecoveryFinished())
    world.drain()


def test_a_late_holder_goes_on_in_a_lane_of_its_own():
    world = World()
    world.arrive("other", footprint(1, 4))
    assert world.running() == ["other"]
    comes_back(world, "late", footprint(1, 4), holds=True)
    assert world.lane_of("late") != world.lane_of("other")
    assert world.scheduler.jobs["late"].lease is Lease.HELD
    world.drain()


def test_nobody_comes_back_twice():
    world = recovering()
    comes_back(world, "a", footprint(1, 2), lane_id=1)
    with pytest.raises(RequestRejected, match="cannot come back"):
        world.scheduler.handle(ev.JobReturned(JobSpec("a", footprint(1, 2)), footprint(1, 2)), 0.0)
