"""The short way of a lease: it does all that `begin` and `end` do, or nothing."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from salus.client import turns
from salus.client.lease import Lease
from salus.protocol.page import PAUSE_NS, JobState, Word


@pytest.fixture
def lease() -> Lease:
    held = Lease(Path("/nowhere"), "1", "token")
    held._holding = True
    held._words[Word.STATE] = JobState.BETWEEN
    return held


def test_both_ways_leave_the_same_on_the_page(lease):
    quick = lease.usual()
    assert quick is not None
    begin, end = quick
    found = []
    for starts, stops in ((lease.begin, lease.end), (begin, lambda: end(1))):
        lease._words[:] = memoryview(bytearray(len(lease._words) * 8)).cast("Q")
        for _ in range(3):
            assert starts() in (None, True)
            assert lease._words[Word.STATE] == JobState.ITERATING and lease._words[Word.BEGAN_NS]
            time.sleep(0.001)
            assert stops() in (None, True)
        words = lease._words
        assert words[Word.BUSY_NS] >= 3_000_000 and lease._ended_ns
        found.append([words[word] for word in (Word.STATE, Word.ITERATIONS, Word.BOUNDARIES, Word.BEGAN_NS)])
    assert found[0] == found[1]


def test_it_does_nothing_where_somebody_waits_or_the_lease_is_being_given_up(lease):
    begin, end = lease.usual()  # type: ignore[misc]
    words = lease._words

    def refuses() -> bool:
        before = bytes(words)
        return begin() is False and bytes(words) == before

    words[Word.REVOKE] = 1
    assert refuses() and end(1) is False
    words[Word.REVOKE] = 0
    with lease._lock:
        assert refuses() and end(1) is False
    lease._holding = False
    assert refuses()
    lease._holding = True
    assert begin() is True and end(1) is True


def test_one_that_waits_for_a_lease_is_not_said_to_be_between_iterations(lease):
    begin, _ = lease.usual()  # type: ignore[misc]
    lease._holding, lease._words[Word.STATE] = False, JobState.WAITING
    assert begin() is False and lease._words[Word.STATE] == JobState.WAITING


def test_who_is_interrupted_on_the_way_in_has_not_begun(lease):
    class Interrupting:
        def locked(self) -> bool:
            raise KeyboardInterrupt

    begin, _ = lease.usual()  # type: ignore[misc]
    lease._lock = Interrupting()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        begin()
    assert lease._words[Word.STATE] == JobState.BETWEEN and not lease._words[Word.BEGAN_NS]
    lease._lock = threading.Lock()


def test_one_that_is_taken_to_another_page_while_it_ends_brings_everything_along(lease, monkeypatch):
    begin, end = lease.usual()  # type: ignore[misc]
    assert begin() is True
    new = memoryview(bytearray(4096)).cast("Q")
    new[Word.STATE] = JobState.ITERATING

    def taken_over() -> int:
        lease._words = new
        return time.monotonic_ns()

    monkeypatch.setattr("salus.client.lease._now_ns", taken_over)
    assert end(1) is True
    assert (new[Word.STATE], new[Word.ITERATIONS], new[Word.BEGAN_NS]) == (JobState.BETWEEN, 1, 0)


class Staying:
    """Memory whose job stays in its lane, or not."""

    def __init__(self) -> None:
        self.stays, self.can = False, True

    def stay(self) -> bool:
        self.stays = self.can
        return self.can


def test_with_memory_the_job_stays_in_its_lane_between_iterations_and_a_pause_is_its_time_too(lease):
    lease._memory = memory = Staying()  # type: ignore[assignment]
    begin, end = lease.usual()  # type: ignore[misc]
    assert memory.stays and begin() and end(1)
    words = lease._words
    ended, busy = words[Word.BEGAN_NS], words[Word.BUSY_NS]
    assert ended, "the device may work on"
    assert begin() and words[Word.BUSY_NS] == busy + min(words[Word.BEGAN_NS] - ended, PAUSE_NS)
    assert end(0) and words[Word.ITERATIONS] == 1 and words[Word.BOUNDARIES] == 2
    memory.stays = False  # it left, or an iteration ended another way
    before = bytes(words)
    assert begin() is False and bytes(words) == before


def test_who_does_not_hold_the_lease_or_cannot_stay_in_the_lane_has_no_short_way(lease):
    lease._memory = memory = Staying()  # type: ignore[assignment]
    lease._holding = False
    assert lease.usual() is None and not memory.stays
    lease._holding, memory.can = True, False
    assert lease.usual() is None


def test_one_that_is_taken_to_another_page_while_it_begins_brings_everything_along(lease):
    """The helper must not take it for one that sits between iterations, on the new page either."""
    begin, _ = lease.usual()  # type: ignore[misc]
    new = memoryview(bytearray(4096)).cast("Q")
    new[Word.STATE] = JobState.BETWEEN

    class Old(list):
        def __setitem__(self, index, value):
            super().__setitem__(index, value)
            if index == Word.BEGAN_NS:
                lease._words = new
                assert lease._iterates()

    lease._words = Old([0] * 64)  # type: ignore[assignment]
    assert begin() is True and lease._words is new
    assert new[Word.STATE] == JobState.ITERATING and new[Word.BEGAN_NS]


def test_a_helper_that_gives_the_lease_up_and_a_script_that_begins_never_both_go_ahead(lease):
    """As the helper does it: with the lock, it looks at the state, and then the lease is not the script's any more."""
    begin, end = lease.usual()  # type: ignore[misc]
    stop = threading.Event()
    given_up = both = begun = 0

    def helper() -> None:
        nonlocal given_up
        while not stop.is_set():
            with lease._lock:
                if not lease._iterates() and lease._holding:
                    time.sleep(1e-5)  # waits for the device
                    lease._holding = False
                    given_up += 1

    was = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=helper)
    thread.start()
    try:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            if begin():
                begun += 1
                for _ in range(20):
                    both += not lease._holding
                while not end(1):
                    both += not lease._holding
            else:
                with lease._lock:
                    lease._holding = True
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(was)
    assert given_up and begun and not both


