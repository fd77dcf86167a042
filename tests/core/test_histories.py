"""Whole histories of events, made up by Hypothesis, through every policy.

After every event and every single action: the safety condition, one lease a lane, no lease for a job that is not ready
(`World` and `Scheduler.validate` check them). At the end every accepted job must be able to finish.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from salus.core import events as ev
from salus.core.actions import RefuseGrowth
from salus.core.model import Footprint, Phase
from tests.core.world import CLASSES, GIB, World, make_policy

UNIT = GIB // 2
CAPACITY = 16
POLICIES = [
    *sorted(CLASSES),
    "fair:by=memory",
    "fair:by=user",
    "fair:by=user-memory",
    "priority:by=user",
    "srtf:fill=off",
]

# Long histories of many jobs: the interesting states need several jobs that get in each other's way.
EVERYTHING = (
    "arrive arrive arrive arrive ready ready idle run run run run run yields yields answer answer answer fails stuck "
    "timer wait leave want want measure utilize policy door door"
).split()
BY_PERSONS = [*EVERYTHING, "pause", "pause", "resume", "change"]
WITHIN_FOOTPRINTS = [what for what in BY_PERSONS if what not in ("want", "measure")]
NEEDS = st.tuples(st.integers(0, 12), st.integers(0, 14), st.integers(0, 2))
NO_INTERNAL = st.tuples(st.integers(0, 12), st.integers(0, 14), st.just(0))

History = list[tuple[str, int, tuple[int, int, int]]]


def histories(kinds: list[str], needs: st.SearchStrategy = NEEDS) -> st.SearchStrategy[History]:
    return st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 40), needs), min_size=50, max_size=120)


def play(world: World, history: History) -> None:
    arrived = 0
    for what, which, (persistent, ephemeral, internal) in history:
        jobs = sorted(world.places)
        job_id = jobs[which % len(jobs)] if jobs else None
        needs = Footprint(persistent * UNIT, ephemeral * UNIT, internal * UNIT)
        if what == "arrive":
            arrived += 1
            world.arrive(
                f"job{arrived:02}",
                needs,
                ready=which % 3 != 0,
                footprint_known=which % 5 != 0,
                owner=which % 2,
                priority=which % 3,
                weight=1 + which % 4,
                owner_weight=1 + which % 2,
                length_s=None if which % 7 == 0 else float(which),
                utilization=None if which % 2 else (which % 11) / 10,
            )
        elif what == "fails":
            world.fail_page_out()
        elif what == "answer" and world.answers:
            world.answer()
        elif what == "timer":
            world.fire_timer()
        elif what == "wait":
            world.now += which
        elif what == "policy":
            world.send(ev.PolicyChanged(make_policy(POLICIES[which % len(POLICIES)])))
        elif what == "run" and world.running():
            runner = world.running()[which % len(world.running())]
            if not world.places[runner].stalled:
                world.iterate(runner, gpu_time_s=0.01 * (1 + which % 5), iterations=1)
        elif what == "yields" and world.running():
            runner = world.running()[which % len(world.running())]
            world.announce(runner)
            if which % 2 and not world.places[runner].stalled:
                world.iterate(runner)
        elif job_id is None:
            continue
        elif what == "pause":
            world.pause(job_id)
        elif what == "resume":
            world.resume(job_id)
        elif what == "change":
            world.send(ev.JobChanged(job_id, weight=1 + which % 4, priority=which % 3))
        elif what == "stuck":
            world.send(ev.JobStuck(job_id, which % 2 == 0))
        elif what == "leave":
            world.leave(job_id)
        elif what == "ready":
            world.send(ev.JobReady(job_id))
        elif what == "door":
            world.ask_for_context(job_id, wanted=which % 4 != 0)
        elif what == "utilize":
            world.send(ev.UtilizationMeasured(job_id, (which % 11) / 10))
        elif what == "idle" and not world.places[job_id].stalled:
            world.idle(job_id)
        elif what == "want":
            if world.places[job_id].holds_lease and not world.places[job_id].stalled:
                world.want(job_id, needs)
        elif what == "measure" and not world.places[job_id].stalled:
            world.measure(job_id, needs)
        check_work_conserving(world)


def check_work_conserving(world: World) -> None:
    """Ready jobs in lanes never all stand still, and pack and rr leave no lane idle that has one."""
    scheduler = world.scheduler
    competing = [job for job in scheduler.jobs.values() if job.competing]
    blocked = {job.lane for job in scheduler.jobs.values() if job.stalled and job.lane is not None}
    free_to_run = [job for job in competing if job.lane not in blocked]
    if free_to_run:
        assert any(place.holds_lease for place in world.places.values()), [job.job_id for job in free_to_run]
    if scheduler.policy.name in ("pack", "rr"):
        taken = {place.lane for place in world.places.values() if place.holds_lease}
        idle = [job.job_id for job in free_to_run if job.lane not in taken]
        assert not idle, f"{idle} could have used their lanes"


@settings(max_examples=400, deadline=None)
@given(histories(BY_PERSONS), st.sampled_from(POLICIES), st.sampled_from([0.0, 0.02]), st.booleans())
def test_every_history_is_safe_and_every_accepted_job_finishes(history, policy, quantum_s, share):
    world = World(policy=policy, capacity=CAPACITY, quantum_s=quantum_s, share_between_users=share)
    play(world, history)
    world.drain()
    refused = [action for action in world.log if isinstance(action, RefuseGrowth)]
    assert not refused, "nothing here is larger than the GPU, so nobody's memory may be refused"


@pytest.mark.parametrize("seed", [7064, 1008400, 5001178])
def test_no_two_jobs_displace_each_other_for_ever(seed):
    """Found among 20,000: a newcomer was let in before a more urgent job, which had it leave again, and so on."""
    rng = random.Random(seed)
    history = [
        (rng.choice(EVERYTHING), rng.randint(0, 40), (rng.randint(0, 12), rng.randint(0, 14), rng.randint(0, 2)))
        for _ in range(rng.randint(50, 120))
    ]
    world = World(
        policy=rng.choice(POLICIES),
        capacity=CAPACITY,
        quantum_s=rng.choice([0.0, 0.02, 0.02, 1.0]),
        share_between_users=rng.random() < 0.7,
        now=rng.choice([0.0, 1e6]),
    )
    play(world, history)
    for _ in range(rng.choice([0, 40])):
        world.now += 5
        world.go_on(rng.choice([0.01, 0.3]))
    play(world, [event for event in history if event[0] != "arrive"][:60])
    world.drain()


@settings(max_examples=200, deadline=None)
@given(histories(BY_PERSONS, NO_INTERNAL), st.sampled_from(POLICIES), st.sampled_from([0.0, 0.02]))
def test_jobs_that_are_idle_are_never_in_the_way_of_those_that_are_not(history, policy, quantum_s):
    # Internal memory is what an idle job cannot give up.
    world = World(policy=policy, capacity=CAPACITY, quantum_s=quantum_s)
    play(world, history)
    world.drain(idle_to_the_end=True)


@settings(max_examples=200, deadline=None)
@given(histories(BY_PERSONS), st.sampled_from(POLICIES), st.sampled_from([0, 4 * GIB]))
def test_without_or_with_little_host_memory_every_history_is_still_safe(history, policy, host_bytes):
    world = World(policy=policy, capacity=CAPACITY, host_bytes=host_bytes)
    play(world, history)


@settings(max_examples=200, deadline=None)
@given(histories(WITHIN_FOOTPRINTS), st.sampled_from(POLICIES))
def test_without_paging_jobs_that_keep_to_their_footprint_all_finish(history, policy):
    world = World(policy=policy, capacity=CAPACITY, host_bytes=0)
    play(world, history)
    world.drain()
    assert not any(job.phase is Phase.PAGED_OUT for job in world.scheduler.jobs.values())


@settings(max_examples=100, deadline=None)
@given(histories(BY_PERSONS), st.sampled_from(POLICIES))
def test_the_same_events_give_the_same_actions(history, policy):
    first, second = (World(policy=policy, capacity=CAPACITY, quantum_s=0.02) for _ in range(2))
    play(first, history)
    play(second, history)
    assert first.log == second.log


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 14), st.integers(1, 3)), min_size=2, max_size=6),
    st.sampled_from(
        ["fair:patience=20", "fair:by=memory,patience=20", "fair:by=user,patience=20", "rr:patience=20", "las"]
    ),
)
# Two that were kept out for longer than is owed to them come in together, at the same mark, again and again.
@example([(1, 13, 2), (9, 0, 1), (1, 13, 2), (9, 1, 1), (9, 12, 1)], "fair:patience=20")
# One that has its memory and comes back to a lane, where another has waited for as long.
@example([(5, 10, 2), (9, 1, 1), (9, 1, 1), (9, 9, 1)], "fair:patience=20")
def test_nobody_starves_under_fair_rr_and_las_also_behind_jobs_that_never_end(listed, policy):
    """Always ready, never done; only timers that were asked for. Everybody must run, and run again."""
    world = World(policy=policy, capacity=CAPACITY, quantum_s=2.0)
    for number, (persistent, ephemeral, weight) in enumerate(listed):
        world.arrive(f"job{number}", Footprint(persistent * UNIT, ephemeral * UNIT), weight=weight)
    # Least attained service doubles what a job must be behind, so a second round would take for ever longer.
    for _ in range(1 if policy == "las" else 2):
        waiting = set(world.places)
        for _ in range(2000):
            world.answer_all()
            for name in world.running():
                # A switch in mid-loop may have taken the lease away.
                if world.places[name].holds_lease:
                    world.iterate(name, gpu_time_s=1.0)
                    waiting.discard(name)
            if world.timer_s is not None and world.timer_s <= world.now:
                world.fire_timer()
            if not waiting:
                break
        assert not waiting, f"{sorted(waiting)} starve at {world.now:.0f} s"
