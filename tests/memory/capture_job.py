"""A job of the host device that captures graphs, as far as Salus sees that, while others wait for its lane.

argv: SOURCE NAME ROUNDS GO. Within a capture its part of the lane must stay as it is and the driver must not be called,
whatever the service and the helper thread want meanwhile.
"""

from __future__ import annotations

import os
import sys
import threading

sys.path.insert(0, sys.argv[1])
from arena_job import Block, NotedMemory

from salus.adaptors.captures import Captures
from salus.client.lease import of_this_process

MIB = 1 << 20
CAPTURE_S = 0.02
"""Long enough for the service to revoke the lease, and for the helper thread to give it up."""


class Memory(NotedMemory):
    def capture_began(self) -> None:
        self.arena.capture_began()

    def capture_ended(self) -> None:
        self.arena.capture_ended()


class Graph:
    def capture_begin(self) -> None:
        pass

    def capture_end(self) -> None:
        pass


def main(rounds: int) -> None:
    lease, memory = of_this_process(), Memory()
    assert lease is not None and lease.attach(memory)
    captures = Captures(lease, memory)
    captures.install(Graph)
    while not os.path.exists(sys.argv[4]):
        threading.Event().wait(0.01)
    for number in range(rounds):
        graph = Graph()
        if number % 3 == 0:
            lease.begin()  # a capture within an iteration
        graph.capture_begin()
        before, resumed = memory.arena.calls(), memory.resumed
        for _ in range(2):
            if not captures.takes_begin():
                sys.exit("the capture does not hold the lease")
            threading.Event().wait(CAPTURE_S / 2)
            if not captures.takes_end(1):
                sys.exit("an iteration within a capture was a boundary")
        if (memory.arena.calls(), memory.resumed) != (before, resumed):
            sys.exit(f"the driver was called {memory.arena.calls() - before} times within a capture")
        graph.capture_end()
        lease.begin()
        block = Block(memory.arena, "lane", 4 * MIB, number << 20)
        threading.Event().wait(0.001)
        block.check("within an iteration between captures")
        memory.arena.free("lane", block.address, block.size)
        lease.end(1 + captures.owed())
    print(f"finished {sys.argv[2]} {memory.resumed}")


if __name__ == "__main__":
    main(int(sys.argv[3]))
