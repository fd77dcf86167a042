"""Three ResNet-50 in one lane against one alone: what they get done together, in iterations.

The same three processes, at once and one alone, in turns of a second or two: whoever is not to run rests before its
next iteration (`Gate`). These scripts are as fast as the processor launches their kernels, and on a shared machine that
changes by a tenth from one second to the next, and by as much over minutes; so there are many short turns, and each is
compared with its neighbours only. It is told in three ways:

- by turns: an iteration of one alone to one of the three at once, just before and just after.
- at equal speed: the same, less what comes of the processor, as far as that can be seen: after every iteration each
  script does the same little work and says how long that took.
- by leases: what is lost at the two ends of each lease, against the iterations in its middle, where everybody else
  sleeps. It is better known, and true if a job runs there as it does alone.

Leases grow while the same jobs share a lane (`core/leases.py`), and jobs that train for hours run nearly all of the
time with the longest. So the service is told to begin with those (`--quantum`).
"""

from __future__ import annotations

import json
import math
import mmap
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from salus.bench import hooks, machine
from salus.bench.own_service import OwnService
from salus.bench.switch import standard_error, trimmed_mean
from salus.core.leases import LONGEST_LEASE_S
from tests.gpu.jobs import START_LIMIT_S, command, result_of, says_ready

JOBS, CORES = 3, 1
"""And the cores of each: on several, threads that take turns scatter twice as much from one iteration to the next."""
WARM_S = 10.0
"""All at once, before it begins."""
ROUNDS = 38
"""In each, everybody is alone once."""
ALONE_S, AT_ONCE_S = LONGEST_LEASE_S, 2 * LONGEST_LEASE_S
"""What counts of a turn."""
SETTLES_S = 0.3
"""What does not, at its beginning: the lease has to come to whoever is to run."""
WARMS_UP, WINDS_UP = 4, 1
"""Iterations at the two ends of a lease that are not like the others."""
FEWEST = 2 * (WARMS_UP + WINDS_UP)
"""Iterations of a lease that can be compared with itself."""
REST, RUN, END = 0, 1, 2


class Gate:
    """Where the scripts look, before every iteration, whether they are to go on: a byte for each."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes([RUN] * JOBS))
        with path.open("r+b") as file:
            self._seats = mmap.mmap(file.fileno(), JOBS)

    def let(self, *jobs: int) -> None:
        """Only these run; all others rest."""
        self._seats[:] = bytes(RUN if job in jobs else REST for job in range(JOBS))

    def end(self) -> None:
        self._seats[:] = bytes([END] * JOBS)


class Done(NamedTuple):
    """An iteration."""

    at: float
    processor_s: float
    """How long its script took for a little work after it."""


class Turn(NamedTuple):
    alone: int | None
    """Who was; None: all ran at once."""
    start: float
    stop: float


class Lease(NamedTuple):
    seconds: float
    """From the end of the last iteration before it, whoever's that was, to the end of its own last one."""
    switch_s: float | None
    """What the iterations at its ends took longer than as many others; None where there are too few."""


def measure(keep: Path | None = None) -> dict[str, Any]:
    """`keep`: a folder for everything that the jobs told."""
    # Room for one lane.
    options = ("--capacity", "8.2GiB", "--policy", "fair", "--quantum", f"{LONGEST_LEASE_S}s")
    with OwnService(*options) as service:
        gate = Gate(service.socket.parent / "gate")
        go = service.socket.parent / "go"
        run = command("resnet50-zero-last", 1_000_000, "--go", str(go), "--gate", str(service.socket.parent / "gate"))
        needs = ("--persistent", "0.6GiB", "--ephemeral", "3.6GiB")
        jobs = []
        for number in range(JOBS):
            with machine.few_cores(number, CORES, JOBS):
                jobs.append(service.run([*run, "--seat", str(number)], "--name", f"r{number}", *needs))
        deadline = time.monotonic() + START_LIMIT_S
        for job in jobs:
            if not says_ready(job, deadline):
                return {"failed": result_of(job)}
        go.touch()
        time.sleep(WARM_S)
        turns = list(_turns(gate))
        with service.connect() as connection:
            lanes = {row["lane"] for row in connection.jobs()}
        gate.end()
        told = [result_of(job) for job in jobs]
    done = [[Done(*one) for one in zip(of_one["ended_s"], of_one["processor_s"], strict=False)] for of_one in told]
    if keep is not None:
        (keep / "throughput-raw.json").write_text(json.dumps({"done": done, "turns": turns}))
    return {"lanes": sorted(lanes, key=str), **compare(done, turns)}


def _turns(gate: Gate) -> Iterator[Turn]:
    yield _turn(gate, None, AT_ONCE_S)
    for _ in range(ROUNDS):
        for number in range(JOBS):
            yield _turn(gate, number, ALONE_S)
            yield _turn(gate, None, AT_ONCE_S)


