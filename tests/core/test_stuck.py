"""A lease holder that does not come to an end."""

from __future__ import annotations

from salus.core import events as ev
from tests.core.world import World, footprint


def test_nobody_is_sent_to_a_lane_whose_holder_is_stuck():
    world = World("rr", capacity=16)
    world.arrive("a", footprint(1, 10))
    world.arrive("b", footprint(1, 3))
    assert world.lane_of("b") != world.lane_of("a"), "there is room for another lane"
    world.arrive("c", footprint(1, 4))
    assert world.lane_of("c") == world.lane_of("a"), "too large for the other, and it fits"
    world.send(ev.JobStuck("a"))
    assert world.lane_of("c") is None or world.lane_of("c") == world.lane_of("a"), "no room: it stays where it is"
    world.leave("b")
    world.answer_all()
    assert world.lane_of("c") != world.lane_of("a"), "now there is"
    assert "c" in world.running()


def test_a_stuck_holder_that_comes_to_a_boundary_is_as_good_as_any():
    world = World("rr", capacity=16)
    world.arrive("a", footprint(1, 10))
    world.arrive("b", footprint(1, 10))
    assert world.running() == ["a"]
    world.send(ev.JobStuck("a"))
    assert world.lane_of("b") == world.lane_of("a")
    world.iterate("a")
    assert world.running() == ["b"]
    assert not world.scheduler.jobs["a"].stuck
    world.drain()


def test_one_that_is_stuck_is_not_waited_for_to_make_room():
    world = World("fair", capacity=16)
    world.arrive("grows", footprint(4, 2))
    world.arrive("stuck", footprint(4, 2))
    world.send(ev.JobStuck("stuck"))
    world.want("grows", footprint(4, 10))
    world.arrive("later", footprint(1, 1))
    for _ in range(100):
        world.go_on(stuck=("stuck",))
    assert world.scheduler.jobs["later"].iterations_done, "it fits"


def test_one_that_is_stopped_on_its_way_out_of_its_lane_keeps_out_none_that_fits():
    world = World("fair", capacity=10)
    world.arrive("stopped", footprint(2, 4))
    world.iterate("stopped")
    world.idle("stopped")
    world.now += 10
    world.arrive("wants", footprint(2, 4), owner=1)
    assert world.lane_of("stopped") is None and world.lane_of("wants") is None, "it never says that it has left"
    world.arrive("fits", footprint(0.5, 0.5), owner=1)
    for _ in range(10):
        world.now += 1
        world.send(ev.TimerFired())
    assert world.running() == ["fits"]


def test_a_job_behind_a_stopped_one_is_told_so_and_for_a_silent_one_too():
    world = World("rr", capacity=16)
    world.arrive("a", footprint(1, 10))
    world.arrive("b", footprint(1, 10))
    world.send(ev.JobStuck("a"))
    assert "job a runs in lane 1, and has passed no boundary for long" in world.scheduler.explain("b").text
    world.send(ev.JobStuck("a", stopped=True))
    assert "waits for job a, which is stopped (Ctrl-Z); salus cancel a ends it" in world.scheduler.explain("b").text
    world.send(ev.JobStuck("a", stuck=False, stopped=True))
    assert world.scheduler.explain("b").text == "job a runs in lane 1"
    world.drain()
