"""When a lease that was announced is looked for, and when it is slept for."""

from __future__ import annotations

import random

from salus.client import foresight
from salus.client.foresight import Foresight

MS = 1_000_000


def taught(*took_ms: float, at_first_ns: int = 0) -> Foresight:
    seen = Foresight(at_first_ns)
    for number, took in enumerate(took_ms):
        seen.window(number, 0)
        seen.came(number, int(took * MS))
    return seen


def test_while_nothing_is_known_it_is_looked_for_from_the_beginning():
    assert Foresight(2 * MS).window(1, 100) == (100, 100 + 2 * MS)
    opens, closes = Foresight(0).window(1, 100)
    assert opens == closes == 100, "or not at all"


def test_one_that_always_takes_as_long_is_looked_for_around_that_time():
    opens, closes = taught(*[10] * 20).window(99, 500 * MS)
    assert opens == 510 * MS - foresight.EARLY_NS and closes == 510 * MS + foresight.LATE_NS


def test_one_that_varies_a_little_is_found_nearly_always_and_most_of_the_time_is_slept():
    rng = random.Random(0)
    seen, found, looked = taught(*[rng.gauss(10, 0.3) for _ in range(50)]), 0, 0
    for number in range(100, 1100):
        took = int(rng.gauss(10, 0.3) * MS)
        opens, closes = seen.window(number, 0)
        found += opens <= took <= closes
        looked += max(0, min(took, closes) - opens)
        seen.came(number, took)
    assert found > 950 and looked < 1000 * 2 * MS


def test_one_that_cannot_be_foreseen_is_not_looked_for():
    rng = random.Random(0)
    opens, closes = taught(*[rng.choice((1, 60)) for _ in range(50)]).window(99, 0)
    assert opens == closes == 0


def test_who_is_woken_for_something_else_goes_on_to_wait_for_the_same():
    seen = taught(*[10] * 20)
    first = seen.window(99, 500 * MS)
    assert seen.window(99, 503 * MS) == first
    seen.came(98, 504 * MS)
    assert seen.window(99, 505 * MS) == first, "what it did not wait for says nothing"
