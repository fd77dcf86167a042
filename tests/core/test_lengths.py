"""How long a lease lasts: a quantum at first, and longer and longer between jobs that go on taking turns."""

from __future__ import annotations

from itertools import pairwise

import pytest

from salus.core import actions as act
from salus.core import events as ev
from salus.core.leases import GROWS, LONGEST_LEASE_S
from tests.core.world import World, footprint, make_policy

QUANTUM_S, ITERATION_S = 0.02, 0.01
FULL_S = LONGEST_LEASE_S / GROWS + 2
"""After so long they do not grow any more."""
SLACK_S = 3.1 * ITERATION_S
"""A lease ends at a boundary; and where two have had equally much, one goes on until that is looked at again."""


def sharing(policy: str = "fair", names: str = "ab", quantum_s: float = QUANTUM_S, **of_each: tuple[int, ...]) -> World:
    """A world in which these jobs share the only lane. `of_each`: weight=(1, 2), say."""
    world = World(policy, quantum_s=quantum_s)
    for number, name in enumerate(names):
        world.arrive(name, footprint(1, 10), **{what: values[number] for what, values in of_each.items()})
    assert len(world.sizes) == 1
    return world


def play(world: World, seconds: float, **iteration_s: float) -> list[tuple[float, str]]:
    """Whoever holds the lease iterates. When each lease began, and whose it was."""
    until, granted = world.now + seconds, []
    while world.now < until:
        (name,) = world.running()
        if not granted or granted[-1][1] != name:
            granted.append((world.now, name))
        ends_at, told_at = world.now + iteration_s.get(name, ITERATION_S), world.now
        while world.timer_s is not None and world.timer_s <= ends_at:
            # In the middle of an iteration. As the service does, it looks at the page first.
            world.now = max(world.now, world.timer_s)
            world.send(ev.IterationFinished(name, world.now - told_at, 0))
            told_at = world.now
            world.fire_timer()
        world.iterate(name, ends_at - world.now)
    return granted


def lengths(granted: list[tuple[float, str]]) -> list[float]:
    """Without the first one, which may have begun before, and the last, which has yet to end."""
    return [after - before for (before, _), (after, _) in pairwise(granted[1:])]


@pytest.mark.parametrize("policy", ["fair", "rr", "las", "priority"])
def test_leases_of_jobs_that_take_turns_grow_up_to_a_limit(policy):
    world = sharing(policy)
    at_first = lengths(play(world, 2))
    assert max(at_first) <= QUANTUM_S + SLACK_S
    play(world, 28)
    later = lengths(play(world, 10))
    assert min(later) >= 30 * GROWS and max(later) <= 40 * GROWS + SLACK_S
    play(world, FULL_S)
    at_last = lengths(play(world, 10))
    assert min(at_last) >= LONGEST_LEASE_S - ITERATION_S and max(at_last) <= LONGEST_LEASE_S + SLACK_S


def test_at_every_moment_shares_are_off_by_no_more_than_a_part_of_the_time_that_was_shared():
    world, had = sharing(names="abc"), dict.fromkeys("abc", 0.0)
    for until in (5, 10, 20, 50, 120):
        granted = [*play(world, until - world.now), (world.now, "")]
        for (before, name), (after, _) in pairwise(granted):
            had[name] += after - before
        assert max(had.values()) - min(had.values()) <= until * GROWS + SLACK_S


def test_one_that_joins_is_shared_with_by_the_quantum_again():
    world = sharing()
    play(world, FULL_S)
    world.arrive("c", footprint(1, 10))
    granted = play(world, 2)
    assert {name for _, name in granted} == set("abc")
    assert max(lengths(granted)) <= QUANTUM_S + SLACK_S


