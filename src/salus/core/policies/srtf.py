"""Shortest remaining time first, preemptive.

The job with the least GPU time to go runs. If it could run alone on the GPU it gets memory, from jobs that have more
to go. While the jobs that run leave part of the GPU idle, the next shortest that fit into it run beside them in other
lanes; `fill=off` runs the shortest alone, as the paper does.

A job of unknown length is taken to have as much ahead of it as behind it, which is what heavy-tailed lengths suggest:
it starts out short and gives way as it ages. The same holds for one that has outlived its declared length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from salus.core.model import Job
from salus.core.policies.base import Moment, Option, Policy, Rotation, fill

if TYPE_CHECKING:
    from salus.core.order import Key

FILL = Option("fill", "on", "run others beside the first while it leaves part of the GPU idle", choices=("on", "off"))


class Srtf(Policy):
    """The shortest remaining job first; others beside it while it leaves part of the GPU idle."""

    name = "srtf"
    options = (FILL,)

    def __init__(self, **given: str) -> None:
        super().__init__(**given)
        self._fill = self.settings["fill"] == "on"
        self._guesses = False

    @property
    def rotates(self) -> Rotation:
        # A known remaining time only shrinks while its job runs, so the order of known ones never turns.
        return Rotation.ACROSS_LANES if self._guesses else Rotation.NEVER

    def memory_order(self, job: Job) -> Key:
        remaining = job.remaining_s
        if remaining is None:
            self._guesses = True
            remaining = job.attained_s
        return remaining

    def may_displace(self, waiting: Job, resident: Job, moment: Moment) -> bool:
        margin = moment.quantum_s if self._guesses else 0.0
        return bool(self.memory_order(waiting) + margin < self.memory_order(resident))

    def is_urgent(self, waiting: Job, resident: Job) -> bool:
        # Of one whose length is only guessed it is not known either whether it would run at once.
        return waiting.remaining_s is not None

    def choose(self, firsts: Sequence[Job], moment: Moment) -> Iterable[Job]:
        return fill(firsts) if self._fill else firsts[:1]
