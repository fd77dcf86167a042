"""What a process has outside any allocator stays on the GPU: not so many are let in that nobody can run."""

from __future__ import annotations

import pytest

from salus.core import actions as act
from salus.core import events as ev
from salus.core.model import Phase
from tests.core.world import GIB, World, footprint

CONTEXT = 2


def waiting(world: World) -> list[str]:
    return [job_id for job_id, job in world.scheduler.jobs.items() if job.phase is Phase.WAITING]


def test_of_many_that_have_asked_for_nothing_yet_the_last_ones_wait_so_that_the_others_can_grow_and_all_finish():
    world = World("fair", capacity=16)
    for number in range(10):
        world.arrive(f"j{number}", footprint(0, 0, CONTEXT))
    assert waiting(world) == ["j7", "j8", "j9"]
    why = world.scheduler.explain("j7")
    assert why is not None and "takes 2 GiB for itself" in why.text and why.position == 1
    for job_id in world.running():
        world.want(job_id, footprint(0.5, 1, CONTEXT))
    world.drain()
    assert not any(isinstance(action, act.RefuseGrowth) for action in world.log)


def test_one_that_was_paged_out_can_come_back_beside_the_contexts_of_those_that_came_meanwhile():
    world = World("fair:patience=0.5", capacity=16)
    world.arrive("large", footprint(6, 4, 1))
    world.idle("large")
    for number in range(7):
        world.arrive(f"j{number}", footprint(0.5, 0.5, CONTEXT))
        world.go_on(2.0)
    there = [job_id for job_id in world.places if job_id not in waiting(world)]
    contexts = sum(world.scheduler.jobs[job_id].footprint.internal_bytes for job_id in there)
    assert contexts + 10 * GIB <= world.config.capacity_bytes and len(there) > 1
    world.send(ev.JobReady("large"))
    for _ in range(200):
        world.go_on(0.5)
        if world.places["large"].holds_lease:
            break
    assert world.places["large"].holds_lease, "nobody has ended, and it runs all the same"
    world.drain()


def test_who_is_alone_there_is_let_in_whatever_it_needs():
    world = World("fair", capacity=16)
    world.arrive("all", footprint(8, 4, 4))
    assert world.running() == ["all"]


def test_nobody_is_displaced_for_one_that_would_crowd():
    world = World("priority", capacity=16)
    world.arrive("a", footprint(4, 8, 2))
    before = len(world.log)
    world.arrive("urgent", footprint(1, 1, 3), priority=1)
    assert waiting(world) == ["urgent"] and world.running() == ["a"]
    assert not any(isinstance(action, (act.LeaveLane, act.PageOut)) for action in world.log[before:])
    world.leave("a")
    world.answer_all()
    assert world.running() == ["urgent"]


@pytest.mark.parametrize("outside", [0, 3])
def test_what_others_use_is_not_there_for_contexts(outside):
    world = World("fair", capacity=16)
    world.send(ev.OutsideMemoryChanged(outside * GIB))
    for number in range(10):
        world.arrive(f"j{number}", footprint(0, 0, CONTEXT))
    assert len(waiting(world)) == 3 + (outside + 1) // 2


def test_the_context_of_one_that_waits_is_made_where_there_is_room_and_counts_from_then_on():
    world = World("fair", capacity=16)
    world.arrive("a", footprint(4, 8, 1))
    world.arrive("b", footprint(4, 8, 1))
    assert waiting(world) == ["b"] and world.scheduler.free_bytes == 3 * GIB
    assert world.ask_for_context("b") == [act.AllowContext("b")]
    assert world.scheduler.free_bytes == 2 * GIB
    why = world.scheduler.explain("b")
    assert why is not None and "needs 4 GiB and a lane" in why.text, "its context is there already"
    world.drain()


def test_where_there_is_no_room_for_it_the_context_is_made_when_the_job_has_its_memory():
    world = World("fair", capacity=16)
    world.arrive("a", footprint(4, 11, 1))
    world.arrive("b", footprint(4, 11, 1))
    assert not any(isinstance(action, act.AllowContext) for action in world.ask_for_context("b"))
    world.leave("a")
    world.answer_all()
    assert world.running() == ["b"]
    assert not any(isinstance(action, act.AllowContext) for action in world.log), (
        "what it was admitted with includes it"
    )


def test_a_process_that_is_gone_takes_its_context_with_it():
    world = World("fair", capacity=16)
    world.arrive("a", footprint(4, 8, 1))
    world.arrive("b", footprint(4, 8, 1))
    world.ask_for_context("b")
    world.ask_for_context("b", wanted=False)
    assert world.scheduler.free_bytes == 3 * GIB
    world.ask_for_context("b")
    world.leave("b")
    assert world.scheduler.free_bytes == 3 * GIB


def test_of_those_that_wait_not_so_many_make_their_contexts_that_nobody_could_run():
    world = World("fair", capacity=16)
    world.arrive("a", footprint(2, 4, 1))
    for number in range(8):
        world.arrive(f"j{number}", footprint(9, 4, 1))
        world.ask_for_context(f"j{number}")
    # The largest needs 13 beside the contexts of all.
    assert [action.job_id for action in world.log if isinstance(action, act.AllowContext)] == ["j0", "j1"]
    world.drain()


