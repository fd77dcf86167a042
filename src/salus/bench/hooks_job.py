"""The job of `salus bench hooks` and `salus bench overhead`: python -m salus.bench.hooks_job MODEL, under Salus.

It trains a model, and between blocks of iterations takes everything of Salus out of this process and puts it in again.
Says the seconds of an iteration, at the median of each block, for each state, round by round. States: `bare`; `again`,
the same once more, which shows what can be told apart; `salus`; and, on a GPU, `sorted`: without hooks, but with memory
from Salus's pools.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from salus.adaptors import habits
from salus.adaptors import torch as adaptor
from salus.bench import hooks, models
from salus.bench.scripts.train import build

WARM_UP = 15
USUAL_AFTER = 1
"""Iterations that are taken to be all alike are measured. Here they are soon: it would be waited for in every block."""
SETTLES = 2 * USUAL_AFTER + 2
"""The first iterations after a change are slower, and only after a few alike are they what they will be."""
ROUNDS_TO_KNOW = 8
"""From fewer it is not known how much they differ."""
BATCH = 16

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model", help="of the small ones, or with --batch of the experiments' models")
parser.add_argument("--device", default="cpu")
parser.add_argument("--batch", type=int)
parser.add_argument("--states", default="bare,salus")
parser.add_argument("--block", type=int, default=5)
parser.add_argument("--rounds", type=int, default=1, help="at the least")
parser.add_argument("--seconds", type=float, default=0.0, help="at the least")
parser.add_argument("--precise", type=float, default=0.0, help="or until what is added is known to this part of it")
parser.add_argument("--wait", action="store_true", help="before it measures, say so and wait for a line of input")


def one_iteration(model: str, device: str, batch: int | None) -> Callable[[], None]:
    torch.manual_seed(0)
    if device == "cpu":
        torch.set_num_threads(1)
    if batch is not None:
        network, loss_of = models.build(model, batch, device)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    else:
        network, shape = build(model)
        network.to(device)
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
        x = torch.randn(BATCH, *shape, device=device)
        y = torch.randint(10, (BATCH,), device=device)

        def loss_of() -> torch.Tensor:
            return nn.functional.cross_entropy(network(x), y)

    def iterate() -> None:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()

    return iterate


def put(watch: adaptor.Watch, state: str) -> None:
    """Into one of the states, between iterations. The first `SETTLES` iterations after that do not count."""
    habits.AFTER = USUAL_AFTER
    # In and out for every state: torch's classes are changed by it, and what Python knew of them it learns anew.
    watch.uninstall()
    watch.install()
    if state != "salus":
        watch.uninstall()
    if watch.memory is not None:
        watch.memory.sort(on=state in ("sorted", "salus"))


def is_known(told: dict[str, list[float]], precise: float) -> bool:
    """Whether what Salus adds is, to this part of an iteration."""
    if len(told["bare"]) < ROUNDS_TO_KNOW:
        return False
    found = hooks.compare(told)
    return found["error_us"] <= precise * found["bare_us"]


def seconds_of(iterate: Callable[[], None]) -> float:
    began = time.perf_counter()
    iterate()
    return time.perf_counter() - began


def main() -> None:
    options = parser.parse_args()
    watch = adaptor.installed()
    if watch is None:
        sys.exit("this is no job: run it as `salus bench hooks`")
    iterate = one_iteration(options.model, options.device, options.batch)
    for _ in range(WARM_UP):
        iterate()
    if options.wait:
        print("block", flush=True)
        sys.stdin.readline()
    rng, until = random.Random(options.model), time.monotonic() + options.seconds
    told: dict[str, list[float]] = {state: [] for state in options.states.split(",")}
    while len(told["bare"]) < options.rounds or (time.monotonic() < until and not is_known(told, options.precise)):
        # In any order: each finds what the one before it has left.
        for state in rng.sample(list(told), len(told)):
            put(watch, state)
            for _ in range(SETTLES):
                iterate()
            told[state].append(statistics.median(seconds_of(iterate) for _ in range(options.block)))
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
