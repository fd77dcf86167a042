"""A short day of use. `make day` is a long one."""

from __future__ import annotations

from tests.faults.day import Day


def test_in_the_evening_all_books_agree_with_what_happened(tmp_path):
    day = Day(jobs=8, seed=3, folder=tmp_path)
    day.run()
    assert len(day.over) == 8
