"""Memory under pressure: growth on demand, paging, and why nobody waits for ever."""

from __future__ import annotations

from collections import Counter

import pytest

from salus.core import actions as act
from salus.core import events as ev
from salus.core.admission import WaitReason
from salus.core.model import Phase
from tests.core.world import GIB, World, footprint


def kinds(actions: list[act.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_growth_that_fits_is_allowed_at_once():
    world = World()
    world.arrive("a", footprint(1, 2), footprint_known=False)
    assert world.want("a", footprint(2, 4)) == [act.ResizeLane(1, 4 * GIB), act.AllowGrowth("a", footprint(2, 4))]


def test_growth_beyond_the_whole_gpu_fails_in_that_job_alone_with_the_numbers():
    world = World()
    world.arrive("a", footprint(1, 2))
    world.arrive("b", footprint(1, 2))
    (refusal,) = world.want("a", footprint(1, 20))
    assert refusal == act.RefuseGrowth("a", "needs 21 GiB, the whole GPU has 16 GiB")
    assert world.running() == ["a", "b"]


def test_a_stalled_job_takes_the_memory_of_jobs_that_are_not_running():
    world = World(policy="fifo")
    world.arrive("a", footprint(2, 4))
    world.arrive("b", footprint(6, 4))
    assert world.running() == ["a"]
    actions = world.want("a", footprint(2, 8))
    assert kinds(actions) == ["LeaveLane", "CloseLane"], "its lane is enough: nothing has to be copied"
    assert kinds(world.answer()) == ["ResizeLane", "AllowGrowth", "AdmitJob"]
    assert world.lane_of("b") == world.lane_of("a"), "and it comes back into the lane that grew"
    assert kinds(world.want("a", footprint(4, 12))) == ["LeaveLane", "PageOut"]
    assert kinds(world.answer()) == ["ResizeLane", "AllowGrowth"]


def test_a_running_job_is_displaced_at_its_boundary_and_not_before():
    world = World(policy="pack")
    world.arrive("a", footprint(2, 4))
    world.arrive("b", footprint(6, 4))
    world.want("a", footprint(8, 8))
    assert world.places["b"].revoked
    assert world.scheduler.jobs["b"].phase is Phase.RESIDENT
    assert kinds(world.iterate("b")) == ["LeaveLane", "CloseLane", "PageOut"]
    world.answer_all()
    assert not world.places["a"].stalled


def test_two_jobs_that_both_want_more_than_is_left_both_get_it_in_the_end():
    world = World(policy="pack")
    world.arrive("a", footprint(3, 3))
    world.arrive("b", footprint(3, 3))
    world.want("a", footprint(8, 6))
    assert world.places["b"].revoked
    world.want("b", footprint(8, 6))
    world.answer_all()
    assert not world.places["a"].stalled
    assert world.scheduler.jobs["b"].phase is Phase.PAGED_OUT
    assert world.scheduler.jobs["b"].mid_iteration, "what it had in its lane is safe on the host"
    world.drain()


def test_a_job_whose_neighbours_keep_internal_memory_steps_aside_until_they_are_done():
    world = World(policy="pack")
    world.arrive("a", footprint(2, 2, internal=1))
    world.arrive("b", footprint(2, 2, internal=1))
    world.want("a", footprint(7, 8, internal=1))
    world.iterate("b")
    world.answer_all()
    assert "b" in world.running(), "there is room for all of a only without b's internal memory"
    assert world.scheduler.jobs["a"].phase is Phase.PAGED_OUT
    world.leave("b")
    world.answer_all()
    assert world.running() == ["a"]
    assert not world.places["a"].stalled


def test_without_paging_jobs_of_unknown_size_are_measured_one_at_a_time():
    world = World(host_bytes=0)
    world.arrive("a", footprint(1, 1), footprint_known=False)
    world.arrive("b", footprint(1, 1), footprint_known=False)
    assert world.running() == ["a"]
    assert world.scheduler.explain("b").reason is WaitReason.UNKNOWN_SIZE
    world.measure("a", footprint(1, 1))
    assert world.running() == ["a", "b"]


def test_a_measured_footprint_gives_back_what_was_reserved_too_much():
    world = World(policy="pack")
    world.arrive("a", footprint(4, 12))
    world.arrive("b", footprint(4, 4))
    world.measure("a", footprint(4, 4))
    world.answer_all()
    assert world.running() == ["a", "b"]


def test_more_than_was_reserved_stops_no_iteration_but_gets_no_new_lease_until_there_is_room():
    world = World(policy="pack", host_bytes=0)
    world.arrive("a", footprint(2, 6))
    world.arrive("b", footprint(2, 6))
    world.measure("a", footprint(4, 6))
    assert world.running() == ["a", "b"]
    assert world.places["a"].revoked
    world.iterate("a")
    assert world.running() == ["b"]
    assert world.scheduler.explain("a").reason is WaitReason.GROWTH
    world.leave("b")
    world.answer_all()
    assert world.running() == ["a"]


def test_paging_stays_within_the_host_memory_it_was_given():
    world = World(policy="srtf", host_bytes=4 * GIB)
    world.arrive("long", footprint(8, 2), length_s=1000)
    world.arrive("short", footprint(8, 2), length_s=1)
    assert world.running() == ["long"], "8 GiB do not go into 4"
    assert world.scheduler.explain("short").reason is WaitReason.MEMORY
    roomy = World(policy="srtf", host_bytes=8 * GIB)
    roomy.arrive("long", footprint(8, 2), length_s=1000)
    roomy.arrive("short", footprint(8, 2), length_s=1)
    roomy.iterate("long")
    roomy.answer_all()
    assert roomy.running() == ["short"]


def test_a_job_that_dies_in_mid_iteration_while_stalled_hurts_nobody():
    world = World(policy="pack")
    world.arrive("a", footprint(3, 3))
    world.arrive("b", footprint(3, 3))
    world.want("a", footprint(8, 8))
    world.leave("a")
    world.iterate("b")
    world.answer_all()
    assert world.running() == ["b"]
    assert world.scheduler.free_bytes == 10 * GIB


def test_a_job_that_has_yet_to_begin_displaces_nobody_who_runs():
    """It loads its model, say. A newcomer of known size would wait as well, for as long as the policy says."""
    world = World(policy="fair")
    world.arrive("runs", footprint(6, 2))
    world.arrive("loads", footprint(2, 0), ready=False)
    assert kinds(world.measure("loads", footprint(9, 0))) == ["SetTimer"]
    assert world.scheduler.explain("loads").reason is WaitReason.GROWTH
    world.now = 10.0
    world.iterate("runs")
    assert world.running() == ["runs"] and not world.places["runs"].revoked
    while not world.places["runs"].revoked:
        assert world.timer_s is not None and world.now < 1800
        world.fire_timer()
    assert world.now >= 1800
    world.iterate("runs")
    world.answer_all()
    assert world.scheduler.jobs["loads"].wanted is None, "patience has an end"


def test_a_job_that_has_begun_gets_more_at_the_expense_of_those_who_run():
    """Between two iterations, too: it is no newcomer."""
    world = World(policy="fair")
    world.arrive("runs", footprint(6, 2))
    world.arrive("began", footprint(2, 1))
    world.iterate("began")
    world.idle("began")
    world.measure("began", footprint(8, 1))
    assert world.places["runs"].revoked


@pytest.mark.parametrize("policy", ["fifo", "pack", "srtf"])
def test_where_the_policy_knows_no_patience_nobody_waits_for_it(policy):
    world = World(policy=policy)
    world.arrive("loads", footprint(2, 0), ready=False)
    world.arrive("runs", footprint(6, 2))
    world.measure("loads", footprint(9, 0))
    assert world.places["runs"].revoked


def test_a_job_that_has_yet_to_begin_takes_the_memory_of_one_that_is_idle():
    world = World(policy="fair")
    world.arrive("runs", footprint(1, 1))
    world.arrive("idle", footprint(6, 2), ready=False)
    world.arrive("loads", footprint(2, 0), ready=False)
    world.measure("loads", footprint(9, 0))
    assert world.scheduler.jobs["idle"].phase is Phase.RESIDENT
    while world.scheduler.jobs["idle"].phase is Phase.RESIDENT and world.now < 5:
        world.fire_timer()
    world.answer_all()
    assert world.scheduler.jobs["idle"].phase is Phase.PAGED_OUT
    assert world.scheduler.jobs["loads"].wanted is None
    assert world.running() == ["runs"], "who runs is not disturbed"


def test_two_jobs_that_want_more_between_iterations_with_nobody_else_both_get_it():
    world = World(policy="fair")
    world.arrive("a", footprint(6, 0), ready=False)
    world.arrive("b", footprint(6, 0), ready=False)
    world.measure("a", footprint(9, 0))
    world.answer_all()
    world.measure("b", footprint(9, 0))
    world.answer_all()
    assert world.scheduler.jobs["a"].wanted is None
    world.drain()


def test_what_the_driver_took_for_a_job_is_made_room_for_at_once():
    world = World(policy="fair")
    world.arrive("runs", footprint(6, 2))
    world.arrive("other", footprint(6, 2))
    world.iterate("other")
    world.measure("other", footprint(6, 2, internal=4))
    assert world.places["runs"].revoked or world.scheduler.jobs["other"].phase is not Phase.RESIDENT


def test_jobs_that_grow_a_little_at_a_time_come_to_the_end_of_their_iterations_one_after_another():
    """Each needs 6 of 16 GiB, in 48 steps. Served in turn they page one another out in mid-iteration, 71 times."""
    names, steps, last = "abcdefghijklmnop", 48, 52
    world = World(policy="fair")
    for name in names:
        world.arrive(name, footprint(0, 0))
    grown = dict.fromkeys(names, 0)
    for _ in range(1000):
        for name in world.running():
            place = world.places[name]
            if not place.holds_lease or place.stalled:
                continue
            if grown[name] < steps:
                grown[name] += 1
                world.want(name, footprint(grown[name] / 16, grown[name] / 16))
            elif grown[name] < last:
                grown[name] += 1
                world.iterate(name)
            else:
                world.leave(name)
        if world.answers:
            world.answer()
        elif all(place.stalled or not place.holds_lease for place in world.places.values()):
            world.fire_timer()
    assert not world.places, grown
    page_outs = sum(isinstance(action, act.PageOut) for action in world.log)
    assert page_outs <= 2 * len(names), page_outs


def test_one_that_was_told_to_make_room_is_not_let_off_for_another():
    """The order of `fair` changes while they run to their boundaries."""
    world = World(policy="fair", capacity=10)
    world.arrive("a", footprint(0, 2))
    for name in "bcd":
        world.arrive(name, footprint(0, 2))
    world.want("a", footprint(0, 6))
    told = {name for name in "bcd" if world.places[name].revoked}
    assert len(told) == 1
    (other, _) = sorted(set("bcd") - told)
    world.iterate(other, 0.5)
    assert {name for name in "bcd" if world.places[name].revoked} == told
    assert "LeaveLane" in kinds(world.iterate(*told))


def test_one_that_stops_so_that_another_can_grow_is_not_the_one_to_make_room():
    """`a` is urgent and grew first. When it stops for `b`, the room comes from `c`, as little urgent as `b`."""
    world = World(policy="priority", capacity=12)
    world.arrive("a", footprint(1, 2), utilization=0.2, priority=9)
    for name in "bcd":
        world.arrive(name, footprint(1, 2), utilization=0.2)
    world.want("a", footprint(1, 3))
    if world.places["d"].holds_lease:
        world.iterate("d")
    world.answer_all()
    world.log.clear()
    world.want("b", footprint(1, 4))
    assert world.places["a"].revoked
    for name in "ac":
        if world.places[name].holds_lease:
            world.iterate(name, 0.05)
        world.answer_all()
    left = [action.job_id for action in world.log if isinstance(action, act.LeaveLane)]
    assert left == ["c"] and not world.places["b"].stalled


@pytest.mark.parametrize("policy", ["pack", "rr", "fair"])
def test_one_that_grew_first_and_computes_for_long_keeps_nobody_waiting(policy):
    world = World(policy=policy, capacity=10)
    for name in "abc":
        world.arrive(name, footprint(0, 2))
    world.arrive("d", footprint(0, 4))
    world.want("a", footprint(0, 4))
    world.want("b", footprint(0, 3))
    for name in "cd":
        if world.places[name].revoked:
            world.iterate(name)
    world.answer_all()
    assert not world.places["a"].stalled
    for _ in range(400):
        world.answer_all()
        if not world.places["b"].stalled:
            break
        assert world.timer_s is not None, "somebody waits, and nothing will ever happen"
        world.fire_timer()
        for name in "cd":
            if world.places[name].holds_lease and not world.places[name].stalled:
                world.iterate(name)
    assert not world.places["b"].stalled


@pytest.mark.parametrize("policy", ["fair", "rr", "pack", "priority"])
def test_one_that_was_told_to_make_room_and_is_stuck_is_replaced_by_another(policy):
    world = World(policy=policy, capacity=10)
    for name in "abcd":
        world.arrive(name, footprint(0, 2))
    world.want("a", footprint(0, 6))
    (told,) = [name for name in "bcd" if world.places[name].revoked]
    world.send(ev.JobStuck(told, stuck=True))
    for name in sorted(set("bcd") - {told}):
        world.iterate(name)
    world.answer_all()
    assert not world.places["a"].stalled


def test_with_the_host_full_a_job_behind_a_stalled_one_is_no_reason_to_wait():
    """Two stall, in two lanes, and a third waits for its turn in one of them: nobody can go on, so one is told."""
    world = World(policy="pack", capacity=10, host_bytes=0)
    world.arrive("a", footprint(2, 2))
    world.arrive("b", footprint(2, 2))
    world.arrive("c", footprint(1, 2))
    with_c = next(name for name in "ab" if world.lane_of(name) == world.lane_of("c"))
    alone = "a" if with_c == "b" else "b"
    actions = world.want(alone, footprint(6, 2)) + world.want(with_c, footprint(4, 2))
    assert "RefuseGrowth" in kinds(actions)


def test_growth_between_iterations_leaves_room_for_somebody_to_run():
    world = World(policy="pack", capacity=10, host_bytes=0)
    for owner, (name, persistent) in enumerate((("a", 1), ("b", 3), ("c", 3))):
        world.arrive(name, footprint(persistent, 1), owner=owner)
    world.want("a", footprint(1, 3))
    for name in "bc":
        world.iterate(name)
    world.answer_all()
    assert world.running() == ["a"] and [world.lane_of(name) for name in "bc"] == [None, None]
    world.measure("b", footprint(6.5, 1))
    world.leave("a")
    world.answer_all()
    assert world.running() == ["c"], "b could have nearly all that is left, and then nobody would have a lane"
    world.leave("c")
    world.answer_all()
    assert world.running() == ["b"]


@pytest.mark.parametrize("host_bytes", [None, int(1.5 * GIB)])
def test_a_job_seen_to_need_more_than_is_left_to_it_does_not_come_and_go_for_ever(host_bytes):
    world = World("fair", capacity=12, quantum_s=0.02, host_bytes=host_bytes)
    world.arrive("large", footprint(2, 2, 4))
    world.arrive("seen", footprint(1, 1))
    world.go_on()
    # What the other has for itself for good leaves 8, and it needs 9.
    world.measure("seen", footprint(1, 1, 7))
    for _ in range(100):
        world.go_on()
    assert Counter(kinds(world.log))["PageOut"] <= 3
    assert world.scheduler.jobs["large"].iterations_done > 50
    world.drain()


def test_one_that_went_aside_in_mid_iteration_keeps_nobody_out():
    world = World("fair", capacity=12, quantum_s=0.02)
    world.arrive("large", footprint(2, 2, 4))
    world.arrive("aside", footprint(1, 1))
    world.go_on()
    world.measure("aside", footprint(1, 1, 7))
    world.want("aside", footprint(1, 2))
    for _ in range(10):
        world.go_on()
    world.arrive("later", footprint(0.5, 0.5))
    for _ in range(200):
        world.go_on()
    assert world.scheduler.jobs["large"].iterations_done > 50
    assert world.scheduler.jobs["later"].iterations_done


def test_idle_jobs_in_lanes_are_no_reason_for_all_others_to_stand_still():
    world = World("fair", capacity=16, quantum_s=0.0)
    world.arrive("a", footprint(0, 6.5))
    world.arrive("b", footprint(0, 3), ready=False)
    world.arrive("idle", footprint(0, 0), ready=False)
    world.arrive("c", footprint(1.5, 3.5), owner=1)
    world.send(ev.JobReady("b"))
    world.want("a", footprint(5.5, 0))
    world.measure("b", footprint(6, 3.5))
    for _ in range(100):
        world.go_on()
    assert sum(job.iterations_done for job in world.scheduler.jobs.values()) > 50, "one of them has a lane"


def test_growth_between_iterations_leaves_room_for_the_job_itself_to_run():
    world = World(policy="pack", capacity=10, host_bytes=0)
    for owner, (name, persistent, ephemeral) in enumerate((("a", 1, 1), ("idle", 4, 1), ("grows", 2, 1))):
        world.arrive(name, footprint(persistent, ephemeral), owner=owner)
    world.want("a", footprint(1, 3))
    for name in ("idle", "grows"):
        world.iterate(name)
    world.answer_all()
    assert world.running() == ["a"]
    world.send(ev.JobIdled("idle"))
    world.measure("grows", footprint(5.5, 1))
    world.leave("a")
    world.answer_all()
    world.send(ev.JobReady("idle"))
    world.answer_all()
    assert world.running() == ["idle"], "with nearly all that is left, the other could not run, and nor could this one"


def test_a_job_does_not_wait_for_memory_of_one_that_cannot_run_before_it_ends():
    world = World(policy="pack", capacity=10, host_bytes=0)
    world.arrive("parked", footprint(3, 4))
    world.arrive("grows", footprint(1, 1), owner=1)
    world.measure("grows", footprint(4, 1))
    for _ in range(10):
        world.go_on()
    assert world.running() == ["grows"] and world.lane_of("parked") is None
    before = world.scheduler.jobs["grows"].iterations_done
    world.measure("grows", footprint(6.5, 1))
    for _ in range(10):
        world.go_on()
    assert world.scheduler.jobs["grows"].iterations_done > before + 5, "it is refused, and goes on with what it has"
