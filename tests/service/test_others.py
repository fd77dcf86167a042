"""Totals of the jobs that may not be seen: their part of the time, lately and altogether."""

from __future__ import annotations

import pytest

from salus.cli.others import others_line
from salus.service.others import WINDOW_S, Shares

ALICE, BOB = 1001, 1002


def is_bob(uid: int) -> bool:
    return uid == BOB


def test_a_share_is_that_of_the_last_seconds_and_of_all_users():
    shares = Shares()
    assert shares.lately(is_bob) == 0.0
    for second in range(60):
        shares.mark(float(second))
        shares.add(ALICE, 0.9 if second < 30 else 0.25)
        shares.add(BOB, 0.1 if second < 30 else 0.75)
    assert shares.lately(is_bob) == pytest.approx(0.25)
    assert shares.lately(lambda _uid: False) == pytest.approx(1.0)
    assert shares.lately(lambda _uid: True) == 0.0
    assert shares.had_s(is_bob) == pytest.approx(30 * 0.9 + 30 * 0.25)
    assert len(shares._marks) <= WINDOW_S + 2, "what is kept for it is bounded"


def test_the_line_of_others_is_there_only_where_there_are_some():
    others = {"jobs": 1, "running": 1, "memory_bytes": 3 << 30, "gpu_time_s": 5.0, "share": 0.481}
    assert others_line({"others": others}) == "others: 1 job, 3 GiB, 48% of the device's time"
    assert others_line({"others": {**others, "jobs": 0}}) is None
    assert others_line({}) is None, "a service of another version"
