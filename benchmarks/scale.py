"""A cluster in the simulator: 10,000 and 100,000 jobs on 64 GPUs.

Each run is a process of its own; its time and its memory are what counts.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from salus.bench import machine
from salus.cli.simulate import auto_quantum
from salus.plugins import load_policy
from salus.simulate.engine import Hardware, Simulation
from salus.simulate.metrics import summarize
from salus.simulate.workloads import generate

SIZES = (10_000, 100_000)
POLICIES = ("srtf", "fair")
GPUS = 64


def run_one(policy: str, count: int) -> dict[str, Any]:
    begin = perf_counter()
    jobs = generate(count, seed=0, gpus=GPUS)
    hardware = Hardware(GPUS, 16 * 2**30, host_bytes=64 * 2**30, quantum_s=auto_quantum(jobs, GPUS))
    outcome = Simulation(jobs, lambda: load_policy(policy), hardware).run()
    return {
        "seconds": round(perf_counter() - begin, 1),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "quantum_s": hardware.quantum_s,
        **summarize(outcome).as_dict(),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, help="write the result here, as JSON")
    arguments.add_argument("--one", nargs=2, metavar=("POLICY", "JOBS"), help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.one:
        print(json.dumps(run_one(given.one[0], int(given.one[1]))))
        return
    console = Console()
    table = Table("policy", *[f"{size:,} jobs" for size in SIZES], "times the time", box=None, pad_edge=False)
    result: dict[str, dict[str, Any]] = {}
    for policy in POLICIES:
        rows = {}
        for size in SIZES:
            with console.status(f"{policy}, {size:,} jobs"):
                command = [sys.executable, __file__, "--one", policy, str(size)]
                rows[str(size)] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        small, large = rows.values()
        result[policy] = {**rows, "times": round(large["seconds"] / small["seconds"], 1)}
        cells = [f"{row['seconds']} s, {row['peak_gib']} GiB" for row in rows.values()]
        table.add_row(policy, *cells, str(result[policy]["times"]))
    console.print(table)
    if given.out is not None:
        machine.write(given.out, "scale", {"gpus": GPUS, "policies": result})


if __name__ == "__main__":
    main()
