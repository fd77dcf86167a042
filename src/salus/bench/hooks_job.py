"""The job of `salus bench hooks`, run as a job's process: python -m salus.bench.hooks_job MODEL DEVICE ROUNDS BLOCK

It trains a small model, and between blocks of iterations takes everything of Salus out of this process and puts it in
again. Says the seconds of an iteration, at the median of each block, for each of `STATES`, round by round; on a GPU
`sorted` is in between: without hooks, but with memory from Salus's pools.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from salus.adaptors import torch as adaptor
from salus.bench.scripts.train import build

STATES = {"cpu": ("bare", "salus"), "cuda": ("bare", "sorted", "salus")}
WARM_UP = 30
SETTLES = adaptor.USUAL_AFTER + 2
"""The first iterations after a change are slower, and only after a few alike are they what they will be."""
BATCH = 16


def one_iteration(model: str, device: str) -> Callable[[], None]:
    torch.manual_seed(0)
    if device == "cpu":
        torch.set_num_threads(1)
    network, shape = build(model)
    network.to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    x = torch.randn(BATCH, *shape, device=device)
    y = torch.randint(10, (BATCH,), device=device)

    def iterate() -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()

    return iterate


def put(watch: adaptor.Watch, state: str) -> None:
    """Into one of `STATES`, between iterations. The first `SETTLES` iterations after that do not count."""
    watch.uninstall()
    if watch.memory is not None:
        watch.memory.sort(on=state != "bare")
    if state == "salus":
        watch.install()


def main(model: str, device: str, rounds: int, block: int) -> None:
    watch = adaptor.installed()
    if watch is None:
        sys.exit("this is no job: run it as `salus bench hooks`")
    iterate = one_iteration(model, device)
    for _ in range(WARM_UP):
        iterate()
    rng = random.Random(0)
    told: dict[str, list[float]] = {state: [] for state in STATES[device]}
    for _ in range(rounds):
        # In either order: the second one finds what the first has left.
        for state in rng.sample(list(told), len(told)):
            put(watch, state)
            for _ in range(SETTLES):
                iterate()
            seconds = []
            for _ in range(block):
                began = time.perf_counter()
                iterate()
                seconds.append(time.perf_counter() - began)
            told[state].append(statistics.median(seconds))
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
