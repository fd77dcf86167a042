"""How much a job did, for where no service can tell it any more.

The service hands the page that it shares with the job's process to the launcher as well, so that the launcher can read
the counts there when the job has ended, however it ended. A process that goes on unmanaged counts on a page of its own,
which a service that is still there does not write to, and shows what it counts on the shared one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from salus.protocol.page import JobState, Page, Word, used

SHOW_COUNTS_S = 1.0
"""How often an unmanaged process shows its counts: one that is killed loses those of the last second."""


class Counts:
    """The launcher's view. `iterations` and `ran_ns`: what the job did before this page began to count."""

    def __init__(self, page: Page, iterations: int = 0, ran_ns: int = 0) -> None:
        self._page, self._iterations, self._ran_ns = page, iterations, ran_ns

    @classmethod
    def on(cls, descriptors: Sequence[int], iterations: int, ran_ns: int) -> Counts | None:
        """On the page that came with a message; None: it is none."""
        try:
            with contextlib.suppress(OSError):
                return cls(Page(descriptors[0]), iterations, ran_ns)
        except (ValueError, IndexError):
            return None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return None

    def now(self) -> dict[str, float]:
        """As in `salus ps --json`. What the service had not shared out yet when it ended counts as the job's own."""
        words = self._page.words
        iterations, used_ns = self._page.used(time.monotonic_ns())
        own_ns = words[Word.ATTAINED_NS] + max(0, used_ns - words[Word.NOTED_NS])
        return {
            "iterations": self._iterations + iterations,
            "gpu_time_s": own_ns / 1e9,
            "ran_s": (self._ran_ns + used_ns) / 1e9,
        }


def publish(counted: memoryview[int], shown: memoryview[int]) -> None:
    iterations, used_ns = used(counted, time.monotonic_ns())
    shown[Word.BEGAN_NS] = 0
    shown[Word.STATE] = JobState.BETWEEN
    shown[Word.BUSY_NS], shown[Word.ITERATIONS] = used_ns, iterations
