"""What a job says of itself on the page it shares with the service, checked.

The page is the job's to write, and so are the words that the service writes there: a job can put anything into any of
them at any moment. So this is the only place where the service reads a page. Everything it gives back is a value that
can be, whatever the page says, and nothing else in the service has to ask. A job that says what cannot be is managed no
longer (`on_impossible`); the decisions about others go on as if it had said nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from salus.protocol import messages as msg
from salus.protocol.page import JobState, Page, Word

MOST_BYTES = 1 << 50
"""No job has more memory."""
MOST_COUNTED = 1 << 62
"""No job ends more iterations, and no arena sends more packets."""
CLOCK_SLACK_NS = 1_000_000_000
"""Clocks are read one by one, so a job may seem to have used the device a little longer than it was there."""


def counted_by_launcher(end: msg.Finished, there_s: float) -> dict[str, float]:
    """What a job did that ended before it was back at a service that was started again, as in `salus ps --json`."""
    if end.iterations is None or end.gpu_time_s is None or end.ran_s is None:
        return {}
    there_s = max(0.0, there_s)
    return {
        "iterations": min(max(0, end.iterations), int(there_s * 1e9)),
        "gpu_time_s": min(max(0.0, end.gpu_time_s), there_s),
        "ran_s": min(max(0.0, end.ran_s), there_s),
    }


class Report:
    def __init__(
        self,
        page: Page,
        on_impossible: Callable[[str], None],
        *,
        iterations: int = 0,
        used_ns: int = 0,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`iterations` and `used_ns`: what the job brought along from before a restart of the service."""
        self._page, self._on_impossible, self._clock_ns = page, on_impossible, clock_ns
        self._opened_ns = clock_ns()
        self._brought_iterations, self._brought_ns = iterations, used_ns
        self._impossible = False

    @property
    def state(self) -> JobState:
        said = self._page.words[Word.STATE]
        try:
            return JobState(said)
        except ValueError:
            self._refuse(f"state {said}")
            return JobState.ITERATING  # of a job at work nothing is expected

    @property
    def boundaries(self) -> int:
        return self._count(Word.BOUNDARIES)

    @property
    def packets(self) -> int:
        """How many its arena has sent."""
        return self._count(Word.JOB_PACKETS)

    @property
    def yielded_lease(self) -> int:
        """Which of its leases it gave up last."""
        return self._count(Word.YIELDED)

    @property
    def passed(self) -> tuple[int, bool]:
        """The ticket by which it passed its lease on, and whether it wants another lease."""
        said = self._page.words[Word.PASSED]
        return said >> 1, bool(said & 1)

    @property
    def is_contended(self) -> bool:
        """It was told that others wait, and has not gone on since."""
        return bool(self._page.words[Word.CONTENDED])

    @property
    def iterating_since_s(self) -> float | None:
        """For how long, by its own word, it has been in its iteration or between two; None: it is in neither."""
        began_ns = self._page.words[Word.BEGAN_NS]
        return max(0, self._clock_ns() - began_ns) / 1e9 if began_ns else None

    def bytes_in(self, word: Word) -> int:
        said = self._page.words[word]
        if said > MOST_BYTES:
            self._refuse(f"{word.name} of {said}")
            return 0
        return said

    def time_in_ns(self, word: Word) -> int:
        """A sum of times, of paging say: never longer than the job has been here."""
        return min(self._page.words[word], self._clock_ns() - self._opened_ns)

    def used(self) -> tuple[int, int]:
        """Iterations so far, and nanoseconds of the device's time: no more than there can have been."""
        now_ns = self._clock_ns()
        there_ns = now_ns - self._opened_ns
        iterations, used_ns = self._page.used(now_ns)
        most_ns = self._brought_ns + there_ns
        if used_ns > most_ns + CLOCK_SLACK_NS:
            self._refuse(f"{used_ns / 1e9:.0f} s of device time in {there_ns / 1e9:.0f} s")
        # Nothing ends an iteration in less than a nanosecond.
        most_iterations = self._brought_iterations + there_ns
        if iterations > most_iterations:
            self._refuse(f"{iterations} iterations in {there_ns / 1e9:.0f} s")
            iterations = self._brought_iterations
        return iterations, min(used_ns, most_ns)

    def _count(self, word: Word) -> int:
        said = self._page.words[word]
        if said > MOST_COUNTED:
            self._refuse(f"{word.name} of {said}")
            return 0
        return said

    def _refuse(self, what: str) -> None:
        if not self._impossible:
            self._impossible = True
            self._on_impossible(what)
