"""A lease that is promised before it is free: the heir may run by the time that is heard of."""

from __future__ import annotations

import pytest

from salus.core import actions as act
from salus.core import events as ev
from salus.core.model import Lease
from tests.core.world import World, footprint, make_policy


def three_in_a_lane(policy: str = "rr", **jobs: dict) -> World:
    world = World(policy, capacity=14)
    for name in "abc":
        world.arrive(name, footprint(1, 8), **jobs.get(name, {}))
    assert world.running() == ["a"] and len({world.lane_of(name) for name in "abc"}) == 1
    return world


def promised(actions: list[act.Action]) -> list[str]:
    return [action.job_id for action in actions if isinstance(action, act.PromiseLease)]


def test_the_next_one_is_named_before_the_lease_is_free_and_gets_it_then():
    world = three_in_a_lane()
    assert promised(world.announce("a")) == ["b"]
    assert world.running() == ["a"]
    assert world.announce("a") == [], "once is enough"
    world.send(ev.UtilizationMeasured("c", 0.1))
    assert world.scheduler.next_in_lane("a") == "b"
    world.iterate("a")
    assert world.running() == ["b"]
    assert promised(world.announce("b")) == ["c"]
    world.drain()


def test_one_that_stops_by_itself_is_told_to_stop():
    world = World("fifo", capacity=14)
    world.arrive("a", footprint(1, 8))
    world.arrive("b", footprint(1, 8))
    actions = world.announce("a")
    assert act.RevokeLease("a") in actions and promised(actions) == ["b"]


def test_who_comes_too_late_waits_for_the_heir():
    world = three_in_a_lane("priority")
    world.announce("a")
    world.arrive("urgent", footprint(1, 8), priority=9)
    world.iterate("a")
    assert world.running() == ["b"], "it may run already"
    world.now += 1
    world.fire_timer()
    world.iterate("b")
    assert world.running() == ["urgent"]
    world.drain()


def test_nobody_is_named_where_the_policy_would_run_another_lane():
    world = World("srtf:fill=off", capacity=20)
    world.arrive("a", footprint(1, 8), length_s=10.0)
    world.arrive("long", footprint(1, 8), length_s=900.0)
    world.arrive("short", footprint(0, 9), length_s=100.0)
    assert world.lane_of("long") != world.lane_of("a") or world.lane_of("short") != world.lane_of("a")
    other = "long" if world.lane_of("long") == world.lane_of("a") else "short"
    assert promised(world.announce("a")) == (["short"] if other == "short" else [])


def test_an_heir_that_goes_is_no_heir():
    for gone in (World.leave, World.idle):
        world = three_in_a_lane()
        world.announce("a")
        assert act.WithdrawPromise("b", 1) in gone(world, "b")
        assert promised(world.announce("a")) == ["c"]
        world.iterate("a")
        assert world.running() == ["c"]


def test_a_holder_that_goes_leaves_the_lease_to_its_heir():
    for goes in (World.leave, World.idle):
        world = three_in_a_lane()
        world.announce("a")
        goes(world, "a")
        assert world.running() == ["b"]
        world.drain()


def test_a_holder_that_wants_memory_takes_the_promise_back():
    world = three_in_a_lane()
    world.announce("a")
    actions = world.want("a", footprint(9, 8))
    assert actions[0] == act.WithdrawPromise("b", 1)
    assert world.scheduler.jobs["b"].lease is Lease.NONE, "its memory may be needed for that"
    world.drain()


def test_an_heir_keeps_its_memory_and_its_lane_whoever_wants_them():
    world = World("rr", capacity=13)
    world.arrive("a", footprint(3, 4))
    world.arrive("b", footprint(3, 4))
    world.arrive("c", footprint(1, 2))
    assert world.lane_of("a") == world.lane_of("b")
    world.announce("a")
    assert world.places["b"].promised
    world.measure("c", footprint(9, 4))
    world.send(ev.JobStuck("a"))
    assert world.lane_of("b") == world.lane_of("a") and world.places["b"].on_gpu
    world.send(ev.JobStuck("a", False))
    world.drain()


