"""Captures of CUDA graphs: from before the first begins until the last has ended, the process keeps its lease.

A capture is spoilt by whatever waits for the device or changes what is mapped, in any thread: a boundary at which the
job is switched out, a wait for a lease, paging. So a capture takes the lease before it begins, and holds it as an
iteration does. An iteration that ends meanwhile is no boundary; it is counted once the last capture has ended. While a
capture is under way, an iteration is open besides (`INSIDE`) or none is (`BETWEEN`). In the second case the end of the
capture is a boundary.

`Captures` alone knows whether a capture is under way, and `_change` alone changes it. It tells the memory, which sends
allocations where torch makes them meanwhile (a capture has a pool of its own), and which tells the arena
(csrc/captures.c). The arena is the second line: if some thread gets past the table below, it refuses to leave the lane,
and the lease is kept.

Must not know: torch, or what a lease does.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from enum import Enum
from threading import RLock
from typing import Any, Protocol
from weakref import finalize

from salus.client.say import say

TRIES = 3


class Lease(Protocol):
    def begin(self) -> None: ...

    def end(self, iterations: int = 1) -> None: ...

    def goes_on(self) -> None: ...

    def is_iterating(self) -> bool:
        """An iteration is open, so the job keeps its lease."""


class Memory(Protocol):
    def capture_began(self) -> None:
        """From now on nothing waits for the device or moves memory; what was at that has finished."""

    def capture_ended(self) -> None: ...


class Hold(Enum):
    NONE = "none"
    BETWEEN = "between"
    INSIDE = "inside"


class Event(Enum):
    CAPTURE_BEGAN = "a capture began, between iterations"
    CAPTURE_BEGAN_INSIDE = "a capture began, within an iteration"
    ITERATION_BEGAN = "an iteration began"
    ITERATION_ENDED = "an iteration ended"
    CAPTURES_ENDED = "the last capture ended"


_TRANSITIONS = {
    (Hold.NONE, Event.CAPTURE_BEGAN): Hold.BETWEEN,
    (Hold.NONE, Event.CAPTURE_BEGAN_INSIDE): Hold.INSIDE,
    (Hold.BETWEEN, Event.ITERATION_BEGAN): Hold.INSIDE,
    (Hold.BETWEEN, Event.ITERATION_ENDED): Hold.BETWEEN,
    (Hold.INSIDE, Event.ITERATION_BEGAN): Hold.INSIDE,
    (Hold.INSIDE, Event.ITERATION_ENDED): Hold.BETWEEN,
    (Hold.BETWEEN, Event.CAPTURES_ENDED): Hold.NONE,
    (Hold.INSIDE, Event.CAPTURES_ENDED): Hold.NONE,
}


class Captures:
    def __init__(self, lease: Lease, memory: Memory) -> None:
        self._lease, self._memory = lease, memory
        self._starting = RLock()
        """One capture at a time waits for the lease."""
        self._lock = RLock()
        """Guards what follows, and is not held while the lease is waited for."""
        self._hold = Hold.NONE
        self._graphs: dict[int, Any] = {}
        """Being captured, by id; and what tells when such a graph is gone."""
        self._counted = 0
        """Iterations that ended within a capture, and of which the lease has not heard."""

    @property
    def under_way(self) -> bool:
        return self._hold is not Hold.NONE

    def begin_anew(self) -> None:
        """For the child of a fork: what is captured is the parent's, and a thread of its may have held a lock."""
        self._starting, self._lock = RLock(), RLock()
        self._hold, self._graphs, self._counted = Hold.NONE, {}, 0

    def _change(self, event: Event) -> None:
        self._hold = _TRANSITIONS[self._hold, event]

    # Where iterations begin and end.

    def takes_begin(self) -> bool:
        """True: a capture holds the lease already."""
        if self._hold is Hold.NONE:
            return False
        with self._lock:
            if self.under_way:
                self._change(Event.ITERATION_BEGAN)
            return self.under_way

    def takes_end(self, iterations: int) -> bool:
        """True: a capture keeps the lease, and there is no boundary."""
        if self._hold is Hold.NONE:
            return False
        with self._lock:
            if self.under_way:
                self._change(Event.ITERATION_ENDED)
                self._counted += iterations
            return self.under_way

    def owed(self) -> int:
        """So many iterations more are counted by the next end that the lease hears of."""
        if not self._counted:
            return 0
        with self._lock:
            owed, self._counted = self._counted, 0
            return owed

    # Around a capture.

    def began(self, graph: Any) -> None:
        """Returns when the lease is held and nothing spoils the capture. Raises what the wait for a lease raises."""
        with self._starting:
            with self._lock:
                if self.under_way:
                    self._note(graph)
                    return
            for _ in range(TRIES):
                was_open = self._lease.is_iterating()
                if was_open:
                    self._lease.goes_on()
                else:
                    self._lease.begin()
                if self._take_hold(graph, was_open):
                    return
            say("a CUDA graph is captured although another thread ends the iteration; the capture may fail")

    def _take_hold(self, graph: Any, was_open: bool) -> bool:
        """False: another thread has ended its iteration meanwhile, and the lease may be gone."""
        with self._lock:
            self._change(Event.CAPTURE_BEGAN_INSIDE if was_open else Event.CAPTURE_BEGAN)
            held = False
            try:
                self._memory.capture_began()
                held = self._lease.is_iterating()
            finally:
                if held:
                    self._note(graph)
                else:
                    self._let_go()
            return held

    def _note(self, graph: Any) -> None:
        self._graphs[id(graph)] = None
        with contextlib.suppress(TypeError):  # of a graph that nobody can watch; then its capture must be ended
            gone = finalize(graph, self.ended, id(graph))
            gone.atexit = False
            self._graphs[id(graph)] = gone

    def ended(self, key: int) -> None:
        """The capture of the graph with this id; or it was dropped in the middle of that."""
        with self._lock:
            if key not in self._graphs:
                return
            gone = self._graphs.pop(key)
            if gone is not None:
                gone.detach()
            if self._graphs:
                return
            is_boundary = self._hold is Hold.BETWEEN
            self._let_go()
            if is_boundary:
                self._lease.end(self.owed())

    def _let_go(self) -> None:
        # In this order: the memory looks whether a capture is under way.
        self._change(Event.CAPTURES_ENDED)
        self._memory.capture_ended()

    # The functions of the framework.

    def wrap_begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                self.began(graph)
            except Exception as error:
                self._failed(error)
            try:
                return original(graph, *args, **kwargs)
            except BaseException:
                self._end_quietly(graph)
                raise

        return capture_begin

    def wrap_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(graph, *args, **kwargs)
            finally:
                self._end_quietly(graph)

        return capture_end

    def _end_quietly(self, graph: Any) -> None:
        try:
            self.ended(id(graph))
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        say(f"a capture of a CUDA graph may be disturbed by other jobs ({type(error).__name__}: {error})")

    def install(self, graph_class: Any) -> None:
        """For good: a capture that has begun must be seen to end."""
        graph_class.capture_begin = self.wrap_begin(graph_class.capture_begin)
        graph_class.capture_end = self.wrap_end(graph_class.capture_end)