def test_one_that_was_away_does_not_wait_for_a_long_lease_to_end():
    world = sharing(names="abc")
    play(world, FULL_S)
    world.idle("c")
    play(world, 5)
    before = world.running()
    while world.running() == before:
        play(world, ITERATION_S)
    (holder,), came = world.running(), world.now
    world.send(ev.JobReady("c"))
    granted = play(world, 0.2)
    assert [name for _, name in granted[:2]] == [holder, "c"]
    assert granted[1][0] - came <= QUANTUM_S + SLACK_S
    # From then on they take turns as they did before.
    play(world, 1)
    assert min(lengths(play(world, 5))) >= 0.9 * LONGEST_LEASE_S


def test_nor_for_those_before_it_in_the_order():
    world = sharing(names="abcd")
    play(world, FULL_S)
    world.idle("d")
    play(world, 5)
    came = world.now
    world.send(ev.JobReady("d"))
    *_, (began, _) = (lease for lease in play(world, 0.4) if lease[1] == "d")
    assert began - came <= 3 * (QUANTUM_S + SLACK_S)


def test_a_more_urgent_one_does_not_wait_for_a_long_lease_to_end():
    world = sharing("priority")
    world.arrive("urgent", footprint(1, 10), ready=False, priority=1)
    play(world, FULL_S)
    came = world.now
    world.send(ev.JobReady("urgent"))
    granted = play(world, 0.2)
    assert granted[1][1] == "urgent" and granted[1][0] - came <= QUANTUM_S + SLACK_S


@pytest.mark.parametrize("policy", ["fair", "rr"])
def test_with_iterations_of_different_lengths_leases_are_not_much_longer(policy):
    world = sharing(policy)
    play(world, FULL_S, a=0.024, b=0.031)
    found = lengths(play(world, 20, a=0.024, b=0.031))
    assert max(found) <= 1.2 * LONGEST_LEASE_S and min(found) >= 0.8 * LONGEST_LEASE_S


def longest_wait_s(granted: list[tuple[float, str]], name: str) -> float:
    ended = [after for (_, who), (after, _) in pairwise(granted) if who == name]
    began = [at for at, who in granted[1:] if who == name]
    return max(again - before for before, again in zip(ended, began[granted[0][1] != name :], strict=False))


def test_who_has_little_weight_does_not_wait_for_long_to_be_made_up_for_one_long_lease():
    world = sharing(weight=(1, 20))
    play(world, FULL_S)
    assert longest_wait_s(play(world, 30), "a") < 3 * LONGEST_LEASE_S


def test_who_has_short_iterations_does_not_either_where_those_are_counted():
    world = sharing("rr")
    play(world, FULL_S, b=0.2)
    assert longest_wait_s(play(world, 30, b=0.2), "a") < 3 * LONGEST_LEASE_S


def test_one_that_will_not_run_for_long_makes_no_leases_short():
    world = sharing("priority", names="abc", priority=(1, 1, 0))
    play(world, FULL_S)
    granted = play(world, 10)
    assert {name for _, name in granted} == {"a", "b"} and min(lengths(granted)) >= 0.9 * LONGEST_LEASE_S


def test_nor_does_another_policy():
    world = sharing()
    play(world, FULL_S)
    world.send(ev.PolicyChanged(make_policy("priority")))
    play(world, 2)
    assert min(lengths(play(world, 10))) >= 0.9 * LONGEST_LEASE_S


def test_a_quantum_of_zero_switches_at_every_boundary_for_ever():
    world = sharing(quantum_s=0.0)
    play(world, FULL_S)
    assert max(lengths(play(world, 5))) <= 1.5 * ITERATION_S


def test_a_longer_quantum_is_longer_still():
    world = sharing(quantum_s=2 * LONGEST_LEASE_S)
    play(world, FULL_S)
    assert min(lengths(play(world, 20))) >= 2 * LONGEST_LEASE_S


def test_nobody_is_asked_in_the_middle_of_a_long_lease_of_the_only_lane():
    world = sharing()
    play(world, FULL_S)
    world.log.clear()
    leases = len(play(world, 10))
    assert sum(isinstance(action, act.SetTimer) for action in world.log) <= 2 * leases
