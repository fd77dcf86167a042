"""Slots of a lane, and the records on the channel between a job's arena and the service. The C side is csrc/arena.h.

A lane is cut into slots, the same in every process: fine at its beginning, where small jobs live, coarse further up. A
slot is backed by a chunk or by nothing. A packet is 1 to MOST_RECORDS records; descriptors come in the order of the
records that have one.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

GRANULE_BYTES = 2 << 20
REGIONS = ((64, GRANULE_BYTES), (48, 4 * GRANULE_BYTES), (112, 16 * GRANULE_BYTES), (1 << 20, 64 * GRANULE_BYTES))
"""How many slots of which size, from the beginning of the lane."""
MOST_RECORDS = 64
_RECORD = struct.Struct("=IIQQ")


class Kind(IntEnum):
    # From the job.
    WANT = 1
    PUBLISH = 2
    TAKE = 3
    DROP = 4
    LEFT = 5
    PAGED = 6
    OWN = 7
    # From the service.
    QUOTA = 11
    REFUSED = 12
    CHUNK = 13
    NEW_LANE = 14
    HOLE = 15
    PAGE_OUT = 16
    PAGE_IN = 17
    RESUME = 18
    PREPARE = 19


class Record(NamedTuple):
    kind: int
    slot: int = 0
    a: int = 0
    b: int = 0


def pack(records: list[Record]) -> bytes:
    return b"".join(_RECORD.pack(*record) for record in records)


def unpack(packet: bytes) -> list[Record]:
    return [Record(*parts) for parts in _RECORD.iter_unpack(packet[: len(packet) - len(packet) % _RECORD.size])]


def size_of(slot: int) -> int:
    return end_of(slot) - (end_of(slot - 1) if slot else 0)


def end_of(slot: int) -> int:
    """Where the slot ends, in bytes from the beginning of the lane."""
    offset = 0
    for count, size in REGIONS:
        if slot < count:
            return offset + (slot + 1) * size
        slot -= count
        offset += count * size
    raise ValueError(f"there is no slot {slot}")
