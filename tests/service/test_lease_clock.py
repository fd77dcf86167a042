"""What a lease costs its holder."""

from __future__ import annotations

import pytest

from salus.service.lease_clock import LeaseClock


def test_a_job_that_uses_its_lease_is_charged_what_it_says():
    clock = LeaseClock(0.0)
    charged = [clock.charge(0.0095, 0.01 * step, others_wait=True) for step in range(1, 11)]
    assert charged == pytest.approx([0.0095] * 10)


def test_a_job_that_says_nothing_is_charged_the_time_for_which_others_waited():
    clock = LeaseClock(0.0)
    assert clock.charge(0.0, 0.004, others_wait=True) == 0.0, "nobody wakes up at once"
    assert sum(clock.charge(0.0, 0.01 * step, others_wait=True) for step in range(1, 11)) == pytest.approx(0.1)


def test_while_nobody_waits_a_job_is_believed():
    clock = LeaseClock(0.0)
    assert clock.charge(0.0, 100.0, others_wait=False) == 0.0
    assert clock.charge(0.5, 101.0, others_wait=False) == 0.5
    assert clock.charge(0.0, 101.004, others_wait=True) == 0.0, "only from then on do others wait"


def test_time_that_a_job_counts_late_is_not_charged_twice():
    clock = LeaseClock(0.0)
    assert clock.charge(0.0, 0.1, others_wait=True) == pytest.approx(0.1)
    assert clock.charge(0.1, 0.1, others_wait=True) == pytest.approx(0.0)
    assert clock.charge(0.1, 0.2, others_wait=True) == pytest.approx(0.1)
