"""A job of the host device that uses its lane and then replaces itself, as `os.execv` does. argv: SOURCE TIMES."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, sys.argv[1])
from arena_job import Block, NotedMemory

from salus.client.lease import of_this_process

MIB = 1 << 20


def main(times: int) -> None:
    lease, memory = of_this_process(), NotedMemory()
    assert lease is not None
    if not lease.attach(memory):
        sys.exit("it was not let in")
    for number in range(10):
        lease.begin()
        block = Block(memory.arena, "lane", 4 * MIB, number << 20)
        block.check("within an iteration")
        if times and number == 9:
            # In the middle of an iteration, with a lease.
            os.execv(sys.executable, [sys.executable, __file__, sys.argv[1], str(times - 1)])
        memory.arena.free("lane", block.address, block.size)
        lease.end()
    print("finished")


if __name__ == "__main__":
    main(int(sys.argv[2]))
