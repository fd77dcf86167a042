"""What a person changes about a job while it runs: a pause, a weight, a priority."""

from __future__ import annotations

import pytest

from salus.core import actions as act
from salus.core import events as ev
from salus.core.admission import WaitReason
from salus.core.model import JobSpec, Phase
from salus.errors import RequestRejected
from tests.core.world import World, footprint

SMALL = footprint(1, 1)


def shares(world: World, rounds: int = 400) -> dict[str, float]:
    """How much GPU time each job gets from now on."""
    before = {job_id: job.attained_s for job_id, job in world.scheduler.jobs.items()}
    for _ in range(rounds):
        world.go_on(0.0)
    return {job_id: job.attained_s - before[job_id] for job_id, job in world.scheduler.jobs.items()}


def in_one_lane(policy: str = "fair", quantum_s: float = 0.0) -> World:
    """Two jobs that take turns: there is no room for a second lane."""
    world = World(policy=policy, capacity=4, quantum_s=quantum_s)
    for name in ("left", "right"):
        world.arrive(name, footprint(0.5, 2.5))
    return world


def test_a_paused_job_stops_at_its_next_boundary_and_its_neighbour_goes_on():
    world = in_one_lane(quantum_s=1.0)
    (holder,) = world.running()
    other = "right" if holder == "left" else "left"
    actions = world.pause(holder)
    assert actions == [act.RevokeLease(holder)], "at once, however long its lease was to last"
    world.iterate(holder)
    assert world.running() == [other]
    gained = shares(world)
    assert gained[holder] == 0 and gained[other] > 0
    world.resume(holder)
    assert shares(world)[holder] > 0


def test_a_job_that_is_alone_can_be_paused_and_resumed():
    world = World()
    world.arrive("only", SMALL)
    world.pause("only")
    world.iterate("only")
    assert world.running() == []
    assert world.resume("only") == [act.GrantLease("only", 1)]


def test_a_job_that_was_promised_the_next_lease_runs_for_one_iteration_and_stops():
    world = in_one_lane()
    (holder,) = world.running()
    world.announce(holder)
    heir = world.heir_of(holder)
    assert heir is not None
    world.pause(heir)
    world.iterate(holder)
    assert world.running() == [heir] and world.places[heir].revoked, "it may run already: a promise is kept"
    world.iterate(heir)
    assert world.running() == [holder]


def test_the_memory_of_a_paused_job_goes_to_another_that_needs_it_and_comes_back():
    world = World(policy="fifo", capacity=8)
    world.arrive("first", footprint(6, 1))
    world.arrive("second", footprint(6, 1))
    assert world.running() == ["first"]
    world.pause("first")
    world.iterate("first")
    for _ in range(100):
        world.go_on(0.1)
    assert world.running() == ["second"]
    assert world.scheduler.jobs["first"].phase is Phase.PAGED_OUT
    world.leave("second")
    world.answer_all()
    assert world.scheduler.jobs["first"].phase is Phase.PAGED_OUT, "it does not come back before it is resumed"
    world.resume("first")
    world.answer_all()
    assert world.running() == ["first"]


def test_a_paused_job_that_waits_for_its_first_memory_gets_none_and_lets_others_by():
    world = World(policy="fifo", capacity=8)
    world.arrive("first", footprint(6, 1))
    world.arrive("second", footprint(6, 1))
    world.pause("second")
    world.arrive("third", footprint(6, 1))
    world.leave("first")
    world.answer_all()
    assert world.running() == ["third"]
    world.leave("third")
    world.answer_all()
    assert world.running() == [] and world.scheduler.jobs["second"].phase is Phase.WAITING
    world.resume("second")
    assert world.running() == ["second"]


def test_a_job_that_is_paused_while_it_waits_for_memory_in_an_iteration_gets_it_and_stops_after_that():
    world = World(capacity=8)
    world.arrive("grows", SMALL)
    world.arrive("other", footprint(4, 1))
    world.iterate("grows") if "grows" in world.running() else None
    while "grows" not in world.running():
        world.go_on()
    world.want("grows", footprint(5, 1))
    world.pause("grows")
    world.answer_all()
    for _ in range(50):
        if not world.places["grows"].holds_lease:
            break
        world.go_on()
    assert not world.places["grows"].holds_lease
    assert world.scheduler.jobs["grows"].footprint == footprint(5, 1)


