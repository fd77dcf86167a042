"""Two roles in one lane: one keeps blocks alive across its yields, the other writes to all of the lane that it has.

argv: SOURCE ITERATIONS GO taker|peer. The taker fails if one of its blocks is not what it wrote.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import threading
import time

sys.path.insert(0, sys.argv[1])
from host_memory import MIB, HostMemory

from salus.client.lease import of_this_process

MOST_KEPT = 30
RESTS = 20
"""Iterations without a block, so that what was made private goes back to the lane."""
MARK = b"\xaa" * 16


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def main(iterations: int, takes: bool) -> None:
    rng = random.Random(1)
    lease, memory = of_this_process(), HostMemory()
    assert lease is not None and lease.attach(memory)
    while not os.path.exists(sys.argv[3]):
        threading.Event().wait(0.01)
    lease.begin()
    base = None if takes else memory.arena.alloc("lane", 64 * MIB)
    lease.end()
    kept: list[int] = []
    rest = 0
    for number in range(iterations):
        lease.begin()
        if base is not None:
            for place in range(0, 64 * MIB, 2 * MIB):
                ctypes.memset(base + place, 0xBB, 4096)
        else:
            for address in kept:
                assert ctypes.string_at(address, 16) == MARK, f"overwritten, in iteration {number}"
            if rest:
                rest -= 1
            elif len(kept) < MOST_KEPT:
                address = memory.arena.alloc("lane", 2 * MIB)
                assert address is not None
                ctypes.memset(address, 0xAA, 4096)
                kept.append(address)
            else:
                for address in kept:
                    memory.arena.free("lane", address, 2 * MIB)
                kept, rest = [], RESTS
            memory.live = dict.fromkeys(kept, 2 * MIB)
        compute(0.0003)
        lease.end()
        if takes:
            # Until it yields, for longer and for less long: what it says then meets what it is told.
            compute(rng.random() * 0.0004)
    print("finished")


main(int(sys.argv[2]), sys.argv[4] == "taker")
