"""What the arena costs: an allocation where no chunk has to be made, and joining a large lane.

Plays the service itself, for two processes one after the other: the first fills a lane and publishes it, the second
maps it.
"""

from __future__ import annotations

import array
import json
import os
import socket
import subprocess
import sys
from typing import Any

from salus.protocol.page import Page, Word
from salus.protocol.slots import MOST_RECORDS, Kind, Record, pack, unpack

TARGETS = {"alloc_us": 2.0, "join_ms": 150.0}


class _Process:
    def __init__(self, device: str, what: str, size: int) -> None:
        self._page, descriptor = Page.create()
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "salus.bench.arena_job", device]
        self._process = subprocess.Popen(
            [*command, str(descriptor), str(theirs.fileno()), what, str(size)],
            pass_fds=(descriptor, theirs.fileno()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        os.close(descriptor)
        self._sent = 0

    def send(self, records: list[Record], descriptors: list[int]) -> None:
        self._sent += 1
        self._page.words[Word.SERVICE_PACKETS] = self._sent
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self._ours.sendmsg([pack(records)], rights)

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def published(self) -> dict[int, int]:
        """What the process sent before it said what it measured: the page has the number of packets."""
        chunks: dict[int, int] = {}
        for _ in range(self._page.words[Word.JOB_PACKETS]):
            packet, ancillary, _, _ = self._ours.recvmsg(1 << 16, socket.CMSG_SPACE(4 * MOST_RECORDS))
            given = array.array("i")
            for _, _, data in ancillary:
                given.frombytes(data)
            chunks.update(zip((record.slot for record in unpack(packet)), given, strict=True))
        return chunks

    def told(self) -> dict[str, float]:
        assert self._process.stdout is not None
        found: dict[str, float] = json.loads(self._process.stdout.readline())
        return found

    def end(self) -> None:
        self.go()
        self._process.wait(timeout=60)
        self._ours.close()


def measure(device: str, size: int) -> dict[str, Any]:
    quota = Record(Kind.QUOTA, 0, size, 2 * size)
    maker = _Process(device, "make", size)
    maker.send([quota], [])
    maker.go()
    made = maker.told()
    chunks = maker.published()
    joiner = _Process(device, "join", size)
    slots = sorted(chunks)
    # Its start-up, with the driver's, is not what is measured: it opens its arena and then waits for our word.
    for start in range(0, len(slots), MOST_RECORDS):
        part = slots[start : start + MOST_RECORDS]
        joiner.send([Record(Kind.CHUNK, slot) for slot in part], [chunks[slot] for slot in part])
    joiner.send([quota], [])
    joiner.go()
    joined = joiner.told()
    joiner.end()
    maker.end()
    for descriptor in chunks.values():
        os.close(descriptor)
    alloc_us = max(0.0, made["alloc_and_free_us"] - made["two_empty_calls_us"]) / 2
    return {
        "bytes": size,
        "chunks": len(chunks),
        "make_ms": made["make_ms"],
        "publish_ms": made["publish_ms"],
        "alloc_us": alloc_us,
        "alloc_and_free_from_python_us": made["alloc_and_free_us"],
        "join_ms": joined["resume_ms"],
        "targets": TARGETS,
    }


def verdicts(result: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    alloc, join = result["alloc_us"], result["join_ms"]
    return [
        ("allocation, the chunk is there", f"{alloc:.2f} us", "at most 2 us", alloc <= TARGETS["alloc_us"]),
        ("joining the lane", f"{join:.1f} ms", "at most 150 ms", join <= TARGETS["join_ms"]),
        ("making the lane", f"{result['make_ms']:.1f} ms for {result['chunks']} chunks", "", True),
        ("publishing it", f"{result['publish_ms']:.1f} ms", "", True),
    ]
