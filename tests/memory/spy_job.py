"""A job that fills its lane with a pattern and looks for the other one's, as a user of its own.

argv: SOURCE UID NAME PATTERN OTHER ITERATIONS. It says "saw" and ends with 1 if the other's pattern ever arrives.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from salus.client.arena import Arena
from salus.client.connection import ServiceConnection
from salus.client.lease import Lease
from salus.protocol import messages as msg

SIZE = 8 << 20


class SpyMemory:
    def __init__(self) -> None:
        self.arena = Arena()

    def open(self, page_address: int, channel: int) -> None:
        self.arena.open("host", 0, page_address, channel)

    def before_yield(self) -> bool:
        return self.arena.yield_([])

    def after_grant(self) -> bool:
        return self.arena.resume()

    def pass_on(self, word: int, ticket: int, wants_more: bool) -> bool:
        return self.arena.pass_on(word, ticket, wants_more)

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


def main(uid: int, name: str, pattern: bytes, other: bytes, iterations: int) -> None:
    # Everything is imported; from here on somebody else.
    os.setgid(uid)
    os.setuid(uid)
    path = Path(os.environ["SALUS_SOCKET"])
    launcher = ServiceConnection(path)
    asked = msg.Register(name, ["spy"], "/", persistent_bytes=0, ephemeral_bytes=SIZE)
    job = launcher.request(asked)
    lease = Lease(path, job.job_id, job.token)
    assert lease.attach(SpyMemory())
    memory = lease._memory
    assert memory is not None
    lease.begin()
    address = memory.arena.alloc("lane", SIZE)
    assert address is not None
    lease.end()
    found = 0
    for _ in range(iterations):
        lease.begin()
        here = ctypes.string_at(address, SIZE)
        found += other in here
        ctypes.memmove(address, (pattern * (SIZE // len(pattern)))[:SIZE], SIZE)
        lease.end()
        time.sleep(0.002)
    print("saw" if found else "saw nothing", flush=True)
    sys.exit(bool(found))


main(int(sys.argv[2]), sys.argv[3], sys.argv[4].encode(), sys.argv[5].encode(), int(sys.argv[6]))
