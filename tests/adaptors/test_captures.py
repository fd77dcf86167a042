"""Captures of CUDA graphs hold the lease, and nothing moves while one is under way."""

from __future__ import annotations

import gc
import threading

import pytest

from salus.adaptors.captures import _TRANSITIONS as TRANSITIONS
from salus.adaptors.captures import Captures, Event, Hold


class Lease:
    """Notes its calls. `on_begin` is called in the middle of a wait for it."""

    def __init__(self, story: list[str]) -> None:
        self.story = story
        self.open = False
        self.on_begin = lambda: None

    def begin(self) -> None:
        self.on_begin()
        self.open = True
        self.story.append("lease begins")

    def end(self, iterations: int = 1) -> None:
        assert self.open
        self.open = False
        self.story.append(f"lease ends {iterations}")

    def goes_on(self) -> None:
        pass

    def is_iterating(self) -> bool:
        return self.open


class Memory:
    def __init__(self, story: list[str]) -> None:
        self.story = story
        self.on_capture = lambda: None

    def capture_began(self) -> None:
        self.story.append("memory rests")
        self.on_capture()

    def capture_ended(self) -> None:
        self.story.append("memory goes on")


class Graph:
    """As torch's, with a capture that can fail where a test says so."""

    def __init__(self, story: list[str], fails: str = "") -> None:
        self.story, self.fails = story, fails

    def capture_begin(self, pool: object = None) -> None:
        self.story.append("capture begins")
        if self.fails == "begin":
            raise RuntimeError("cannot begin")

    def capture_end(self) -> None:
        self.story.append("capture ends")
        if self.fails == "end":
            raise RuntimeError("was invalidated")


class World:
    def __init__(self) -> None:
        self.story: list[str] = []
        self.lease, self.memory = Lease(self.story), Memory(self.story)
        self.captures = Captures(self.lease, self.memory)

        class Wrapped(Graph):
            pass

        self.captures.install(Wrapped)
        self.graph_class = Wrapped

    def graph(self, fails: str = "") -> Graph:
        return self.graph_class(self.story, fails)

    def begin(self) -> None:
        """As the wrapper around the lease does."""
        if not self.captures.takes_begin():
            self.lease.begin()

    def end(self, iterations: int = 1) -> None:
        if not self.captures.takes_end(iterations):
            self.lease.end(iterations + self.captures.owed())


@pytest.fixture
def world():
    return World()


HELD = ["lease begins", "memory rests", "capture begins"]
GONE = ["memory goes on", "lease ends 0"]


def test_the_lease_is_taken_before_a_capture_and_given_up_after_it(world):
    graph = world.graph()
    graph.capture_begin(pool=1)
    assert world.story == HELD and world.captures.under_way and world.lease.open
    graph.capture_end()
    assert world.story == [*HELD, "capture ends", *GONE]
    assert not world.captures.under_way and not world.lease.open


def test_a_whole_iteration_within_a_capture_is_no_boundary_and_is_counted_after_it(world):
    graph = world.graph()
    graph.capture_begin()
    for _ in range(2):
        world.begin()
        world.end()
    assert world.lease.open and world.story == HELD
    graph.capture_end()
    assert world.story[-1] == "lease ends 2"


def test_an_iteration_that_is_open_before_a_capture_is_open_after_it(world):
    world.begin()
    graph = world.graph()
    graph.capture_begin()
    graph.capture_end()
    assert world.lease.open
    world.end()
    assert world.story[0] == "lease begins" and world.story[-1] == "lease ends 1"
    assert world.story.count("lease begins") == 1


def test_an_iteration_that_begins_within_a_capture_may_go_on_after_it(world):
    graph = world.graph()
    graph.capture_begin()
    world.begin()
    world.end()
    world.begin()
    graph.capture_end()
    assert world.lease.open and world.story[-1] == "memory goes on"
    world.end()
    assert world.story[-1] == "lease ends 2", "the one that ended within the capture is counted too"


