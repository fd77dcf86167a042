"""What is in use in one of torch's pools, by address, and sets of it that were seen before.

Must not know: torch. What it is told is a snapshot of a pool, as torch makes it.
"""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any, NamedTuple

from salus.client.arena import SMALLEST_SLOT_BYTES


class Live(NamedTuple):
    """What is in use in a pool."""

    blocks: dict[int, int]
    """Sizes by address."""
    pending: bool
    """Some of it only waits for the GPU to be done with it."""
    sealed: bool
    """Whatever size a block at one of these addresses has, it reaches no slot but those that are the job's already."""

    @classmethod
    def of(cls, snapshot: Any) -> Live:
        blocks: dict[int, int] = {}
        pending, sealed = False, True
        for segment in snapshot:
            if not segment["active_size"]:
                continue
            address, whole = segment["address"], segment["total_size"] <= SMALLEST_SLOT_BYTES
            here = False
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    pending = pending or block["state"] != "active_allocated"
                    blocks[address] = block["size"]
                    here = True
                elif here and not whole:
                    sealed = False
                address += block["size"]
        return cls(blocks, pending, sealed)


class Known:
    """Sets of live blocks that were seen before. A script whose iterations are alike comes back to one of a few.

    To ask torch whether exactly these are alive takes a tenth of the time that a snapshot takes.
    """

    MOST = 3

    def __init__(self) -> None:
        self._sets: list[tuple[set[int], array.array[int]]] = []
        self._segments = -1

    def find(self, segments: int, lives: Callable[[set[int]], bool]) -> array.array[int] | None:
        """Addresses and sizes; None: it is none of them. `segments` changes whenever the pool's segments do."""
        if segments != self._segments:
            self._sets, self._segments = [], segments
        for number, (addresses, flat) in enumerate(self._sets):
            if lives(addresses):
                if number:
                    self._sets.insert(0, self._sets.pop(number))
                return flat
        return None

    def add(self, live: Live, flat: array.array[int]) -> None:
        if live.sealed and not live.pending:
            self._sets = [(set(live.blocks), flat), *self._sets[: self.MOST - 1]]