def test_one_that_took_long_to_load_its_model_is_not_displaced_before_it_could_begin():
    world = World("fair:patience=0.5", capacity=16, quantum_s=0.02)
    world.arrive("ran", footprint(9, 4, 1))
    world.go_on(1.0)
    world.arrive("loads", footprint(9, 4, 1))
    world.arrive("waits", footprint(9, 4, 1))
    while world.lane_of("loads") is None:
        world.go_on(0.05, loads=("loads",))
    # The lease that comes with its memory it holds for a moment: it has yet to load its model.
    world.send(ev.JobReady("loads"))
    world.iterate("loads", 0.01, iterations=0)
    world.idle("loads")
    world.now += 0.8
    world.send(ev.JobReady("loads"))
    for _ in range(10):
        world.go_on(0.05)
    assert world.scheduler.jobs["loads"].iterations_done, "it was given memory, and ran"
    world.drain()


def only_timers(world: World, until: float) -> None:
    """Nothing happens but what the scheduler asked to be woken for; what runs is reported then, as a service does."""
    world.answer_all()
    while world.timer_s is not None and world.timer_s <= until:
        before, at_s = world.now, max(world.now, world.timer_s)
        world.now, world.timer_s = at_s, None
        for job_id in world.running():
            world.send(ev.IterationFinished(job_id, at_s - before, 0))
        world.send(ev.TimerFired())
        world.answer_all()
    world.now = until


@pytest.mark.parametrize("first_ends_after_s", [None, 2.0])
def test_one_that_is_spared_while_it_begins_is_displaced_when_it_has(first_ends_after_s):
    world = World("fair:patience=0.5", capacity=16, quantum_s=0.02)
    world.arrive("a", footprint(9, 4, 1))
    world.arrive("b", footprint(9, 4, 1))
    if first_ends_after_s is not None:
        only_timers(world, first_ends_after_s)
        world.iterate("a", 0.1)
    only_timers(world, 60)
    assert world.places["a"].revoked or not world.places["a"].on_gpu, "nobody asked again"


@pytest.mark.parametrize("policy", ["fair:patience=0.5", "priority", "fifo", "srtf"])
def test_an_idle_job_as_large_as_the_gpu_keeps_nobody_out_for_ever(policy):
    world = World(policy, capacity=16)
    world.arrive("notebook", footprint(14.4, 1, 0.5))
    world.go_on(1.5)
    world.idle("notebook")
    world.arrive("b", footprint(1, 1, 0.5))
    for _ in range(100):
        world.go_on(0.5)
    assert world.scheduler.jobs["b"].iterations_done
    world.drain()


def test_nobody_waits_for_the_sake_of_one_that_cannot_run_anyway():
    world = World("fair:patience=0.5", capacity=16)
    world.arrive("large", footprint(8, 0, 1))
    world.go_on(3.0)
    world.idle("large")
    world.now += 3
    world.arrive("other", footprint(8, 4, 1))
    for _ in range(40):
        world.go_on(0.5)
    assert world.scheduler.jobs["large"].phase is Phase.PAGED_OUT
    world.send(ev.OutsideMemoryChanged(10 * GIB))
    world.leave("other")
    world.answer_all()
    world.send(ev.JobReady("large"))
    world.arrive("small", footprint(1, 1, 0.5))
    for _ in range(100):
        world.go_on(0.5)
    assert world.scheduler.jobs["small"].iterations_done


def test_without_paging_the_context_of_one_that_waits_does_not_take_what_another_may_need():
    world = World("fair", capacity=16, host_bytes=0)
    world.arrive("a", footprint(4, 4, 1))
    world.arrive("b", footprint(10, 0, 1))
    world.ask_for_context("b")
    assert not any(isinstance(action, act.RefuseGrowth) for action in world.want("a", footprint(4, 10.5, 1)))
    world.drain()


@pytest.mark.parametrize(
    "policy", ["fair:patience=1", "fair:by=user,patience=1", "priority:patience=1", "rr:patience=1"]
)
def test_a_job_that_waits_for_one_that_runs_alone_is_looked_at_again(policy):
    """Its patience ends while it is still ahead of the other. Nothing happens then, but that the other catches up."""
    world = World(policy=policy, quantum_s=0.02)
    world.arrive("first", footprint(10, 2), owner=1)
    for _ in range(2000):
        world.answer_all()
        if world.now > 5 and "second" not in world.places:
            world.arrive("second", footprint(10, 2), owner=2)
        for name in world.running():
            if world.places[name].holds_lease:
                world.iterate(name, gpu_time_s=0.1)
        if world.timer_s is not None and world.timer_s <= world.now:
            world.fire_timer()
    had = [job.attained_s for job in world.scheduler.jobs.values()]
    assert min(had) > 0.4 * sum(had)
