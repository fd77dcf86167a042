"""What a framework's adaptor does around a lease, for jobs of the tests that use the arena of the host device."""

from __future__ import annotations

import os
import time
from pathlib import Path

from salus.client.arena import PASSED, Arena, ranges
from salus.client.lease import WHERE_IT_WAITS

MIB = 1 << 20


class HostMemory:
    def __init__(self) -> None:
        library = os.environ.get("SALUS_TEST_ARENA")
        self.arena = Arena(Path(library)) if library else Arena()
        self.live: dict[int, int] = {}
        """Addresses and sizes of what the job keeps in the lane."""
        self.poison = self.stays = False
        self.resumed = self.passed = 0
        self.works_until = 0.0
        """As a GPU does after the processor is done with an iteration."""

    def open(self, page_address: int, channel: int) -> None:
        self.arena.open("host", 0, page_address, channel)
        self.arena.trust(WHERE_IT_WAITS)

    def will_resume(self) -> None:
        self.arena.take_in()

    def stay(self) -> bool:
        return False

    def will_yield(self) -> None:
        pass

    def leave(self, word: int, ticket: int, wants_more: bool) -> tuple[int, int]:
        self.wait()
        left = self.arena.leave(ranges(self.live.items()), word, ticket, wants_more)
        self.passed += left == PASSED
        return left, self.arena.when[1]

    def after_grant(self) -> bool:
        self.resumed += 1
        return self.arena.resume(poison=self.poison)

    def pass_on(self, word: int, ticket: int, wants_more: bool) -> bool:
        passed = self.arena.pass_on(word, ticket, wants_more)
        self.passed += passed
        return passed

    def wait(self) -> None:
        time.sleep(max(0.0, self.works_until - time.monotonic()))

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
