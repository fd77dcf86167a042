"""How long an iteration takes, as the core sees it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from salus.core import events as ev
from salus.core.model import Footprint, Job, JobSpec
from tests.core.world import World, footprint


def a_job() -> Job:
    size = Footprint(1, 1)
    return Job(JobSpec("1", "me", size), 1, 0.0, size, footprint_known=True, utilization=None)


def test_in_the_first_iteration_it_is_what_that_has_taken_up_to_now():
    job = a_job()
    job.serve(0.5, 0.5 / 2, 0)
    assert job.iteration_s == 0.5
    job.serve(0.5, 0.5 / 2, 1)
    assert job.iteration_s == 1.0


def test_a_slow_start_is_forgotten():
    job = a_job()
    job.serve(3.0, 3.0 / 2, 1)
    for _ in range(30):
        job.serve(0.03, 0.03 / 2, 0)
        job.serve(0.02, 0.02 / 2, 1)
    assert job.iteration_s == pytest.approx(0.05, rel=0.1)
    assert job.ran_s == pytest.approx(4.5) and job.attained_s == pytest.approx(2.25) and job.iterations_done == 31


def test_many_at_once_count_as_many():
    one_by_one, at_once = a_job(), a_job()
    for job in (one_by_one, at_once):
        job.serve(1.0, 1.0 / 2, 1)
    for _ in range(5):
        one_by_one.serve(0.1, 0.1 / 2, 1)
    at_once.serve(0.5, 0.5 / 2, 5)
    assert at_once.iteration_s == pytest.approx(one_by_one.iteration_s)


def test_a_holder_that_is_stuck_has_none_of_the_time_of_others():
    world = World("fair", capacity=16)
    for name in "ab":
        world.arrive(name, footprint(1, 4))
    assert sorted(world.running()) == ["a", "b"], "each in a lane of its own"
    world.send(ev.IterationFinished("a", 1.0, 1))
    assert world.scheduler.jobs["a"].attained_s == 0.5 and world.scheduler.jobs["a"].ran_s == 1.0
    world.send(ev.JobStuck("b", True))
    world.send(ev.IterationFinished("a", 1.0, 1))
    assert world.scheduler.jobs["a"].attained_s == 1.5


def test_a_holder_that_waits_for_memory_has_none_of_the_time_of_others():
    world = World("fair", capacity=16)
    for name in "ab":
        world.arrive(name, footprint(1, 4))
    assert sorted(world.running()) == ["a", "b"], "each in a lane of its own"
    world.want("b", footprint(9, 4))
    assert world.scheduler.jobs["b"].stalled and world.scheduler.jobs["b"].holds
    world.send(ev.IterationFinished("a", 1.0, 1))
    assert world.scheduler.jobs["a"].attained_s == 1.0


def test_what_is_left_by_iterations_is_in_the_gpus_time():
    job = a_job()
    job.spec = replace(job.spec, iterations=10)
    for _ in range(5):
        job.serve(1.0, 0.5, 1)
    assert job.remaining_s == pytest.approx(2.5)
