"""When something that was announced comes, judged by the last times it did.

To wake a process that sleeps takes a virtual machine half a millisecond at times. So whoever waits for a lease is awake
when it is about to come, and asleep before that. Times in nanoseconds.
"""

from __future__ import annotations

EARLY_NS = 500_000
"""To be awake in time."""
LATE_NS = 2_000_000
"""At least so long after it should have come it is still looked for."""
WIDEST_NS = 4_000_000
"""One that comes and goes as it likes is not looked for at all, but slept for."""
NEWEST_PART = 4


class Foresight:
    def __init__(self, at_first_ns: int) -> None:
        """`at_first_ns`: for how long to look from the beginning while nothing is known."""
        self._at_first_ns = at_first_ns
        self._announced: int | None = None
        self._since_ns = 0
        self._takes_ns: int | None = None
        self._off_ns = 0
        """How far it was from what was expected, on average."""

    def window(self, what: int, now_ns: int) -> tuple[int, int]:
        """It was announced, now or before that: from when until when to look for it."""
        if what != self._announced:
            self._announced, self._since_ns = what, now_ns
        if self._takes_ns is None:
            return self._since_ns, self._since_ns + self._at_first_ns
        expected, off = self._since_ns + self._takes_ns, 2 * self._off_ns
        if off > WIDEST_NS:
            return self._since_ns, self._since_ns + min(self._at_first_ns, LATE_NS)
        return expected - off - EARLY_NS, expected + off + LATE_NS

    def came(self, what: int, now_ns: int) -> None:
        if what != self._announced:
            return
        self._announced = None
        took = now_ns - self._since_ns
        if self._takes_ns is None:
            self._takes_ns = took
        off = abs(took - self._takes_ns)
        self._off_ns += (off - self._off_ns) // NEWEST_PART
        self._takes_ns += (took - self._takes_ns) // NEWEST_PART
