"""The page that a job and the service share: one writer for each word, no lock, no system call.

64-bit words in a memfd. The service writes the revoke flag; the job writes its state and its counters. So an
uncontended boundary is a few stores and a load, and telemetry costs no message.
A word is 8 bytes and aligned, so that a reader sees the old or the new value and nothing between.
"""

from __future__ import annotations

import ctypes
import mmap
from enum import IntEnum

from salus.protocol.descriptors import Event
from salus.protocol.sealed import is_sealed_memory, sealed_memory

SIZE_BYTES = 4096
MAGIC = 0x53414C5553000003
PAUSE_NS = 10_000_000_000
"""Between two iterations a job that holds its lease has the device: a GPU may still be at work, and nobody else may run
in the lane. So that time counts as the job's; of a longer pause, this much."""


class Word(IntEnum):
    MAGIC = 0
    # Written by the service.
    REVOKE = 1
    CONTENDED = 3
    """Somebody else waits: a job that sits between iterations should not keep its lease."""
    GRANTS = 2
    """Leases granted so far. The job compares it with its own count before it believes in a grant."""
    SOON = 5
    """A lease is about to come: look for it rather than sleep."""
    SERVICE_PACKETS = 4
    """Packets sent on the channel of the arena so far."""
    SCRUB = 7
    """What the job leaves in its lane is cleared before another job has it: that one may be another user's."""
    PASS = 28
    """A ticket: the lease may go straight to the job that has the same one (`BatonPage`). 0: to nobody."""
    PASS_SENT = 29
    """If the arena has sent no more packets than this: what it says of the lane goes before."""
    BATON = 30
    """A ticket: the lease comes straight from the job before us."""
    # What the job tells a service that was started again.
    LANE = 6
    """The lane it is in; 0: none."""
    RESERVED_PERSISTENT = 13
    RESERVED_EPHEMERAL = 14
    RESERVED_INTERNAL = 15
    ATTAINED_NS = 32
    """How much of the device's time was its own."""
    NOTED_NS = 35
    """How much of the time that this page counts is in ATTAINED_NS."""
    # Written by the job.
    STATE = 8
    ITERATIONS = 9
    BUSY_NS = 10
    """Time that the device was the job's, up to BEGAN_NS."""
    BEGAN_NS = 11
    """When the iteration that runs began, on CLOCK_MONOTONIC. Between two, with a GPU, when the last one ended; 0 where
    nothing of the job's can be running."""
    BOUNDARIES = 12
    YIELDED = 34
    """Which lease it gave up last, as GRANTS counts them."""
    # Written by the job's arena (csrc/arena.h).
    PRIVATE_BYTES = 16
    """Memory of its own, promoted slots included."""
    PROMOTED_BYTES = 17
    LANE_BYTES = 18
    """How much of the lane it uses, from the lane's beginning."""
    JOB_PACKETS = 19
    WAITING_FOR_MEMORY = 20
    """Since when it waits in an allocation, on CLOCK_MONOTONIC; 0: it does not. After that BEGAN_NS is moved on."""
    MADE_BYTES = 21
    """Of the lane's chunks: the driver counts them as this process's, whoever maps them."""
    OUT_BYTES = 22
    """Of its own memory: on the host at the moment."""
    HOME_BYTES = 23
    """Host memory that it holds for that, in use or for the next time."""
    WENT_BYTES = 24
    """Paged out so far, and the time that took: until the memory was free for others."""
    WENT_NS = 25
    CAME_BYTES = 26
    """And paged in."""
    CAME_NS = 27
    PASSED = 31
    """Twice the ticket with which the lease was passed on, and 1 more if the job wants another."""
    NEEDED_BYTES = 33
    """Of PRIVATE_BYTES: with so much it would have had to ask for no more since it was last paged out."""


BATONS = SIZE_BYTES // 8
LOOKS = 100


class BatonPage:
    """A page that all jobs of a user share, and a bell: here a lease goes from one job to the next without the service.

    A ticket has one word. The giver writes there that it comes, at its last boundary, and rings the bell; and then
    that it is passed. Tickets grow, so what is left of an old one is nobody's. A word that is overwritten, or a bell
    that another one heard, is no harm: the service grants the same lease a moment later.
    """

    def __init__(self, descriptor: int, bell: int) -> None:
        self._page = Page(descriptor)
        self.bell = bell
        self._bell = Event(bell)

    def comes(self, ticket: int) -> None:
        self._page.words[ticket % BATONS] = 2 * ticket
        self.ring()

    def pass_on(self, ticket: int) -> None:
        self._page.words[ticket % BATONS] = 2 * ticket + 1
        self.ring()

    def ring(self) -> None:
        """Where a script closed what it did not open, the service sees to it instead."""
        self._bell.ring()

    def hush(self) -> None:
        self._bell.hush()

    def close_bell(self) -> None:
        self._bell.close()

    def is_coming(self, ticket: int) -> bool:
        return bool(self._page.words[ticket % BATONS] >> 1 == ticket)

    def is_passed(self, ticket: int) -> bool:
        return bool(self._page.words[ticket % BATONS] == 2 * ticket + 1)

    def look(self, ticket: int) -> None:
        """Until it is passed, and for a few microseconds at the most."""
        words, index, passed = self._page.words, ticket % BATONS, 2 * ticket + 1
        for _ in range(LOOKS):
            if words[index] == passed:
                return

    def address(self, ticket: int) -> int:
        return self._page.address() + 8 * (ticket % BATONS)


class JobState(IntEnum):
    STARTING = 0
    BETWEEN = 1
    ITERATING = 2
    WAITING = 3
    RUNNING_ON = 4
    """One iteration after another: each begins where the last one ended, and nobody sees whether it has."""


def used(words: memoryview[int], now_ns: int) -> tuple[int, int]:
    """Iterations that have ended, and nanoseconds on the device up to now; waiting for memory is not among them."""
    # In this order: the job changes BEGAN_NS before it adds to BUSY_NS, and before it says that it iterates. So
    # what ends between two of these reads is counted too late, never twice, and a long pause never in full.
    busy = words[Word.BUSY_NS]
    # For the same reason this comes before BEGAN_NS, which is moved on before it is cleared.
    waits_since = words[Word.WAITING_FOR_MEMORY]
    now_ns = min(now_ns, waits_since) if waits_since else now_ns
    may_sit = words[Word.STATE] in (JobState.BETWEEN, JobState.RUNNING_ON)
    at_most_ns = PAUSE_NS if may_sit else now_ns
    began = words[Word.BEGAN_NS]
    return words[Word.ITERATIONS], busy + (min(max(0, now_ns - began), at_most_ns) if began else 0)


class Page:
    """One side's view of the page."""

    def __init__(self, descriptor: int) -> None:
        if not is_sealed_memory(descriptor, SIZE_BYTES):
            raise ValueError("the shared page can be made smaller, which would end whoever reads it")
        self._map = mmap.mmap(descriptor, SIZE_BYTES)
        self.words = memoryview(self._map).cast("Q")

    @classmethod
    def create(cls) -> tuple[Page, int]:
        """A new page, and the descriptor to hand to the job."""
        descriptor = sealed_memory("salus-page", SIZE_BYTES)
        page = cls(descriptor)
        page.words[Word.MAGIC] = MAGIC
        return page, descriptor

    def used(self, now_ns: int) -> tuple[int, int]:
        return used(self.words, now_ns)

    def address(self) -> int:
        """For the arena, which writes to it too. The page must then live as long as the process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def close(self) -> None:
        self.words.release()
        self._map.close()
