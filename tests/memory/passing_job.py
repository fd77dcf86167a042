"""A job without a framework whose iterations are all alike: nothing lives in the lane between them.

argv: SOURCE ITERATIONS SECONDS PAUSE GO [quits|works|stops|raises]. An iteration takes SECONDS, PAUSE lies between two.
Prints one line of JSON: when each iteration began and ended (CLOCK_MONOTONIC, ns), and how many leases it passed on.
It fails if somebody else writes to the lane during an iteration of its own. With `quits`, it closes its connection on
SIGUSR1; with `works`, its device works during the pause; with `stops`, it stops itself after every twentieth one;
with `raises`, it is as if the handler of a signal raised in it now and then.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time

sys.path.insert(0, sys.argv[1])
from host_memory import MIB, HostMemory

from salus.client.arena import PASSED, STAYS
from salus.client.lease import of_this_process


class Interrupted(Exception):
    """Raised by the handler of a signal, for all that the lease knows."""


class RaisingMemory(HostMemory):
    """A handler of the script raises as soon as a call into the arena is over, every few times.

    And every few times that is taken for a failure to leave the lane.
    """

    calls = 0

    def leave(self, word: int, ticket: int, wants_more: bool) -> tuple[int, int]:
        left = self._then_raise(super().leave(word, ticket, wants_more))
        return (STAYS, 0) if self.calls % 4 == 0 and left[0] == PASSED else left

    def after_grant(self) -> bool:
        return self._then_raise(super().after_grant())

    def _then_raise(self, result):
        self.calls += 1
        if self.calls % 3 == 0 and threading.current_thread() is threading.main_thread():
            raise Interrupted
        return result


def main(iterations: int, seconds: float, pause: float) -> None:
    lease = of_this_process()
    raises = sys.argv[6:] == ["raises"]
    memory = RaisingMemory() if raises else HostMemory()
    assert lease is not None and lease.attach(memory)
    if sys.argv[6:] == ["quits"]:
        signal.signal(signal.SIGUSR1, lambda *_: lease._connection._sock.shutdown(socket.SHUT_RDWR))
    while not os.path.exists(sys.argv[5]):
        threading.Event().wait(0.01)
    begin(lease)
    address = memory.arena.alloc("lane", 4 * MIB)
    assert address is not None
    word = ctypes.c_uint64.from_address(address + MIB)
    lease.end()
    times = []
    works = sys.argv[6:] == ["works"]
    for number in range(iterations):
        begin(lease)
        began = time.monotonic_ns()
        word.value = mine = os.getpid() << 32 | number
        time.sleep(seconds)
        assert word.value == mine, "somebody else is in the lane"
        if works:
            memory.works_until = time.monotonic() + pause
        lease.end()
        times.append((began, time.monotonic_ns()))
        time.sleep(pause)
        if sys.argv[6:] == ["stops"] and number % 20 == 19:
            os.kill(os.getpid(), signal.SIGSTOP)
    print(json.dumps({"times": times, "passed": memory.passed}))


def begin(lease):
    while True:
        try:
            return lease.begin()
        except Interrupted:
            pass


main(int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
