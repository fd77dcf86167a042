"""Several sources of iterations with one lease: what is a boundary, and the gate."""

from __future__ import annotations

import threading

import pytest

from salus.adaptors.joint import OPEN_TIMES, OVERDUE_S, PATIENCE_ENDS, PATIENCE_TIMES, UNKNOWN_S, Joint, Place
from tests.adaptors.record import RecordingLease


class Source:
    """A machine that can be given up, or cannot."""

    def __init__(self, *, stays=False):
        self.thread = threading.get_ident()
        self.stays = stays
        self.given_up: list[bool] = []

    def give_up(self, *, gone):
        self.given_up.append(gone)
        return gone or not self.stays


class World:
    def __init__(self):
        self.now = 0.0
        self.lease = RecordingLease()
        self.lock = threading.RLock()
        self.joint = Joint(self.lease, self.lock, lambda: self.now)
        self.sources = [Source(), Source()]
        self.a, self.b = (self.joint.part(source) for source in self.sources)
        self.waits: list[float] = []
        self.on_wait = lambda seconds: setattr(self, "now", self.now + seconds)
        self.joint._reached.wait = self._wait

    def _wait(self, seconds):
        """Instead of the wait at the gate: what happens meanwhile."""
        self.waits.append(seconds)
        assert len(self.waits) < 50, "nothing changes any more"
        self.on_wait(seconds)


@pytest.fixture
def world():
    made = World()
    with made.lock:
        yield made


def test_iterations_that_do_not_overlap_are_as_those_of_one_thread(world):
    for part in (world.a, world.b, world.a):
        part.begin()
        part.end(1)
    assert world.lease.story == ["begin", "end 1"] * 3


def test_what_ends_while_another_is_inside_counts_and_is_no_boundary(world):
    world.a.begin()
    world.b.begin()
    world.a.end(1)
    world.a.begin()
    world.b.end(1)
    world.a.end(0)
    assert world.lease.story == ["begin", "count 1", "count 1", "end 0"]


def test_while_nobody_waits_the_gate_is_open(world):
    world.a.begin()
    for _ in range(5):
        world.b.begin()
        world.b.end(1)
    assert world.waits == [] and world.lease.inside == [1] * 5


def test_whoever_comes_to_the_gate_waits_until_the_others_have_ended_and_then_takes_the_lease_anew(world):
    world.a.begin()
    world.b.begin()
    world.a.end(1)
    world.lease.somebody_waits = True

    def ends(_seconds):
        assert world.a.place is Place.AT_GATE
        world.b.end(1)
        world.lease.somebody_waits = False

    world.on_wait = ends
    world.a.begin()
    assert world.lease.story == ["begin", "count 1", "end 1", "begin"] and world.a.place is Place.INSIDE


def test_the_one_that_ends_last_goes_on_and_the_ones_at_the_gate_are_not_kept_from_their_turn(world):
    """Also where somebody waits again at once: the boundary that they waited for has come."""
    world.a.begin()
    world.b.begin()
    world.a.end(1)
    world.lease.somebody_waits = True

    def ends_and_begins(_seconds):
        world.b.end(1)
        world.b.begin()

    world.on_wait = ends_and_begins
    world.a.begin()
    assert world.lease.story == ["begin", "count 1", "end 1", "begin"] and len(world.waits) == 1


def test_the_gate_opens_after_a_while_and_stays_open_for_longer(world):
    """The one inside waits for something of the one at the gate."""
    world.a.begin()
    world.lease.somebody_waits = True
    world.b.begin()
    assert world.waits == [UNKNOWN_S] and world.lease.open
    world.b.end(1)
    world.now += OPEN_TIMES * UNKNOWN_S / 2
    world.b.begin()
    world.b.end(1)
    assert len(world.waits) == 1
    world.now += OPEN_TIMES * UNKNOWN_S
    world.b.begin()
    assert len(world.waits) == 2


def test_the_gate_is_closed_for_as_long_as_the_others_iterations_take_a_few_times(world):
    for _ in range(3):
        world.a.begin()
        world.now += 0.2
        world.a.end(1)
    world.a.begin()
    world.lease.somebody_waits = True
    world.b.begin()
    assert world.waits == [pytest.approx(PATIENCE_TIMES * 0.2)]


def test_an_iteration_that_others_were_kept_waiting_for_is_no_measure(world):
    world.a.begin()
    world.now += 0.2
    world.a.end(1)
    world.a.begin()
    world.lease.somebody_waits = True
    world.b.begin()
    world.b.end(1)
    world.now += 100
    world.a.end(1)
    assert world.a.length_s == pytest.approx(0.2)


def test_whoever_is_interrupted_at_the_gate_is_between_iterations(world):
    world.a.begin()
    world.lease.somebody_waits = True

    def interrupted(_seconds):
        raise KeyboardInterrupt

    world.on_wait = interrupted
    with pytest.raises(KeyboardInterrupt):
        world.b.begin()
    assert world.b.place is Place.BETWEEN
    world.a.end(1)
    assert world.lease.ends == [1]


def test_a_source_that_does_not_come_out_is_given_up_after_a_while(world):
    world.a.begin()
    world.now += OVERDUE_S
    for _ in range(PATIENCE_ENDS + 1):
        world.b.begin()
        assert world.lease.ends == []
        world.b.end(1)
    assert world.sources[0].given_up == [False] and world.lease.ends == [1]
    assert world.a.place is Place.BETWEEN


def test_one_that_has_just_begun_is_not_given_up_however_many_others_end(world):
    world.a.begin()
    for _ in range(5 * PATIENCE_ENDS):
        world.b.begin()
        world.b.end(1)
    assert world.sources[0].given_up == []


def test_one_that_is_slow_but_ends_is_waited_for(world):
    for _ in range(2):
        world.a.begin()
        for _ in range(PATIENCE_ENDS):
            world.b.begin()
            world.b.end(1)
        world.a.end(1)
    world.a.begin()
    world.now += OVERDUE_S
    for _ in range(PATIENCE_TIMES * PATIENCE_ENDS):
        world.b.begin()
        world.b.end(1)
    assert world.sources[0].given_up == []


def test_one_that_serves_or_is_marked_is_waited_for(world):
    world.sources[0].stays = True
    world.a.begin()
    world.now += OVERDUE_S
    for _ in range(3 * PATIENCE_ENDS):
        world.b.begin()
        world.b.end(1)
    assert world.a.place is Place.INSIDE and world.lease.ends == []


def test_one_whose_thread_has_ended_is_given_up_at_once(world):
    world.b.begin()
    world.a.begin()
    thread = threading.Thread(target=lambda: setattr(world.sources[0], "thread", threading.get_ident()))
    thread.start()
    thread.join()
    world.b.end(1)
    assert world.sources[0].given_up == [True] and world.lease.ends == [1]


def test_nobody_waits_at_the_gate_for_one_whose_thread_has_ended(world):
    world.a.begin()
    world.lease.somebody_waits = True
    thread = threading.Thread(target=lambda: setattr(world.sources[0], "thread", threading.get_ident()))
    thread.start()
    thread.join()
    world.lease.open = False
    world.b.begin()
    assert world.waits == []
