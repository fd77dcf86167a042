"""Least attained service first, for jobs whose length nobody knows.

The job that has had the least GPU time runs; the next ones run beside it while part of the GPU is idle. To take
another's memory a job must have had less than half of its GPU time, and a minute less: paging is not free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from salus.core.model import Job
from salus.core.policies.base import Moment, Policy, Rotation, fill
from salus.core.policies.srtf import FILL

if TYPE_CHECKING:
    from salus.core.order import Key

DISPLACE_FACTOR = 2.0
DISPLACE_MARGIN_S = 60.0


class Las(Policy):
    """The job that has had the least GPU time first; no lengths needed."""

    name = "las"
    options = (FILL,)

    @property
    def rotates(self) -> Rotation:
        return Rotation.ACROSS_LANES

    def memory_order(self, job: Job) -> Key:
        return job.attained_s

    def may_displace(self, waiting: Job, resident: Job, moment: Moment) -> bool:
        return waiting.attained_s * DISPLACE_FACTOR + DISPLACE_MARGIN_S <= resident.attained_s

    def choose(self, firsts: Sequence[Job], moment: Moment) -> Iterable[Job]:
        return fill(firsts) if self.settings["fill"] == "on" else firsts[:1]