def test_an_heir_that_must_make_room_is_told_so_when_it_gets_the_lease():
    world = World("pack", capacity=16, quantum_s=0.02)
    world.arrive("s", footprint(1, 3))
    world.arrive("g", footprint(2, 6))
    world.arrive("h", footprint(2, 6))
    assert world.lane_of("g") == world.lane_of("h") != world.lane_of("s")
    assert promised(world.announce("g")) == ["h"]
    world.want("s", footprint(12, 3))
    world.now += 0.03
    world.iterate("g")
    assert world.places["h"].revoked, "nobody would hear of its next boundary otherwise"
    world.drain()


def test_an_heir_that_the_policy_would_not_run_any_more_is_revoked_in_time():
    world = World("srtf:fill=off", capacity=40, quantum_s=0.02)
    world.arrive("g", footprint(1, 20), length_s=100.0)
    world.arrive("h", footprint(1, 20), length_s=150.0)
    assert promised(world.announce("g")) == ["h"]
    world.arrive("x", footprint(1, 5), length_s=5.0)
    world.now += 0.03
    world.iterate("g")
    assert "h" in world.running() and world.timer_s is not None
    world.now += 0.03
    world.fire_timer()
    assert world.places["h"].revoked
    world.iterate("h")
    assert world.running() == ["x"]


def test_nothing_is_promised_before_all_are_back():
    world = three_in_a_lane()
    world.send(ev.RecoveryBegan())
    assert world.announce("a") == []
    world.send(ev.RecoveryFinished())
    assert promised(world.announce("a")) == ["b"]


def test_the_heir_of_a_stuck_job_that_has_let_go_of_it_moves_where_there_is_room():
    world = World("rr", capacity=22)
    world.arrive("other", footprint(1, 10))
    world.arrive("a", footprint(1, 4))
    world.arrive("b", footprint(1, 4))
    world.arrive("c", footprint(1, 4))
    runs = [name for name in "abc" if world.places[name].holds_lease]
    (waits,) = [name for name in "abc" if name not in runs]
    (before,) = [name for name in runs if world.lane_of(name) == world.lane_of(waits)] or ["other"]
    assert promised(world.announce(before)) == [waits]
    world.send(ev.JobStuck(before))
    world.leave("other" if before != "other" else runs[0])
    world.answer_all()
    assert world.lane_of(waits) == world.lane_of(before), "it may have the lease already"
    world.idle(waits)
    world.send(ev.JobReady(waits))
    assert world.lane_of(waits) != world.lane_of(before)


def test_one_that_only_waits_can_announce_nothing():
    world = three_in_a_lane()
    assert world.announce("b") == []


@pytest.mark.parametrize("policy", ["fair", "las", "srtf", "priority"])
def test_a_promise_lasts_through_a_change_of_policy(policy):
    world = three_in_a_lane()
    world.announce("a")
    world.send(ev.PolicyChanged(make_policy(policy)))
    world.iterate("a")
    assert world.running() == ["b"]
    world.drain()


def test_one_that_is_stuck_gets_no_heir_who_would_be_bound_to_it():
    world = three_in_a_lane("fifo")
    world.send(ev.JobStuck("a", True))
    assert promised(world.announce("a")) == []
    assert world.scheduler.jobs["b"].lease is Lease.NONE, "it may go to another lane"


def test_an_heir_that_could_not_be_told_waits_like_any_other():
    world = three_in_a_lane()
    world.announce("a")
    assert act.WithdrawPromise("b", 1) in world.send(ev.PromiseRefused("b"))
    assert world.scheduler.jobs["b"].lease is Lease.NONE
    assert world.send(ev.PromiseRefused("b")) == [], "it was withdrawn already"
    world.iterate("a")
    assert world.running() == ["b"]
    world.drain()
