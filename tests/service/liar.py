"""Jobs that lie, played in a process of their own: python -m tests.service.liar SOCKET WHAT

The service believes that a process uses its memory until it is dead, so lies are told by one that can be killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

from salus.client.connection import ServiceConnection
from salus.errors import SalusError
from salus.protocol import messages as msg
from salus.protocol import slots
from salus.protocol.page import JobState, Page, Word
from salus.protocol.slots import Kind, Record

LIES = (1, 2**31, 2**53, 2**62 + 1, 2**63 - 1, 2**63, 2**64 - 1)
WORDS = [word for word in Word if word is not Word.MAGIC]
PACKETS = 20_000
LEASE_LIMIT_S = 10.0


class Played(NamedTuple):
    """A job: its launcher, the connection of its process, its page and its arena's channel."""

    job_id: str
    token: str
    launcher: ServiceConnection
    worker: ServiceConnection
    page: Page
    channel: socket.socket | None

    def says_it_yields(self) -> None:
        # The service may have cut it off by now.
        with contextlib.suppress(SalusError):
            for message in (msg.Yielding(now=False), msg.Yielded(wants_more=True), msg.Ready()):
                self.worker.send(message)

    def close(self) -> None:
        for end in (self.launcher, self.worker, self.channel):
            if end is not None:
                end.close()
        self.page.close()

    def is_cut_off(self) -> bool:
        """Waits for it."""
        try:
            while True:
                self.worker.receive()
        except SalusError as error:
            return "does not answer" not in str(error)


def play(path: Path, name: str = "liar", *, arena: bool = True) -> Played:
    launcher, worker = ServiceConnection(path), ServiceConnection(path)
    sizes = {"persistent_bytes": 1 << 20, "ephemeral_bytes": 4 << 20} if arena else {}
    job = launcher.request(msg.Register(name, ["x"], "/", **sizes))
    worker.send(msg.Attach(job.job_id, job.token, arena=arena))
    _, descriptors = worker.receive()
    channel = socket.socket(fileno=descriptors.pop(2)) if arena else None
    shared = Page(descriptors[0])
    for descriptor in descriptors:
        os.close(descriptor)
    worker.send(msg.Ready())
    deadline = time.monotonic() + LEASE_LIMIT_S
    while not shared.words[Word.GRANTS] and time.monotonic() < deadline:
        time.sleep(0.001)
    return Played(job.job_id, job.token, launcher, worker, shared, channel)


def lie_in_every_word(path: Path, lie: int) -> None:
    for word in WORDS:
        liar = play(path, word.name)
        liar.page.words[Word.STATE] = JobState.BETWEEN
        liar.page.words[word] = lie
        liar.says_it_yields()


def lie_at_random(path: Path, seed: int) -> None:
    rng = random.Random(seed)
    liars = [play(path, f"liar{number}") for number in range(4)]
    for _ in range(300):
        for liar in liars:
            for word in WORDS:
                liar.page.words[word] = rng.choice((*LIES, rng.randrange(2**64), rng.randrange(100)))
            liar.says_it_yields()


def never_stop_talking(path: Path) -> None:
    """Counts its packets as it should, and sends as many as it can."""
    liar = play(path)
    packet = slots.pack([Record(Kind.DROP, 7)] * slots.MOST_RECORDS)
    print("began", flush=True)
    for _ in range(PACKETS):
        liar.page.words[Word.JOB_PACKETS] += 1
        with contextlib.suppress(OSError):
            liar.channel.send(packet)


def report_no_time(path: Path) -> None:
    """Has the device for as long as others let it, yields when it is asked to, and says it used nothing."""
    liar = play(path, "thrifty", arena=False)
    print("began", flush=True)
    leases = 0
    words = liar.page.words
    while True:
        while words[Word.GRANTS] == leases:
            time.sleep(0.0005)
        leases = words[Word.GRANTS]
        while not words[Word.REVOKE]:
            time.sleep(0.0005)
        words[Word.BOUNDARIES] += 1
        words[Word.YIELDED] = leases
        liar.worker.send(msg.Yielded(wants_more=True))


def keep_the_lease(path: Path) -> None:
    """Passes one boundary after the other, and yields at none."""
    liar = play(path, "keeper", arena=False)
    print("began", flush=True)
    while True:
        liar.page.words[Word.BOUNDARIES] += 1
        time.sleep(0.001)


def main() -> None:
    path, what = Path(sys.argv[1]), sys.argv[2]
    if what == "talks":
        never_stop_talking(path)
    elif what == "thrifty":
        report_no_time(path)
    elif what == "keeper":
        keep_the_lease(path)
    elif what == "random":
        lie_at_random(path, int(sys.argv[3]))
    else:
        lie_in_every_word(path, int(what))
    print("told", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
