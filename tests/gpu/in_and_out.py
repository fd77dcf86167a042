"""A script of train.py, as a job that takes all of Salus out of its process, block by block, and puts it in again.

    salus run -- python in_and_out.py KIND SECONDS [--go FILE]

From one process to the next the same script differs by several percent on a shared machine, and by no more than a few
thousandths from one block of iterations to the next. Prints one line of JSON: the seconds of an iteration, at the
median of each block, for each state, round by round. `again` is bare once more: what can be told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import torch
import train

from salus.adaptors import torch as adaptor
from salus.bench.hooks_job import SETTLES, is_known, put

STATES = ("bare", "salus", "again")
WARM_UP, BLOCK, LEAST_ROUNDS = 20, 5, 6
PRECISE = 0.0025
"""It is over when what Salus adds is known to this part of an iteration, or by the clock."""
ENOUGH = 20_000
"""Iterations; it stops long before that, by the clock."""


class InAndOut:
    def __init__(self, kind: str, seconds: float, go: str | None) -> None:
        watch = adaptor.installed()
        if watch is None:
            sys.exit("this is no job: run it under Salus")
        self._watch = watch
        self._seconds, self._go = seconds, go
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._rng = random.Random(kind)
        self._left = WARM_UP
        self._states: list[str] = []
        self._state = ""
        self._block: list[float] = []
        self._began = self._measures_until = 0.0
        self._told: dict[str, list[float]] = {state: [] for state in STATES}

    def on_batch(self) -> None:
        if self._began:
            self._block.append(time.perf_counter() - self._began)
        self._left -= 1
        if self._left < 0:
            self._next_block()
        self._began = time.perf_counter()

    def _next_block(self) -> None:
        if self._state:
            self._told[self._state].append(statistics.median(self._block[SETTLES:]))
        elif self._go:
            torch.cuda.synchronize()
            print("ready", file=self._out, flush=True)
            while not os.path.exists(self._go):
                time.sleep(0.01)
        if not self._states:
            now = time.monotonic()
            self._measures_until = self._measures_until or now + self._seconds
            over = now > self._measures_until and len(self._told["bare"]) >= LEAST_ROUNDS
            if over or is_known(self._told, PRECISE):
                print(json.dumps(self._told), file=self._out, flush=True)
                os._exit(0)
            # In any order: each finds what the one before it has left.
            self._states = self._rng.sample(STATES, len(STATES))
        self._state, self._block, self._left = self._states.pop(), [], SETTLES + BLOCK - 1
        put(self._watch, self._state)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=train.ALL)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--go")
    options = parser.parse_args()
    measured = InAndOut(options.kind, options.seconds, options.go)
    train.run(options.kind, ENOUGH, measured.on_batch, torch.Tensor.cpu)


if __name__ == "__main__":
    main()
