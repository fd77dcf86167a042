"""More jobs than the GPU has memory for: what it costs that their memory goes to the host and comes back.

Eight jobs that keep 4 GiB each across iterations, under `fair`, which gives each of them the GPU in turn: once with
room for all, and once on what behaves like a GPU of 16 GiB, where most of them are on the host at any time. Bare, they
would not fit. The paper's system did not page. Here the next job's memory comes while the current one computes.

The jobs build their models after the clock has started: one that waits for the clock with its memory in use keeps it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from salus.bench.experiment import Job, Ran, Say, Settings, Steps, at_once, check_all_ran
from salus.errors import RequestRejected

JOBS = 8
CAPACITY = "16GiB"
POLICY = "fair:patience=0.5"
BATCH, ITERATIONS = 512, 300
PERSISTENT, EPHEMERAL = "4.3GiB", "1.2GiB"
TARGETS = {"slower": 1.25}
"""Than with room for all: what is not hidden."""


def run(settings: Settings, steps: Steps, say: Say) -> dict[str, Any]:
    if settings.device != "cuda":
        raise RequestRejected("bench paging: there is no GPU here, and on the processor nothing is paged")
    count = settings.jobs or JOBS
    jobs = [
        Job(
            f"large {number}", "large", BATCH, round(ITERATIONS * settings.scale), persistent=PERSISTENT,
            ephemeral=EPHEMERAL, builds_late=True,
        )
        for number in range(count)
    ]  # fmt: skip
    capacity = settings.capacity or CAPACITY
    sides: dict[str, list[str]] = {
        "room for all": [],
        capacity: ["--capacity", capacity, "--reserve", "0", "--host-memory", "64GiB"],
    }
    found: dict[str, Any] = {}
    for side, options in sides.items():
        service = ["--device", "cuda", "--policy", POLICY, *options]
        ran = steps.runs(side, lambda service=service: at_once(jobs, settings.device, say, service))  # type: ignore[misc]
        check_all_ran(side, ran)
        found[side] = _summary(ran)
    return {"jobs": count, "capacity": capacity, "sides": found, "targets": TARGETS}


def _summary(ran: list[Ran]) -> dict[str, Any]:
    rows = [one.row for one in ran if one.row is not None]
    moved = {
        way: (sum(row[f"paged_{way}_bytes"] for row in rows), sum(row[f"paged_{way}_ns"] for row in rows))
        for way in ("out", "in")
    }
    return {
        "makespan_s": max(one.ends_s[-1] for one in ran),
        "persistent_gib": sum(row["persistent_bytes"] for row in rows) / 2**30,
        "gpu_gib": max(one.gpu_bytes for one in ran) / 2**30,
        "paged_gib": {way: size / 2**30 for way, (size, _) in moved.items()},
        "paged_gib_s": {way: size / 2**30 / (ns / 1e9) if ns else None for way, (size, ns) in moved.items()},
    }


def verdicts(result: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    rows = []
    for side, row in result["sides"].items():
        value = f"{row['makespan_s']:.1f} s; {row['persistent_gib']:.0f} GiB kept, {row['gpu_gib']:.0f} GiB of the GPU"
        if row["paged_gib"]["out"]:
            moved = ", ".join(
                f"{row['paged_gib'][way]:.0f} GiB {way} at {row['paged_gib_s'][way]:.0f} GiB/s" for way in ("out", "in")
            )
            value += f"; {moved}"
        rows.append((side, value, "", True))
    room, tight = result["sides"]["room for all"], result["sides"][result["capacity"]]
    slower, target = tight["makespan_s"] / room["makespan_s"], TARGETS["slower"]
    rows.append(
        (f"{result['capacity']} against room for all, time", f"{slower:.2f}", f"at most {target}", slower <= target)
    )
    return rows


def draw(result: dict[str, Any], path: Path) -> None:
    from salus.bench.plots import bars

    sides = result["sides"]
    bars(path, {"": {side: row["makespan_s"] for side, row in sides.items()}}, "seconds until all are done")
