"""Three ResNet-50 in one lane against one alone: what they get done together, in iterations.

The same three processes, at once and one after the other, in turns, block by block; from one process to the next the
same script differs by more than what is to be seen. It is told in two ways:

- by blocks: an iteration alone to one at once. These scripts are as fast as the processor launches their kernels, and
  on a shared machine that changes by a tenth from one second to the next; so this is known to some percent only.
- by leases: what is lost at the two ends of each lease, against the iterations in its middle, where the job runs as it
  does alone: everybody else sleeps. What a switch costs is in it, and the weather is not.

Leases grow while the same jobs share a lane (`core/leases.py`). So there are `SETTLES` blocks first, at once, in which
they get as long as they will be; jobs that train for hours run like that nearly all of the time. What is lost
meanwhile is told by leases too, block by block.
"""

from __future__ import annotations

import select
import statistics
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

from salus.bench import hooks, machine
from salus.bench.own_service import OwnService
from salus.bench.switch import in_turn, take_turn
from tests.gpu.jobs import START_LIMIT_S, command, result_of

JOBS, CORES = 3, 2
"""And the cores of each."""
SETTLES, ROUNDS, TURN = 17, 5, 128
"""Blocks at once before it counts, rounds, and iterations of each job in a block."""
WARMS_UP, WINDS_UP = 4, 1
"""Iterations at the two ends of a lease that are not like the others, and those of a block that do not count."""
FEWEST = 2 * (WARMS_UP + WINDS_UP)
"""Iterations of a lease that can be compared with itself."""

ALONE, AT_ONCE = "alone", "at once"


class Lease(NamedTuple):
    seconds: float
    """From the end of the last iteration before it, whoever's that was, to the end of its own last one."""
    switch_s: float | None
    """What the iterations at its ends took longer than as many others; None where there are too few."""


def measure() -> dict[str, Any]:
    order = [[AT_ONCE]] * SETTLES + [in_turn([ALONE, AT_ONCE], number) for number in range(ROUNDS)]
    blocks = [how for hows in order for how in hows]
    # Room for one lane and, while they sit idle between two rounds, for the gradients of all three.
    with OwnService("--capacity", "10GiB", "--policy", "fair") as service:
        run = command("resnet50", len(blocks) * TURN, "--block", str(TURN))
        needs = ("--persistent", "0.6GiB", "--ephemeral", "3.6GiB")
        jobs = []
        for number in range(JOBS):
            with machine.few_cores(number, CORES, JOBS):
                jobs.append(service.run(run, "--name", f"r{number}", *needs))
        for job in jobs:
            assert job.stdout is not None
            select.select([job.stdout], [], [], START_LIMIT_S)
        for how in blocks:
            if how == AT_ONCE:
                _all_at_once(jobs)
            else:
                for job in jobs:
                    take_turn(job)
        ended = [result_of(job)["ended_s"] for job in jobs]
    return compare(ended, blocks, SETTLES)


def _all_at_once(jobs: list[subprocess.Popen[str]]) -> None:
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(take_turn, jobs))


def compare(ended: list[list[float]], blocks: list[str], settles: int) -> dict[str, Any]:
    """From when each iteration of each job ended."""
    took_s: dict[str, list[float]] = {ALONE: [], AT_ONCE: []}
    leases: list[list[Lease]] = []
    for number, how in enumerate(blocks):
        parts = [ends[number * TURN + WARMS_UP - 1 : (number + 1) * TURN] for ends in ended]
        if how == AT_ONCE:
            leases.append(leases_of(parts))
        if number >= settles:
            took_s[how].append(_iteration_s(parts, how))
    ratios = [one / three for one, three in zip(took_s[ALONE], took_s[AT_ONCE], strict=True)]
    settled = [lease for block in leases[settles:] for lease in block]
    return {
        "iterations_a_block": TURN,
        # Not the mean: now and then a round is disturbed.
        "by_blocks": statistics.median(ratios),
        "by_blocks_error": hooks.error_of_median(ratios),
        **by_leases(settled),
        "lease_s": statistics.median(lease.seconds for lease in settled),
        "while_they_grow": [by_leases(block)["by_leases"] for block in leases[:settles]],
        "ratios": ratios,
        "iteration_s": took_s,
        "ended_s": ended,
    }


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


def leases_of(parts: list[list[float]]) -> list[Lease]:
    """Of one block at once: the whole ones, from when all of the jobs are warm until the first has done its part."""
    start, stop = _while_all_run(parts)
    ends = sorted((end, job) for job, part in enumerate(parts) for end in part if start <= end <= stop)
    runs: list[list[float]] = []
    last = None
    for end, job in ends:
        if job != last:
            runs.append([])
        runs[-1].append(end)
        last = job
    found = []
    # The first had begun before that, and the last goes on.
    for before, run in pairwise(runs[:-1]):
        took_s = [after - at for at, after in pairwise([before[-1], *run])]
        ends_s = [*took_s[:WARMS_UP], *took_s[-WINDS_UP:]]
        middle_s = statistics.median(took_s[WARMS_UP:-WINDS_UP]) if len(run) >= FEWEST else None
        found.append(Lease(sum(took_s), None if middle_s is None else sum(ends_s) - len(ends_s) * middle_s))
    return found


def _iteration_s(parts: list[list[float]], how: str) -> float:
    """Alone at the mean of the jobs; at once from one to the next, whoever's they are."""
    if how == ALONE:
        return statistics.mean((ends[-1] - ends[0]) / (len(ends) - 1) for ends in parts)
    start, stop = _while_all_run(parts)
    return (stop - start) / sum(start < end <= stop for ends in parts for end in ends)


def _while_all_run(parts: list[list[float]]) -> tuple[float, float]:
    return max(ends[0] for ends in parts), min(ends[-1] for ends in parts)