def test_a_thread_that_is_about_to_begin_keeps_its_lease(lease, monkeypatch):
    """The script ends, or another of its threads is asked for the lease, at that very moment."""
    given_up = []
    monkeypatch.setattr(lease, "_yield", lambda *, wants_more: given_up.append(wants_more) or True)
    lease._attached, lease._begins = True, True
    lease._before_exit()
    lease._words[Word.REVOKE] = 1
    lease._take()
    assert not given_up and lease._words[Word.STATE] == JobState.ITERATING
    lease._begins = False
    lease._words[Word.STATE] = JobState.BETWEEN
    lease._before_exit()
    assert given_up == [False]
    lease._attached = False


def test_while_an_iteration_is_open_there_is_no_short_way_and_memory_is_left_alone(lease):
    lease._memory = memory = Staying()  # type: ignore[assignment]
    lease._words[Word.STATE] = JobState.ITERATING
    done: list[int] = []
    lease.between_iterations(lambda: done.append(1))
    assert lease.usual() is None and not memory.stays and not done
    lease._words[Word.STATE] = JobState.BETWEEN
    lease.between_iterations(lambda: done.append(1))
    assert lease.usual() is not None and memory.stays and done == [1]


# Iterations that follow one another.


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def turn(lease, told):
    lease.begin()
    lease.end()
    running_on = lease.run_on(lambda: told.append("sits"))
    assert running_on is not None
    return running_on.end


def test_one_call_ends_an_iteration_and_begins_the_next(lease, turn):
    words = lease._words
    for number in range(3):
        time.sleep(0.001)
        began = words[Word.BEGAN_NS]
        assert turn(1) is True
        assert words[Word.BEGAN_NS] > began and words[Word.STATE] == JobState.RUNNING_ON
        assert words[Word.ITERATIONS] == words[Word.BOUNDARIES] == number + 2
    assert words[Word.BUSY_NS] >= 3_000_000


def test_it_does_nothing_where_somebody_waits_or_it_is_over(lease, turn):
    words = lease._words

    def refuses() -> bool:
        before = bytes(words)
        return turn(1) is False and bytes(words) == before

    words[Word.REVOKE] = 1
    assert refuses()
    words[Word.REVOKE] = 0
    lease.goes_on()
    assert words[Word.STATE] == JobState.ITERATING and refuses()
    lease.end()
    assert refuses()


def test_one_that_is_taken_to_another_page_loses_no_iteration_and_sees_it_at_the_next_one(lease, turn):
    new = memoryview(bytearray(4096)).cast("Q")
    taken = threading.Event()

    def take_over() -> None:
        time.sleep(0.01)
        turns.move(lease._words, new)
        taken.set()

    was = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=take_over)
    thread.start()
    count, until = 1, time.monotonic() + 10  # one before it ran on
    try:
        while turn(1) and time.monotonic() < until:
            count += 1
        assert taken.wait(10)
    finally:
        thread.join()
        sys.setswitchinterval(was)
    assert turn(1) is False
    assert new[Word.ITERATIONS] == count == new[Word.BOUNDARIES] and new[Word.STATE] == JobState.RUNNING_ON


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_iteration_that_may_have_been_a_pause_ends_it_and_is_not_counted_in_full(lease, turn, goes_on):
    words = lease._words
    words[Word.BEGAN_NS] -= 5 * PAUSE_NS
    assert turn(1) is False
    if goes_on:
        lease.goes_on()
    lease.end(1)
    assert PAUSE_NS <= words[Word.BUSY_NS] < 2 * PAUSE_NS and words[Word.STATE] == JobState.BETWEEN


def test_nobody_gives_the_lease_of_one_that_runs_on_away(lease, turn):
    lease._ended_ns = lease._rested_ns = 0
    with lease._lock:
        assert lease._give_up_if_idle() is False
    assert turn(1) is True


@pytest.mark.parametrize("word", [Word.REVOKE, Word.CONTENDED])
def test_who_is_waited_for_does_not_run_on(lease, word):
    lease._words[word] = 1
    assert lease.run_on(lambda: None) is None and lease._words[Word.STATE] == JobState.BETWEEN


def test_nor_who_has_sat_lately_or_had_a_long_iteration(lease, monkeypatch):
    begin, end = lease.usual()  # type: ignore[misc]
    assert begin() and end(1)
    lease._ended_ns -= 100_000_000
    assert begin() and end(1)
    assert lease.run_on(lambda: None) is None
    assert begin()
    lease._words[Word.BEGAN_NS] -= 2_000_000_000
    assert end(1)
    assert lease.run_on(lambda: None) is None
    assert begin() and end(1)
    assert lease.run_on(lambda: None) is not None
