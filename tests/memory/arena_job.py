"""A job without a framework that uses the arena of the host device, and checks every byte that it should still have.

argv: SOURCE NAME ITERATIONS SEED GO. It waits for the file GO. Within an iteration it takes segments of the lane and
writes its own pattern; some it keeps across iterations, some it frees. Whatever it kept must be there at the next one.
ARENA_JOB_PRIVATE_MIB: memory of its own, besides; it looks at that between iterations too, as scripts do.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from host_memory import MIB, HostMemory

from salus.client.arena import Arena
from salus.client.connection import ServiceConnection
from salus.client.lease import Lease, of_this_process
from salus.errors import SalusError
from salus.protocol import messages as msg

faulthandler.register(signal.SIGUSR1)
PRIVATE_MIB = int(os.environ.get("ARENA_JOB_PRIVATE_MIB", "0"))
ITERATION_S = float(os.environ.get("ARENA_JOB_ITERATION_S", "0"))

KEPT: list[ServiceConnection] = []
EVENTS: list[str] = []
"""What happened, for when something is wrong."""


def note(what: str) -> None:
    EVENTS.append(f"{time.monotonic():.4f} {what}")


class NotedMemory(HostMemory):
    """Notes what happens, for when something is wrong; and whatever is not kept is poisoned."""

    def __init__(self) -> None:
        super().__init__()
        self.poison = True

    def leave(self, word: int, ticket: int, wants_more: bool) -> tuple[int, int]:
        left = super().leave(word, ticket, wants_more)
        note(f"yield {left} {threading.current_thread().name}")
        return left

    def after_grant(self) -> bool:
        resumed = super().after_grant()
        note(f"resume {resumed} {self.arena.where()}")
        return resumed

    def pass_on(self, word: int, ticket: int, wants_more: bool) -> bool:
        passed = super().pass_on(word, ticket, wants_more)
        note(f"pass on {passed}")
        return passed

    def detach(self) -> bool:
        detached = super().detach()
        note(f"detach {detached}")
        return detached

    def reopen(self, page_address: int, channel: int, holds: bool) -> None:
        note(f"reconnect {holds} {self.arena.where()}")
        super().reopen(page_address, channel, holds)

    def go_alone(self) -> None:
        note("alone")
        super().go_alone()

    def listen(self) -> bool:
        more = super().listen()
        note(f"listen {more} {self.arena.where()}")
        return more


class Block:
    """Memory of ours with a pattern in it, at its beginning, its end and here and there between."""

    def __init__(self, arena: Arena, kind: str, size: int, word: int) -> None:
        address = arena.alloc(kind, size)
        if address is None:
            sys.exit(f"out of memory: {size >> 20} MiB of {kind}")
        self.kind, self.address, self.size, self.word = kind, address, size, word
        self.words = (ctypes.c_uint64 * (size // 8)).from_address(address)
        self.places = [*range(0, size // 8, 4096), size // 8 - 1]
        self.write(word)

    def write(self, word: int) -> None:
        self.word = word
        for place in self.places:
            self.words[place] = word + place

    def check(self, when: str) -> None:
        for place in self.places:
            if self.words[place] != self.word + place:
                wrong = [one for one in self.places if self.words[one] != self.word + one]
                print(*EVENTS[-40:], sep="\n", file=sys.stderr)
                sys.exit(
                    f"{self.kind} memory was overwritten: {self.words[place]:#x} at {place} of {self.size >> 20} MiB, "
                    f"{len(wrong)} of {len(self.places)} places, {when}"
                )


def by_itself(name: str) -> Lease:
    """Without a launcher: it registers itself, and keeps that connection."""
    path = Path(os.environ["SALUS_SOCKET"])
    persistent_bytes = (PRIVATE_MIB + 40) * MIB
    asked = msg.Register(name, sys.argv[1:], "/", persistent_bytes=persistent_bytes, ephemeral_bytes=90 * MIB)
    while True:
        try:
            connection = ServiceConnection(path)
            job = connection.request(asked)
            KEPT.append(connection)
            return Lease(path, job.job_id, job.token)
        except SalusError:
            time.sleep(0.05)  # it is being started again


def main(name: str, iterations: int, seed: int) -> None:
    rng = random.Random(seed)
    lease = of_this_process() or by_itself(name)
    memory = NotedMemory()
    assert lease.attach(memory)
    kept: list[Block] = []
    private = [Block(memory.arena, "private", rng.randrange(1, 5) * 2 * MIB, seed << 40)]
    private += [Block(memory.arena, "private", 8 * MIB, seed << 40 | 1 << 32) for _ in range(PRIVATE_MIB // 8)]
    while not os.path.exists(sys.argv[5]):
        # A thread that waits like this is known to use nothing of the device, and can be paged out.
        threading.Event().wait(0.01)
    for iteration in range(iterations):
        lease.begin()
        note(f"iteration {iteration}, {len(kept)} kept")
        for block in (*kept, *private):
            block.check(f"kept until iteration {iteration}")
        sizes = [rng.choice((2, 2, 4, 20, 6)) * MIB for _ in range(rng.randrange(1, 5))]
        blocks = [Block(memory.arena, "lane", size, seed << 40 | iteration << 20) for size in sizes]
        note("allocated")
        time.sleep(ITERATION_S)
        for block in (*kept, *blocks):
            block.check(f"within iteration {iteration}")
        for block in blocks:
            if rng.random() < 0.1 and len(kept) < 4:
                kept.append(block)
                memory.live[block.address] = block.size
            else:
                memory.arena.free("lane", block.address, block.size)
        if kept and rng.random() < 0.3:
            gone = kept.pop(rng.randrange(len(kept)))
            del memory.live[gone.address]
            memory.arena.free("lane", gone.address, gone.size)
        lease.end()
        if private and rng.random() < 0.3:
            block = rng.choice(private)
            block.check(f"after iteration {iteration}")
            block.write(seed << 40 | iteration << 20)
            time.sleep(rng.choice((0, 0, 0.001, 0.02)))
    print(f"finished {name} {memory.resumed}")


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