def test_why_a_paused_job_does_not_run_is_told():
    world = World()
    world.arrive("only", SMALL)
    world.pause("only")
    why = world.scheduler.explain("only")
    assert why is not None and (why.reason, why.text) == (WaitReason.PAUSED, "paused; it stops at its next boundary")
    world.iterate("only")
    why = world.scheduler.explain("only")
    assert why is not None and why.text == "paused"


@pytest.mark.parametrize("event", ["arrives", "returns"])
def test_a_job_that_was_paused_before_a_restart_is_paused_after_it(event):
    world = World()
    world.arrive("other", SMALL)
    if event == "arrives":
        world.places["job"] = type(world.places["other"])(SMALL, paused=True)
        world.send(ev.JobArrived(JobSpec("job", SMALL), paused=True))
        world.send(ev.JobReady("job"))
    else:
        world.places["job"] = type(world.places["other"])(SMALL, paused=True, on_gpu=True, started=True)
        world.send(ev.JobReturned(JobSpec("job", SMALL), SMALL, ready=True, paused=True))
    for _ in range(20):
        world.go_on()
    assert world.running() == ["other"]
    world.resume("job")
    for _ in range(20):
        world.go_on()
    assert world.scheduler.jobs["job"].iterations_done > 0


def test_pausing_twice_and_resuming_what_runs_changes_nothing():
    world = in_one_lane()
    assert world.resume("left") == []
    world.pause("left")
    assert world.pause("left") == []


def test_a_new_weight_counts_from_now_on():
    world = in_one_lane()
    even = shares(world)
    assert even["left"] == pytest.approx(even["right"], rel=0.05)
    world.send(ev.JobChanged("left", weight=3.0, priority=0))
    uneven = shares(world)
    assert uneven["left"] == pytest.approx(3 * uneven["right"], rel=0.05)


def test_changing_the_weight_again_and_again_gains_nothing():
    world = in_one_lane()
    gained = {"left": 0.0, "right": 0.0}
    for _ in range(200):
        world.send(ev.JobChanged("left", weight=1.0, priority=0))
        for job_id, more in shares(world, rounds=2).items():
            gained[job_id] += more
    assert gained["left"] == pytest.approx(gained["right"], rel=0.05)


def test_a_job_that_is_made_more_urgent_runs_alone_and_shares_again_when_it_is_made_less_so():
    world = in_one_lane("priority")
    shares(world)
    world.send(ev.JobChanged("left", weight=1.0, priority=5))
    shares(world, 4)
    assert shares(world)["right"] == 0
    world.send(ev.JobChanged("left", weight=1.0, priority=0))
    again = shares(world)
    assert again["left"] == pytest.approx(again["right"], rel=0.05), "neither makes up for the time before"


def test_a_job_that_joins_a_level_late_does_not_wait_for_what_it_used_before():
    world = World(policy="priority", capacity=4)
    world.arrive("old", footprint(0.3, 2.5))
    shares(world, 1000)
    world.arrive("urgent", footprint(0.3, 2.5), priority=5)
    shares(world, 10)
    world.send(ev.JobChanged("old", weight=1.0, priority=5))
    gained = shares(world)
    assert gained["old"] == pytest.approx(gained["urgent"], rel=0.05)


def test_a_job_in_the_queue_for_memory_moves_up_when_it_is_made_more_urgent():
    world = World(policy="priority", capacity=8)
    for name in ("runs", "second", "third"):
        world.arrive(name, footprint(6, 1), priority=1 if name == "runs" else 0)
    assert [job.job_id for job in world.scheduler.queue] == ["second", "third"]
    world.send(ev.JobChanged("third", weight=1.0, priority=1))
    assert [job.job_id for job in world.scheduler.queue] == ["third", "second"]


def test_a_weight_that_cannot_be_is_refused_and_changes_nothing():
    world = in_one_lane()
    with pytest.raises(RequestRejected, match="weight is 0"):
        world.send(ev.JobChanged("left", weight=0.0, priority=0))
    assert world.scheduler.jobs["left"].spec.weight == 1.0
