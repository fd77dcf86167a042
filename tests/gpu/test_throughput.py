"""What `throughput` makes of the times that jobs tell; needs no GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.gpu.throughput import Done, Turn, compare

ITERATION_S, SWITCH_S, PROCESSOR_S = 0.02, 0.005, 0.0003
A_TURN = 120
"""Iterations."""


def told(
    rounds: int = 4, *, lease: int = 20, slower_at_once: float = 1.0, slow_job: float = 1.0, weather: float = 0.0,
    drift: float = 1.0,
) -> dict[str, Any]:  # fmt: skip
    """Of three jobs that, at once, take turns of `lease` iterations and pay for each switch.

    Of each turn the processor's speed is off by `weather`, more or less, which it tells; and by `drift` from one to the
    next, of which it says nothing.
    """
    now, drifted, die = 0.0, 1.0, random.Random(1)
    done: list[list[Done]] = [[], [], []]
    turns = []
    for alone in [None, *[turn for number in range(3 * rounds) for turn in (number % 3, None)]]:
        began, slower = now, 1 + die.uniform(-weather, weather)
        for number in range(A_TURN // lease):
            job = number % 3 if alone is None else alone
            now += SWITCH_S if alone is None else 0.0
            for _ in range(lease):
                now += ITERATION_S * slower * drifted * (slower_at_once if alone is None else 1.0)
                now += ITERATION_S * (slow_job - 1) * (job == 2)
                done[job].append(Done(now, PROCESSOR_S * slower))
        turns.append(Turn(alone, began, now))
        drifted *= drift
    return compare(done, turns)


WITHOUT_SWITCHES = 20 * ITERATION_S / (20 * ITERATION_S + SWITCH_S)


def test_what_a_switch_costs_is_seen_in_every_way():
    found = told()
    assert found["switch_ms"] == pytest.approx(1000 * SWITCH_S)
    assert found["lease_s"] == pytest.approx(20 * ITERATION_S + SWITCH_S)
    for how in ("by_turns", "at_equal_speed", "by_leases"):
        assert found[how] == pytest.approx(WITHOUT_SWITCHES, rel=0.002)


def test_jobs_that_are_slower_beside_others_are_seen_by_turns():
    found = told(slower_at_once=1.1)
    assert (
        found["by_turns"] == pytest.approx(found["at_equal_speed"]) == pytest.approx(WITHOUT_SWITCHES / 1.1, rel=0.01)
    )
    assert found["by_leases"] > 0.98


def test_one_job_that_is_slower_than_the_others_adds_nothing_to_what_is_not_known():
    assert told(slow_job=1.2)["by_turns_error"] < 0.001


def test_a_machine_that_becomes_slower_and_slower_does_not_matter():
    assert told(drift=1.02)["by_turns"] == pytest.approx(told()["by_turns"], rel=0.003)


def test_what_comes_of_the_processor_is_taken_out_as_far_as_it_is_told():
    found = told(30, weather=0.2)
    assert found["by_turns_error"] > 0.005
    assert found["at_equal_speed_error"] < 0.0005
    assert found["at_equal_speed"] == pytest.approx(WITHOUT_SWITCHES, rel=0.002)
    assert found["processor_slope"] == pytest.approx(1, abs=0.05)


def test_leases_of_few_iterations_cannot_be_compared_with_themselves():
    assert told(lease=4)["by_leases"] is None
