"""The oldest job alone, as a GPU without sharing would run it. The next in line may already have its memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from salus.core.model import Job
from salus.core.policies.base import Moment, Policy


class Fifo(Policy):
    """The oldest job alone, then the next."""

    name = "fifo"
    overtakes = False

    def choose(self, firsts: Sequence[Job], moment: Moment) -> Iterable[Job]:
        return firsts[:1]
