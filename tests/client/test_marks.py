"""The explicit marks, outside of Salus."""

from __future__ import annotations

import pytest

import salus


def test_marks_do_nothing_outside_of_salus():
    with salus.iteration():
        value = 1

    @salus.step
    def train(number: int) -> int:
        return number + value

    assert train(2) == 3


def test_nothing_else_is_made_up():
    with pytest.raises(AttributeError, match="no attribute 'iterations'"):
        salus.iterations  # noqa: B018
