"""A job without a framework whose iterations are all alike: nothing lives in the lane between them.

argv: SOURCE ITERATIONS SECONDS PAUSE GO. An iteration takes SECONDS, and PAUSE lies between two. Prints one line of
JSON: when each iteration began and ended (CLOCK_MONOTONIC, ns), and how many leases it passed on by itself.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

sys.path.insert(0, sys.argv[1])
from salus.client.arena import Arena
from salus.client.lease import WHERE_IT_WAITS, of_this_process

MIB = 1 << 20


class HostMemory:
    def __init__(self) -> None:
        self.arena = Arena()
        self.passed = 0

    def open(self, page_address: int, channel: int) -> None:
        self.arena.open("host", 0, page_address, channel)
        self.arena.trust(WHERE_IT_WAITS)

    def before_yield(self) -> bool:
        return self.arena.yield_([])

    def after_grant(self) -> bool:
        return self.arena.resume()

    def pass_on(self, word: int, ticket: int, wants_more: bool) -> bool:
        passed = self.arena.pass_on(word, ticket, wants_more)
        self.passed += passed
        return passed

    def wait(self) -> None:
        pass

    def detach(self) -> bool:
        return self.arena.detach()

    def where(self) -> tuple[bool, bool]:
        return self.arena.where()

    def reopen(self, page_address: int, channel: int, holds: bool) -> None:
        self.arena.reconnect(page_address, channel, holds)

    def go_alone(self) -> None:
        self.arena.go_alone()

    def listen(self) -> bool:
        return self.arena.listen()


def main(iterations: int, seconds: float, pause: float) -> None:
    lease = of_this_process()
    memory = HostMemory()
    assert lease is not None and lease.attach(memory)
    while not os.path.exists(sys.argv[5]):
        threading.Event().wait(0.01)
    lease.begin()
    assert memory.arena.alloc("lane", 4 * MIB)
    lease.end()
    times = []
    for _ in range(iterations):
        lease.begin()
        began = time.monotonic_ns()
        time.sleep(seconds)
        lease.end()
        times.append((began, time.monotonic_ns()))
        time.sleep(pause)
    print(json.dumps({"times": times, "passed": memory.passed}))


main(int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
