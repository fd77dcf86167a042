"""Equal jobs that join one after another: each should get its part of the device, and the sum should stay what it was.

Three jobs of one model, each beginning a while after the one before, under `fair` in one lane; then again with weights
1:2:4; and, where there is MPS, equal ones again under it: then the GPU does not change from one process's context to
another's when the jobs do. The paper's figure: each gets half, then a third; the total stays flat.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from salus.bench.experiment import Job, Ran, Say, Settings, Steps, at_once, check_all_ran, has_mps

WEIGHTS = {"equal": (1, 1, 1), "weights 1:2:4": (1, 2, 4)}
UNDER_MPS = "equal, MPS"
STAGE_S = 12.0
FEWEST = 2
"""Iterations of each."""
SETTLED = 0.25
"""The first part of a stage, in which a job joins, does not count."""
TARGETS = {"equal": 0.02, "weights 1:2:4": 0.03, UNDER_MPS: 0.02, "total": 0.02}


def run(settings: Settings, steps: Steps, say: Say) -> dict[str, Any]:
    # One that keeps the GPU busy all the time: how fast a processor launches small kernels changes by the second.
    model, batch = ("vgg16", 25) if settings.device == "cuda" else ("small", 64)
    stage_s = STAGE_S * settings.scale
    found: dict[str, Any] = {"stage_s": stage_s, "model": model, "batch": batch, "sides": {}, "targets": TARGETS}
    sides = {**WEIGHTS, **({UNDER_MPS: WEIGHTS["equal"]} if has_mps(settings.device) else {})}
    for name, weights in sides.items():
        jobs = [
            Job(
                f"{name} {number}",
                model,
                batch,
                FEWEST,
                number * stage_s,
                (len(weights) - number) * stage_s,
                weight=weight,
                ephemeral=settings.whole_lane,
            )
            for number, weight in enumerate(weights)
        ]
        options = [*settings.one_lane("fair"), *(["--mps", "on"] if name == UNDER_MPS else [])]
        ran = steps.runs(name, lambda jobs=jobs, options=options: at_once(jobs, settings.device, say, options))  # type: ignore[misc]
        check_all_ran(name, ran)
        found["sides"][name] = _stages(ran, weights, stage_s)
    return found


def _stages(ran: list[Ran], weights: tuple[int, ...], stage_s: float) -> dict[str, Any]:
    """Iterations a second of each job in each stage, and how far its part is from what it should be."""
    rates, off = [], 0.0
    # The first one is alone at first; that is how long an iteration takes.
    alone = [at for at in ran[0].ends_s if at < stage_s]
    iteration_s = statistics.median(b - a for a, b in pairwise(alone)) if len(alone) > 1 else ran[0].iteration_s
    for stage in range(len(ran)):
        begin, end = (stage + SETTLED) * stage_s, (stage + 1) * stage_s
        rates.append([_iterations(one, iteration_s, begin, end) / (end - begin) for one in ran])
        there = weights[: stage + 1]
        for had, weight in zip(rates[-1], there, strict=False):
            off = max(off, abs(had / sum(rates[-1]) * sum(there) / weight - 1))
    totals = [sum(stage) for stage in rates]
    return {
        "iterations_a_second": rates,
        "off_by": off,
        "total_to_alone": [total / totals[0] for total in totals],
        "switch_costs_ms": _switch_costs_ms(ran, stage_s, iteration_s),
        "by_second": [_by_second(one) for one in ran],
    }


def _switch_costs_ms(ran: list[Ran], stage_s: float, iteration_s: float) -> float | None:
    """By how much longer an iteration takes, at the median, whose job takes over from another."""
    ends = sorted((at, number) for number, one in enumerate(ran) for at in one.ends_s if at > stage_s)
    gaps = [after - before for (before, last), (after, number) in pairwise(ends) if number != last]
    return 1000 * (statistics.median(gaps) - iteration_s) if gaps else None


def _iterations(one: Ran, iteration_s: float, begin: float, end: float) -> float:
    """How many a job did between two moments. Of one that was under way then, its part."""
    done, before = 0.0, 0.0
    for at in one.ends_s:
        took_s = max(1e-9, min(iteration_s, at - before))
        done += max(0.0, min(at, end) - max(at - took_s, begin)) / took_s
        before = at
    return done


def _by_second(one: Ran) -> list[int]:
    counts = [0] * (int(one.ends_s[-1]) + 1)
    for at in one.ends_s:
        counts[int(at)] += 1
    return counts


def verdicts(result: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    rows = []
    for name, side in result["sides"].items():
        target = TARGETS[name]
        rows.append(
            (f"{name}: the worst part is off by", f"{side['off_by']:.1%}", f"{target:.0%}", side["off_by"] <= target)
        )
        if side["switch_costs_ms"] is not None:
            rows.append((f"{name}: a switch costs", f"{side['switch_costs_ms']:.2f} ms", "", True))
        if name.startswith("equal"):
            drift, target = max(abs(total - 1) for total in side["total_to_alone"]), TARGETS["total"]
            rows.append(
                (f"{name}: the total differs from one alone by", f"{drift:.1%}", f"{target:.0%}", drift <= target)
            )
    return rows


def draw(result: dict[str, Any], path: Path) -> None:
    from salus.bench.plots import lines

    lines(
        path,
        {name: side["by_second"] for name, side in result["sides"].items()},
        "seconds", "iterations a second, each job",
    )  # fmt: skip
