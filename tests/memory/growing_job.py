"""A job that takes memory of its own and never iterates; it checks that it keeps what it wrote.

argv: SOURCE BLOCKS SECONDS. It takes so many blocks of 16 MiB; then it computes for so long, so that it cannot be paged
out meanwhile.
"""

from __future__ import annotations

import sys
import time

from arena_job import MIB, Block, HostMemory, of_this_process

lease = of_this_process()
memory = HostMemory()
assert lease is not None and lease.attach(memory)
blocks = [Block(memory.arena, "private", 16 * MIB, number << 32) for number in range(int(sys.argv[2]))]
until = time.monotonic() + float(sys.argv[3])
while time.monotonic() < until:
    pass
for block in blocks:
    block.check("at the end")
print("finished")
