"""The jobs of `salus bench switch`, run as a job's process: python -m salus.bench.switch_job KIND COUNT SECONDS [GO]

- `alone`: begins and ends iterations that do nothing, and says what a boundary costs; then does so again where the
  kernel ends it at the first system call.
- `turns`: iterations of some length; says when each began and ended, on the clock that all processes share. It stops
  early when told to by SIGTERM. With GO it begins when that file is there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from salus.bench.seccomp import STDOUT, forbid_system_calls
from salus.client.lease import Lease, of_this_process

BATCH = 1000


def alone(lease: Lease, count: int) -> None:
    costs_us: list[float] = []
    for _ in range(count // BATCH):
        start = time.perf_counter_ns()
        for _ in range(BATCH):
            lease.begin()
            lease.end()
        costs_us.append((time.perf_counter_ns() - start) / BATCH / 1000)
    os.write(STDOUT, json.dumps(costs_us).encode() + b"\n")
    if forbid_system_calls():
        for _ in range(count):
            lease.begin()
            lease.end()
        os.write(STDOUT, b'"none"\n')
    else:
        os.write(STDOUT, b"null\n")
    os._exit(0)


def turns(lease: Lease, count: int, seconds: float) -> None:
    now = time.monotonic_ns
    length = int(seconds * 1e9)
    began, ended = [0] * count, [0] * count
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    done = 0
    while done < count and not stopped:
        lease.begin()
        began[done] = start = now()
        while now() - start < length:
            pass
        ended[done] = now()
        lease.end()
        done += 1
    print(json.dumps([began[:done], ended[:done]]))


def main(kind: str, count: int, seconds: float, go: str | None = None) -> None:
    lease = of_this_process()
    if lease is None:
        sys.exit("salus: this is a job of salus bench switch; run that")
    if kind == "alone" or go is not None:
        lease.begin()
        lease.end()
    while go is not None and not os.path.exists(go):
        time.sleep(0.001)
    if kind == "alone":
        alone(lease, count)
    else:
        turns(lease, count, seconds)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:])
