"""The jobs of `salus bench arena`: python -m salus.bench.arena_job DEVICE PAGE CHANNEL make|join BYTES

`make` fills a lane with segments, says what an allocation costs where the chunk is there already, and publishes the
lane. `join` maps it, and says how long that took.
"""

from __future__ import annotations

import json
import sys
import time

from salus.client.arena import Arena
from salus.protocol.page import Page

SEGMENT_BYTES = 20 << 20
ROUNDS = 20_000


def main(device: str, page: Page, channel: int, what: str, size: int) -> None:
    arena = Arena()
    arena.open(device, 0, page.address(), channel)
    sys.stdin.readline()
    start = time.perf_counter()
    assert arena.resume()
    told: dict[str, float] = {"resume_ms": (time.perf_counter() - start) * 1000}
    if what == "make":
        start = time.perf_counter()
        segments = [arena.alloc("lane", SEGMENT_BYTES) for _ in range(size // SEGMENT_BYTES)]
        told["make_ms"] = (time.perf_counter() - start) * 1000
        assert None not in segments
        last = segments[-1]
        start = time.perf_counter()
        for _ in range(ROUNDS):
            arena.free("lane", last, SEGMENT_BYTES)  # type: ignore[arg-type]
            last = arena.alloc("lane", SEGMENT_BYTES)
        told["alloc_and_free_us"] = (time.perf_counter() - start) / ROUNDS * 1e6
        start = time.perf_counter()
        arena.slots_of(0)
        for _ in range(ROUNDS):
            arena.slots_of(0)
            arena.slots_of(0)
        told["two_empty_calls_us"] = (time.perf_counter() - start) / ROUNDS * 1e6
        start = time.perf_counter()
        assert arena.yield_([])
        told["publish_ms"] = (time.perf_counter() - start) * 1000
    print(json.dumps(told), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], Page(int(sys.argv[2])), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
