"""A job that uses memory as a training does, with a cache of blocks as a framework has: no framework needed.

argv: SOURCE GO WEIGHTS_MIB ACTIVATIONS_MIB ITERATIONS. Weights are loaded outside any iteration; the optimizer's state
is made in the first one and stays; gradients live over boundaries; each of the first 20 keeps a little more; the rest
is dead at the end of an iteration.
"""

from __future__ import annotations

import os
import sys
import threading
import time

sys.path.insert(0, sys.argv[1])
from host_memory import MIB, HostMemory

from salus.client.lease import of_this_process

LAYERS = 3
GO, WEIGHTS, ACTIVATIONS, ITERATIONS = sys.argv[2], *map(int, sys.argv[3:6])

lease, memory = of_this_process(), HostMemory()
assert lease is not None and lease.attach(memory)
cached: dict[int, list[int]] = {}


def take(mib: int) -> tuple[int, int]:
    free = cached.setdefault(mib, [])
    address = free.pop() if free else memory.arena.alloc("lane", mib * MIB)
    assert address, "out of memory"
    memory.live[address] = mib * MIB
    return address, mib


def give_back(*blocks: tuple[int, int]) -> None:
    for address, mib in blocks:
        del memory.live[address]
        cached[mib].append(address)


assert all(memory.arena.alloc("private", WEIGHTS * MIB) for _ in range(LAYERS))
while not os.path.exists(GO):
    threading.Event().wait(0.01)
gradients: list[tuple[int, int]] = []
state: list[tuple[int, int]] = []
kept: list[tuple[int, int]] = []
for _ in range(ITERATIONS):
    lease.begin()
    give_back(*gradients)
    activations = [take(ACTIVATIONS) for _ in range(LAYERS)]
    gradients = [take(WEIGHTS) for _ in range(LAYERS)]
    give_back(*activations)
    state = state or [take(WEIGHTS) for _ in range(2 * LAYERS)]
    scratch = [take(WEIGHTS) for _ in range(LAYERS)]
    time.sleep(0.003)
    give_back(*scratch)
    if len(kept) < 20:
        kept.append(take(2))
    lease.end()
print("finished")