def _turn(gate: Gate, alone: int | None, seconds: float) -> Turn:
    gate.let(*(range(JOBS) if alone is None else [alone]))
    time.sleep(SETTLES_S)
    start = time.perf_counter()
    time.sleep(seconds)
    return Turn(alone, start, time.perf_counter())


def compare(done: list[list[Done]], turns: Sequence[Turn]) -> dict[str, Any]:
    """From when each iteration of each job ended. Turns at once stand at both ends, and every other one is one."""
    merged = sorted((one, job) for job, of_one in enumerate(done) for one in of_one)
    within = [[one for one in merged if turn.start <= one[0].at <= turn.stop] for turn in turns]
    iteration = [math.log(_iteration_s(ends)) for ends in within]
    processor = [math.log(statistics.median(one.processor_s for one, _ in ends)) for ends in within]
    alone = range(1, len(turns), 2)
    gained = [_against_neighbours(iteration, at) for at in alone]
    faster = [_against_neighbours(processor, at) for at in alone]
    jobs = [turns[at].alone for at in alone]
    slope = _slope(_centred(faster, jobs), _centred(gained, jobs))
    settled = [
        lease for turn, ends in zip(turns, within, strict=True) if turn.alone is None for lease in leases_of(ends)
    ]
    return {
        **_ratio("by_turns", gained, jobs),
        **_ratio("at_equal_speed", [one - slope * other for one, other in zip(gained, faster, strict=True)], jobs),
        **_ratio("processor", faster, jobs),
        "processor_slope": slope,
        **by_leases(settled),
        "lease_s": statistics.median(lease.seconds for lease in settled),
        "turns": len(turns),
        "iteration_ms": [round(1000 * math.exp(one), 3) for one in iteration],
        "processor_us": [round(1e6 * math.exp(one), 1) for one in processor],
    }


def _against_neighbours(values: Sequence[float], at: int) -> float:
    return values[at] - (values[at - 1] + values[at + 1]) / 2


def _ratio(name: str, logarithms: list[float], jobs: Sequence[int | None]) -> dict[str, Any]:
    """Each job by itself first: no two processes, and no two cores, are equally fast."""
    of_each = [[one for one, job in zip(logarithms, jobs, strict=True) if job == number] for number in range(JOBS)]
    ratio = math.exp(statistics.mean(map(trimmed_mean, of_each)))
    return {
        name: ratio,
        f"{name}_error": ratio * math.hypot(*map(standard_error, of_each)) / JOBS,
        f"{name}_of_each": [math.exp(trimmed_mean(one)) for one in of_each],
    }


def _centred(values: list[float], jobs: Sequence[int | None]) -> list[float]:
    means = {job: statistics.mean(one for one, of in zip(values, jobs, strict=True) if of == job) for job in set(jobs)}
    return [one - means[job] for one, job in zip(values, jobs, strict=True)]


def _slope(faster: Sequence[float], gained: Sequence[float]) -> float:
    spread = sum(one * one for one in faster)
    return sum(one * other for one, other in zip(faster, gained, strict=True)) / spread if spread else 0.0


def by_leases(leases: Sequence[Lease]) -> dict[str, float | None]:
    """Of those that can be compared with themselves: what they got done, to what they would have without a switch."""
    compared = [(one.switch_s, one.seconds) for one in leases if one.switch_s is not None]
    if len(compared) < 2:
        return {"by_leases": None, "by_leases_error": None, "switch_ms": None}
    done = [1 - lost_s / whole_s for lost_s, whole_s in compared]
    return {
        "by_leases": statistics.median(done),
        "by_leases_error": hooks.error_of_median(done),
        "switch_ms": 1000 * statistics.median(lost_s for lost_s, _ in compared),
    }


def leases_of(ends: list[tuple[Done, int]]) -> list[Lease]:
    """The whole ones among these iterations, by when they ended and whose they were."""
    runs: list[list[float]] = []
    last = None
    for end, job in ends:
        if job != last:
            runs.append([])
        runs[-1].append(end.at)
        last = job
    found = []
    # The first had begun before that, and the last goes on.
    for before, run in pairwise(runs[:-1]):
        took_s = [after - at for at, after in pairwise([before[-1], *run])]
        ends_s = [*took_s[:WARMS_UP], *took_s[-WINDS_UP:]]
        middle_s = statistics.median(took_s[WARMS_UP:-WINDS_UP]) if len(run) >= FEWEST else None
        found.append(Lease(sum(took_s), None if middle_s is None else sum(ends_s) - len(ends_s) * middle_s))
    return found


def _iteration_s(ends: list[tuple[Done, int]]) -> float:
    """From one to the next, whoever's they are."""
    return (ends[-1][0].at - ends[0][0].at) / (len(ends) - 1)
