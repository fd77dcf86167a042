"""What `throughput` makes of the times that jobs tell; needs no GPU."""

from __future__ import annotations

import pytest

from tests.gpu.throughput import ALONE, AT_ONCE, TURN, compare

ITERATION_S, SWITCH_S, LEASE = 0.02, 0.005, 16


def a_run(blocks: list[str], slower_at_once: float = 1.0) -> list[list[float]]:
    """Three jobs that take turns of `LEASE` iterations in blocks at once, and pay for each switch."""
    now, ended = 0.0, [[] for _ in range(3)]
    for how in blocks:
        turn = LEASE if how == AT_ONCE else TURN
        for job in [*range(3)] * (TURN // turn):
            now += SWITCH_S
            for _ in range(turn):
                now += ITERATION_S * (slower_at_once if how == AT_ONCE else 1.0)
                ended[job].append(now)
    return ended


def test_what_a_switch_costs_is_seen_in_both_ways():
    blocks = [AT_ONCE, *[ALONE, AT_ONCE] * 4]
    told = compare(a_run(blocks), blocks, settles=1)
    whole_s = LEASE * ITERATION_S
    assert told["switch_ms"] == pytest.approx(1000 * SWITCH_S)
    assert told["by_leases"] == pytest.approx(whole_s / (whole_s + SWITCH_S))
    assert told["lease_s"] == pytest.approx(whole_s + SWITCH_S)
    assert told["by_blocks"] == pytest.approx(told["by_leases"], rel=0.005)
    assert told["while_they_grow"] == [pytest.approx(told["by_leases"])]


def test_jobs_that_are_slower_beside_others_are_seen_by_blocks():
    blocks = [ALONE, AT_ONCE] * 4
    told = compare(a_run(blocks, slower_at_once=1.1), blocks, settles=0)
    assert told["by_blocks"] < 0.92


def test_leases_of_few_iterations_cannot_be_compared_with_themselves(monkeypatch):
    monkeypatch.setattr("tests.gpu.test_throughput.LEASE", TURN // 32)
    blocks = [ALONE, AT_ONCE] * 4
    told = compare(a_run(blocks), blocks, settles=0)
    assert told["by_leases"] is None and told["by_blocks"] < 0.96
