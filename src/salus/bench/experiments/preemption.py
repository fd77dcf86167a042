"""Shorter jobs that arrive while longer ones run, under `srtf`: who computes when, and how soon a newcomer does.

Six jobs of one model in one lane, each half as long as the one before and later. The paper's figure is the timeline;
the next job's iteration starts at once.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from salus.bench.experiment import Job, Ran, Say, Settings, Steps, at_once, check_all_ran, one_by_one

COUNT = 6
LONGEST_S = 24.0
GAP_S = 1.5


def run(settings: Settings, steps: Steps, say: Say) -> dict[str, Any]:
    model, batch = ("resnet50", 25) if settings.device == "cuda" else ("small", 64)
    (alone,) = steps.runs("alone", lambda: one_by_one([Job("alone", model, batch, 50)], settings.device, say))
    check_all_ran("alone", [alone])
    jobs = []
    for number in range(COUNT):
        seconds = LONGEST_S * settings.scale / 2**number
        iterations = max(3, round(seconds / alone.iteration_s))
        jobs.append(
            Job(
                f"job {number + 1}", model, batch, iterations, number * GAP_S * settings.scale,
                alone_s=iterations * alone.iteration_s, ephemeral=settings.whole_lane,
            )
        )  # fmt: skip
    ran = steps.runs("srtf", lambda: at_once(jobs, settings.device, say, settings.one_lane("srtf")))
    check_all_ran("srtf", ran)
    first = [max(0.0, one.ends_s[0] - one.arrived_s - alone.iteration_s) for one in ran]
    return {
        "model": model,
        "iteration_s": alone.iteration_s,
        "jobs": [
            {
                "name": one.name, "arrived_s": one.arrived_s, "ended_s": one.ends_s[-1],
                "alone_s": job.alone_s, "waited_for_its_first_s": waited, "ran": _spans(one, alone.iteration_s),
            }
            for job, one, waited in zip(jobs, ran, first, strict=True)
        ],
        # The first has the device to itself.
        "in_iterations": statistics.median(first[1:]) / alone.iteration_s,
    }  # fmt: skip


def _spans(one: Ran, iteration_s: float) -> list[tuple[float, float]]:
    """From when to when it computed: iterations that follow one another are one span."""
    spans: list[tuple[float, float]] = []
    for end in one.ends_s:
        begin = end - iteration_s
        if spans and begin - spans[-1][1] < iteration_s:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((begin, end))
    return spans


def verdicts(result: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    rows = []
    for job in result["jobs"]:
        took_s = job["ended_s"] - job["arrived_s"]
        value = f"arrived at {job['arrived_s']:.1f} s, took {took_s:.1f} s, alone {job['alone_s']:.1f} s"
        rows.append((job["name"], value, "", True))
    waited = result["in_iterations"]
    rows.append(("until the first iteration of a newcomer", f"{waited:.1f} iterations", "at most 3", waited <= 3))
    return rows


def draw(result: dict[str, Any], path: Path) -> None:
    from salus.bench.plots import timeline

    timeline(path, {job["name"]: (job["arrived_s"], job["ran"]) for job in result["jobs"]})
