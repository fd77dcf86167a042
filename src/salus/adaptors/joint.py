"""Several threads that iterate, and the one lease of their process.

Each thread that trains or serves is a source of iterations, with a state machine of its own (`Iterations`). This joins
them: the lease is told that an iteration began when the first source begins one while no other is inside one, and a
boundary is one only when none is inside. What ends while others are inside is counted at once, and is no boundary.

Sources whose iterations overlap for ever would never come to a common boundary. So there is a gate. While somebody
waits for the lease, a source that is about to begin waits there until the others have ended theirs. The gate must have
a way out, because the source inside may need the one that waits (a queue between two threads): after a while it is
opened, and stays open for `OPEN_TIMES` as long, so that a script loses no more than that part of its time. To open it
is always safe: the job only keeps its lease a little longer.

A source that is inside and does not come out is given up: at once if its thread has ended, and else (it computes a loss
that another thread steps on, say) after `OVERDUE_S`, if the others have ended `PATIENCE_ENDS` iterations and four times
as many as they usually do during one of its own. That is safe too: what is alive in the lane at a boundary is made
private. It costs memory, never data.

Each method is called with the lock of the process held. Must not know: the framework, sockets, what a lease does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from sys import _current_frames
from threading import Condition
from typing import Any, Protocol

from salus.client.turns import Turn

UNKNOWN_S, LEAST_S, MOST_S = 1.0, 0.05, 10.0
"""How long the gate stays closed: where it is not known how long an iteration of the others takes; and the bounds."""
PATIENCE_TIMES, OPEN_TIMES = 4, 10
PATIENCE_ENDS, OVERDUE_S = 8, 0.25


class Place(Enum):
    """Where a source is."""

    BETWEEN = "between iterations"
    AT_GATE = "at the gate"
    INSIDE = "inside an iteration"


class Event(Enum):
    STOPPED = "it is about to begin while somebody waits and others are inside"
    LET_THROUGH = "the others have come to their boundary, or it waited long enough, or was interrupted"
    BEGAN = "its iteration began"
    ENDED = "its iteration ended"
    GIVEN_UP = "its iteration is not expected to end"


_TRANSITIONS = {
    (Place.BETWEEN, Event.STOPPED): Place.AT_GATE,
    (Place.AT_GATE, Event.LET_THROUGH): Place.BETWEEN,
    (Place.BETWEEN, Event.BEGAN): Place.INSIDE,
    (Place.INSIDE, Event.BEGAN): Place.INSIDE,
    (Place.INSIDE, Event.ENDED): Place.BETWEEN,
    # It began in a quick way, which this was not told.
    (Place.BETWEEN, Event.ENDED): Place.BETWEEN,
    (Place.INSIDE, Event.GIVEN_UP): Place.BETWEEN,
}


class SharedLease(Protocol):
    """What is needed of the lease of the process, beside what `Iterations` calls."""

    def begin(self) -> None: ...

    def end(self, iterations: int = 1) -> None: ...

    def count(self, iterations: int) -> None:
        """These ended, and it was no boundary."""

    def is_wanted(self) -> bool:
        """Somebody waits for it: the next boundary is the last."""

    def usual(self) -> tuple[Callable[[], bool], Callable[[int], bool]] | None: ...

    def run_on(self, sits: Callable[[], None]) -> Turn | None: ...

    def goes_on(self) -> None: ...


class Source(Protocol):
    """The state machine of a thread."""

    thread: int

    def give_up(self, *, gone: bool) -> bool:
        """The iteration that is open is over, without a word to the lease. False: it goes on.

        `gone`: its thread has ended. Else only training may be over, where no backward runs.
        """


class Joint:
    def __init__(self, lease: SharedLease, lock: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease = lease
        self._clock = clock
        self._reached = Condition(lock)
        """Notified at each common boundary, and when a source is no longer inside."""
        self._parts: list[Part] = []
        self._boundaries = 0
        self._open_until = 0.0
        """The gate is not closed before that."""
        self._stops = 0
        """How often the gate was closed to somebody: an iteration during which it was may have taken longer for it."""

    def part(self, source: Source, *, inside: bool = False) -> Part:
        """The lease as a new source has it."""
        part = Part(self, source)
        self._parts.append(part)
        if inside:
            self._began(part)
        return part

    def leave(self, part: Part) -> None:
        """The source is gone: its thread has ended."""
        self._parts.remove(part)

    def change(self, part: Part, event: Event) -> None:
        part.place = _TRANSITIONS[part.place, event]

    def begin(self, part: Part) -> None:
        if self._is_stopped(part):
            self._wait_at_gate(part)
        if not self.inside(part):
            self.lease.begin()
        self._began(part)

    def end(self, part: Part, iterations: int) -> None:
        self._note_length(part)
        self.change(part, Event.ENDED)
        for other in self.inside(part):
            other.others_ended += 1
        self._give_up_who_does_not_come_out(part)
        if self.inside(part):
            self.lease.count(iterations)
        else:
            self._boundaries += 1
            self._reached.notify_all()
            self.lease.end(iterations)

    def inside(self, but: Part) -> list[Part]:
        """The sources inside an iteration, but for this one."""
        return [part for part in self._parts if part is not but and part.place is Place.INSIDE]

    def _began(self, part: Part) -> None:
        self.change(part, Event.BEGAN)
        part.began_s, part.stops, part.others_ended = self._clock(), self._stops, 0

    def _give_up_who_does_not_come_out(self, but: Part) -> None:
        inside = self.inside(but)
        alive = _current_frames() if inside else {}
        for part in inside:
            gone = part.source.thread not in alive
            if (gone or part.is_overdue(self._clock())) and part.source.give_up(gone=gone):
                self.change(part, Event.GIVEN_UP)

    def _note_length(self, part: Part) -> None:
        if part.place is Place.INSIDE:
            part.others_usually = part.others_ended
            if part.stops == self._stops:
                part.length_s = self._clock() - part.began_s

    # The gate.

    def _is_stopped(self, part: Part) -> bool:
        if not self.inside(part) or not self.lease.is_wanted() or self._clock() < self._open_until:
            return False
        self._give_up_who_does_not_come_out(part)
        return bool(self.inside(part))

    def _wait_at_gate(self, part: Part) -> None:
        """Until the others have come to a boundary with this one, or for as long as that should take."""
        patience_s = self._patience_s(part)
        boundary, until = self._boundaries, self._clock() + patience_s
        self._stops += 1
        self.change(part, Event.STOPPED)
        try:
            while self._boundaries == boundary and self.inside(part) and self.lease.is_wanted():
                left_s = until - self._clock()
                if left_s <= 0:
                    self._open_until = until + OPEN_TIMES * patience_s
                    return
                self._reached.wait(left_s)
        finally:
            self.change(part, Event.LET_THROUGH)

    def _patience_s(self, part: Part) -> float:
        known = [other.length_s for other in self.inside(part)]
        if not all(known):
            return UNKNOWN_S
        return min(max(PATIENCE_TIMES * max(known), LEAST_S), MOST_S)


class Part:
    """The lease, as one of several sources has it."""

    def __init__(self, joint: Joint, source: Source) -> None:
        self._joint = joint
        self.source = source
        self.place = Place.BETWEEN
        self.began_s = self.length_s = 0.0
        """Of the iteration that is open; and how long the last one took, 0: not known."""
        self.stops = 0
        """How often the gate had been closed when the iteration began."""
        self.others_ended = self.others_usually = 0
        """Iterations of others that ended during this one; and during the last."""

    def is_overdue(self, now_s: float) -> bool:
        enough = max(PATIENCE_ENDS, PATIENCE_TIMES * self.others_usually)
        return self.others_ended > enough and now_s - self.began_s >= OVERDUE_S

    def begin(self) -> None:
        self._joint.begin(self)

    def end(self, iterations: int = 1) -> None:
        self._joint.end(self, iterations)

    def usual(self) -> tuple[Callable[[], bool], Callable[[int], bool]] | None:
        """For one source alone: it is told when another one begins, and leaves the quick way before that."""
        return None if self._joint.inside(self) else self._joint.lease.usual()

    def run_on(self, sits: Callable[[], None]) -> Turn | None:
        return None if self._joint.inside(self) else self._joint.lease.run_on(sits)

    def goes_on(self) -> None:
        self._joint._began(self)
        self._joint.lease.goes_on()

    def count(self, iterations: int) -> None:
        self._joint.lease.count(iterations)

    def is_wanted(self) -> bool:
        return self._joint.lease.is_wanted()
