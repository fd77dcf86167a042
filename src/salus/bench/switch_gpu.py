"""What switching costs on a GPU: from the moment one job's GPU is idle to the moment it is another's.

Three ResNet-50 train in one lane, switched at every boundary, and then under `fair`. Each writes down when it left the
GPU idle for somebody else and when it was its own again (SALUS_TRACE), on the clock that all processes share.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from salus.bench.experiment import Job, Say, at_once, check_all_ran
from salus.bench.switch import spread
from salus.errors import RequestRejected

TARGETS = {"median_us": 100.0, "p99_us": 1000.0}
SIDES = {"every boundary": ("--policy", "rr", "--quantum", "0"), "fair, 20 ms": ("--policy", "fair")}
JOBS = 3
FEWEST = 20
"""Hand-overs that say something."""
FIRST = 10
STEPS = ("idle", "sorted", "promoted", "waited", "left", "passed", "seen", "ours")
"""In this order. `sorted`: what lives in the lane is known; `promoted`: it is the job's own; `waited`: the GPU is idle
for certain; `seen`: by the next job. Where the GPU still works at first, the job `yields`; it is idle when `waited`."""
TAKEN = ("seen", "ours")
"""Those are the next job's. It `woke` before all that, unless it was asleep when the lease came."""


def measure(say: Say, iterations: int) -> dict[str, Any]:
    # One lane of this size fits, and not a second one.
    jobs = [
        Job(f"resnet50 {number}", "resnet50", 25, iterations, persistent="1GiB", ephemeral="8GiB")
        for number in range(JOBS)
    ]
    sides: dict[str, Any] = {}
    for side, options in SIDES.items():
        say(f"three ResNet-50, {side}")
        with tempfile.TemporaryDirectory(prefix="salus-") as folder:
            service = ["--device", "cuda", "--capacity", "14GiB", *options]
            check_all_ran(side, at_once(jobs, "cuda", say, service, trace=Path(folder) / "trace"))
            found = hand_overs([json.loads(path.read_text()) for path in Path(folder).glob("trace.*")])
        if found is None:
            raise RequestRejected(f"{side}: there were hardly any hand-overs; are the jobs in one lane?")
        sides[side] = found
    return {"sides": sides, "targets": TARGETS}


def hand_overs(traces: list[list[list[Any]]]) -> dict[str, Any] | None:
    """From the moment one job's GPU was idle to the moment it was another's; None where there were hardly any.

    Not the first ones of each job, in which it takes its memory.
    """
    moments = sorted((at, what, job) for job, trace in enumerate(traces) for what, at in trace)
    taken: dict[int, int] = dict.fromkeys(range(len(traces)), 0)
    found: list[dict[str, float]] = []
    leaves: dict[str, float] = {}
    who = -1
    woke: dict[int, float] = {}
    for at, what, job in moments:
        if what == "woke":
            woke[job] = at
        elif what in ("idle", "yields"):
            leaves, who = {what: at}, job
        elif job == who or (what in TAKEN and leaves):
            leaves[what] = at
            if what == "waited" and "yields" in leaves:
                leaves["idle"] = at
        if what == "ours":
            taken[job] += 1
            if job != who and "idle" in leaves and min(taken.values()) > FIRST:
                found.append({**leaves, "woke": woke.get(job, 0)})
            leaves, who = {}, -1
    if len(found) < FEWEST:
        return None
    found.sort(key=lambda one: one["ours"] - one["idle"])
    gaps = [(one["ours"] - one["idle"]) / 1000 for one in found]
    slowest = found[-max(1, len(found) // 50) :]
    return {
        "count": len(gaps), **spread(gaps, "us"), "parts_us": _parts(found), "parts_of_slowest_us": _parts(slowest),
        "busy_us": _busy(found), "busy_of_slowest_us": _busy(slowest),
        "asleep": _asleep(found), "asleep_of_slowest": _asleep(slowest),
    }  # fmt: skip


def _asleep(found: list[dict[str, float]]) -> float:
    """The part of them in which the next job was asleep when the lease was passed on."""
    return sum("passed" in one and one["woke"] > one["passed"] for one in found) / len(found)


def _busy(found: list[dict[str, float]]) -> list[float]:
    """For how long the GPU worked on after the job began to yield, so long the next one had to look out; sorted."""
    busy = sorted((one["waited"] - one["yields"]) / 1000 if "yields" in one else 0.0 for one in found)
    return busy[:: max(1, len(busy) // 20)]


def _parts(found: list[dict[str, float]]) -> dict[str, float]:
    """How long each step took, at the median; where the GPU still worked at first, only those after it was idle."""
    parts = {}
    for before, after in pairwise(STEPS):
        hidden = STEPS.index(after) <= STEPS.index("waited")
        took = [
            (one[after] - one[before]) / 1000
            for one in found
            if before in one and after in one and not (hidden and "yields" in one)
        ]
        if took:
            parts[f"{before} to {after}"] = statistics.median(took)
    return parts


def verdicts(result: Mapping[str, Any]) -> list[tuple[str, str, str, bool]]:
    rows = []
    for side, found in result["sides"].items():
        for key, what in (("median_us", "median"), ("p99_us", "99 of 100")):
            target = TARGETS[key]
            rows.append(
                (f"hand-over, {side}, {what}", f"{found[key]:.0f} us", f"at most {target:.0f} us", found[key] <= target)
            )
        parts = ", ".join(f"{what} {took:.0f}" for what, took in found.get("parts_us", {}).items())
        rows.append((f"of that, {side}", f"{parts} us", "", True))
        asleep = f"{found['asleep']:.1%}; of the slowest {found['asleep_of_slowest']:.0%}" if "asleep" in found else ""
        if asleep:
            rows.append((f"the next job was asleep, {side}", asleep, "", True))
    return rows
