"""The job of `salus bench hooks` for marks: python -m salus.bench.marks_job COUNT. Says the seconds of one mark.

Run under Salus and without: what an iteration costs that has nothing in it but its mark.
"""

from __future__ import annotations

import sys
import time

import salus

WARM_UP = 100


def seconds_of(count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        with salus.iteration():
            pass
    return (time.perf_counter() - began) / count


if __name__ == "__main__":
    seconds_of(WARM_UP)
    print(min(seconds_of(int(sys.argv[1])) for _ in range(5)), flush=True)