def test_a_capture_that_does_not_begin_lets_go_of_the_lease_and_the_script_sees_its_own_error(world):
    with pytest.raises(RuntimeError, match="cannot begin"):
        world.graph("begin").capture_begin()
    assert not world.captures.under_way and world.story[-2:] == GONE


def test_a_capture_that_was_invalidated_lets_go_of_the_lease_and_the_script_sees_its_own_error(world):
    graph = world.graph("end")
    graph.capture_begin()
    with pytest.raises(RuntimeError, match="was invalidated"):
        graph.capture_end()
    assert not world.captures.under_way and world.story[-2:] == GONE


def test_a_capture_whose_graph_is_dropped_is_over(world):
    graph = world.graph()
    graph.capture_begin()
    del graph
    gc.collect()
    assert not world.captures.under_way and world.story[-2:] == GONE


def test_a_graph_that_cannot_be_watched_is_captured_all_the_same(world):
    graph = ("nobody can have a weak reference to a tuple",)
    world.captures.began(graph)
    assert world.captures.under_way
    world.captures.ended(id(graph))
    assert not world.captures.under_way and world.story[-2:] == GONE


def test_of_several_captures_the_last_one_lets_go(world):
    first, second = world.graph(), world.graph()
    first.capture_begin()
    second.capture_begin()
    first.capture_end()
    assert world.captures.under_way and world.story[-1] == "capture ends"
    second.capture_end()
    assert not world.captures.under_way and world.story[-2:] == GONE
    assert world.story.count("lease begins") == world.story.count("memory rests") == 1


def test_a_capture_that_ends_twice_lets_go_once(world):
    graph = world.graph()
    graph.capture_begin()
    graph.capture_end()
    graph.capture_end()
    assert world.story.count("memory goes on") == 1


def test_a_wait_for_the_lease_that_is_interrupted_leaves_no_capture(world):
    def interrupt() -> None:
        raise KeyboardInterrupt

    world.lease.on_begin = interrupt
    with pytest.raises(KeyboardInterrupt):
        world.graph().capture_begin()
    assert world.story == [] and not world.captures.under_way


def test_a_lease_that_another_thread_gives_up_at_that_moment_is_taken_again(world):
    """Its iteration ended between our look at the lease and the moment from which nothing moves."""
    world.begin()
    world.memory.on_capture = lambda: (setattr(world.lease, "open", False), setattr(world.memory, "on_capture", int))
    graph = world.graph()
    graph.capture_begin()
    assert world.lease.open and world.captures.under_way
    assert world.story == ["lease begins", "memory rests", "memory goes on", *HELD]


def test_an_iteration_of_another_thread_ends_within_a_capture_without_a_boundary(world):
    world.begin()
    graph = world.graph()
    graph.capture_begin()
    thread = threading.Thread(target=world.end)
    thread.start()
    thread.join()
    assert world.lease.open
    graph.capture_end()
    assert not world.lease.open and world.story[-1] == "lease ends 1"


def test_whatever_fails_in_here_the_script_captures_its_graph(world, capsys):
    def fails() -> None:
        raise ValueError("our own mistake")

    world.memory.capture_began = fails
    graph = world.graph()
    graph.capture_begin()
    graph.capture_end()
    assert [what for what in world.story if "capture" in what] == ["capture begins", "capture ends"]
    assert capsys.readouterr().err.count("salus: ") == 1


def test_every_state_has_an_answer_to_what_may_happen_in_it():
    within = {Event.ITERATION_BEGAN, Event.ITERATION_ENDED, Event.CAPTURES_ENDED}
    begins = {Event.CAPTURE_BEGAN, Event.CAPTURE_BEGAN_INSIDE}
    for hold in Hold:
        known = {event for state, event in TRANSITIONS if state is hold}
        assert known == (begins if hold is Hold.NONE else within)
