"""What one decision costs: `Scheduler.handle()` with 10 to 10,000 jobs in the system.

A GPU of 16 GiB, jobs of the paper's kind. The system is filled to N jobs; then jobs run, end and are replaced by new
ones as in a simulation, and every call of `handle()` is timed while at least nine tenths of N jobs are there. Reports
in passing count like every other event.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace
from pathlib import Path
from time import perf_counter_ns

from rich.console import Console
from rich.table import Table

from salus.bench import machine
from salus.core.actions import Action
from salus.core.events import Event
from salus.core.scheduler import Scheduler
from salus.plugins import load_policy
from salus.simulate import engine
from salus.simulate.workloads import generate

SIZES = (10, 100, 1_000, 10_000)
POLICIES = ("fifo", "pack", "fair", "rr", "srtf", "priority", "las")
CALLS = 8_000


class EnoughMeasured(Exception):
    pass


def measure(policy: str, size: int, calls: int) -> list[int]:
    """Nanoseconds of each call."""
    taken: list[int] = []

    class Timed(Scheduler):
        def handle(self, event: Event, now: float) -> list[Action]:
            begin = perf_counter_ns()
            actions = super().handle(event, now)
            end = perf_counter_ns()
            if len(self.jobs) >= 0.9 * size and self.filled:
                taken.append(end - begin)
                if len(taken) >= calls:
                    raise EnoughMeasured
            self.filled = self.filled or len(self.jobs) >= size
            return actions

        filled = False

    jobs = generate(size + calls, seed=1)
    total_s = sum(job.duration_s for job in jobs)
    # All of the first N at once; then one for each that ends, on average.
    crowd = [replace(job, submit_s=0.0) for job in jobs[:size]]
    later = [replace(job, submit_s=1.0 + n * total_s / len(jobs)) for n, job in enumerate(jobs[size:])]
    original, engine.Scheduler = engine.Scheduler, Timed  # type: ignore[misc]
    try:
        hardware = engine.Hardware(1, 16 * 2**30, quantum_s=5.0)
        engine.Simulation([*crowd, *later], lambda: load_policy(policy), hardware).run()
    except EnoughMeasured:
        pass
    finally:
        engine.Scheduler = original  # type: ignore[misc]
    return sorted(taken)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, help="write the result here, as JSON")
    arguments.add_argument("--calls", type=int, default=CALLS, help="calls to time for each policy and size")
    given = arguments.parse_args()
    console = Console()
    table = Table(
        "policy", *[f"{size:,} jobs: p50, p99" for size in SIZES], "p99, 10,000 : 10", box=None, pad_edge=False
    )
    result: dict[str, dict[str, dict[str, float]]] = {}
    for policy in POLICIES:
        rows: dict[str, dict[str, float]] = {}
        for size in SIZES:
            gc.collect()
            with console.status(f"{policy}, {size:,} jobs"):
                taken = measure(policy, size, given.calls)
            p50, p99 = (taken[int(len(taken) * part)] / 1000 for part in (0.5, 0.99))
            rows[str(size)] = {"p50_us": round(p50, 1), "p99_us": round(p99, 1), "calls": len(taken)}
        ratio = rows[str(SIZES[-1])]["p99_us"] / rows[str(SIZES[0])]["p99_us"]
        result[policy] = rows
        cells = [f"{row['p50_us']:.0f}, {row['p99_us']:.0f} µs" for row in rows.values()]
        table.add_row(policy, *cells, f"{ratio:.1f}")
    console.print(table)
    if given.out is not None:
        machine.write(given.out, "core", {"unit": "µs a call of Scheduler.handle()", "policies": result})


if __name__ == "__main__":
    main()
