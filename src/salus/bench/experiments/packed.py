"""Many small jobs at once: `pair`, two of them side by side, and `tuning`, a search for hyper-parameters.

All jobs are the same and arrive together. One by one, all at once as the driver slices time, all at once under MPS, and
under Salus with `pack`, which gives each a lane as long as there is memory, without and with MPS. What counts is when
the last one is done, and how much of the GPU's memory it took. The paper: two AlexNet in 89 s against 105 one after the
other; 300 jobs of super-resolution 2.38 times faster than one by one.

The jobs of `tuning` are of the kind that leaves a large GPU idle. With MPS, Salus gives each a part of the
multiprocessors, as one would who starts many: what it takes of the memory shrinks with that.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from salus.bench.experiment import Job, Ran, Say, Settings, Steps, at_once, has_mps, one_by_one

TARGETS = {"tuning": 5.0, "memory_to_mps": 0.5}
"""Times faster than one by one; and of MPS's memory."""
TUNING_SHARE = 25
SMALL_CARD_GIB = 16
NO_WORSE = 1.02
"""What two runs of the same thing differ by."""


def run_pair(settings: Settings, steps: Steps, say: Say) -> dict[str, Any]:
    model, batch = ("alexnet", 25) if settings.device == "cuda" else ("small", 64)
    return _run(settings, steps, say, model, batch, count=2, iterations=round(600 * settings.scale))


def run_tuning(settings: Settings, steps: Steps, say: Say) -> dict[str, Any]:
    model, batch = ("vae", 64) if settings.device == "cuda" else ("tiny", 32)
    count = settings.jobs or (24 if settings.device == "cuda" else 6)
    iterations = round((2000 if settings.device == "cuda" else 500) * settings.scale)
    return _run(settings, steps, say, model, batch, count=count, iterations=iterations, sm_share=TUNING_SHARE)


def _run(
    settings: Settings,
    steps: Steps,
    say: Say,
    model: str,
    batch: int,
    count: int,
    iterations: int,
    sm_share: int | None = None,
) -> dict[str, Any]:
    jobs = [Job(f"{model} {number}", model, batch, max(2, iterations)) for number in range(count)]
    sides = {
        "one by one": lambda: one_by_one(jobs, settings.device, say),
        "time-slicing": lambda: at_once(jobs, settings.device, say),
        "salus": lambda: at_once(jobs, settings.device, say, settings.service("pack")),
    }
    if has_mps(settings.device):
        sides["MPS"] = lambda: at_once(jobs, settings.device, say, mps=True)
        parts = [replace(job, sm_share=sm_share) for job in jobs]
        sides["salus, MPS"] = lambda: at_once(parts, settings.device, say, settings.service("pack", "--mps", "on"))
    found: dict[str, Any] = {}
    for side, do in sides.items():
        found[side] = _summary(steps.runs(side, do))
    base = found["one by one"]["makespan_s"]
    for row in found.values():
        row["times_faster"] = base / row["makespan_s"] if base and row["makespan_s"] else None
    return {
        "model": model, "batch": batch, "jobs": count, "iterations": iterations, "sm_share": sm_share, "sides": found,
        "targets": TARGETS,
    }  # fmt: skip


def _summary(ran: list[Ran]) -> dict[str, Any]:
    done = [one for one in ran if not one.failed]
    return {
        "makespan_s": max((one.ends_s[-1] for one in done), default=None),
        "failed": len(ran) - len(done),
        "why": next((one.failed for one in ran if one.failed), None),
        "gpu_gib": max((one.gpu_bytes for one in ran), default=0) / 2**30,
    }


def _rows(result: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    rows = []
    for side, row in result["sides"].items():
        value = "none finished" if row["makespan_s"] is None else f"{row['makespan_s']:.1f} s"
        if row["times_faster"] is not None:
            value += f", {row['times_faster']:.2f} times as fast as one by one"
        if row["gpu_gib"]:
            value += f", {row['gpu_gib']:.1f} GiB"
        if row["failed"]:
            value += f", {row['failed']} failed"
        rows.append((side, value, "", True))
    mps, ours = result["sides"].get("MPS"), result["sides"].get("salus, MPS")
    if mps is not None and ours is not None and mps["makespan_s"] and ours["makespan_s"]:
        ratio = ours["makespan_s"] / mps["makespan_s"]
        rows.append(("Salus with MPS against MPS, time", f"{ratio:.3f}", f"at most {NO_WORSE}", ratio <= NO_WORSE))
    return rows


def verdicts_pair(result: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    return _rows(result)


def verdicts_tuning(result: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    faster = max(row["times_faster"] or 0.0 for side, row in result["sides"].items() if side.startswith("salus"))
    target = TARGETS["tuning"]
    rows = [*_rows(result), ("Salus against one by one", f"{faster:.2f}", f"at least {target:g}", faster >= target)]
    mps, ours = result["sides"].get("MPS"), result["sides"].get("salus, MPS")
    if mps is not None and ours is not None and mps["gpu_gib"] and ours["gpu_gib"]:
        ratio, most = ours["gpu_gib"] / mps["gpu_gib"], TARGETS["memory_to_mps"]
        rows.append(("Salus with MPS against MPS, memory", f"{ratio:.2f}", f"at most {most}", ratio <= most))
        # Each in a lane of its own, with its context: what they were measured to take, over and over.
        fit = {side: int(SMALL_CARD_GIB * result["jobs"] / row["gpu_gib"]) for side, row in (("M", mps), ("S", ours))}
        value = f"{fit['S']} against {fit['M']}, {fit['S'] / max(1, fit['M']):.1f} times as many"
        rows.append(
            (f"jobs that fit on {SMALL_CARD_GIB} GiB, Salus with MPS against MPS", value, "more", fit["S"] > fit["M"])
        )
    return rows


def draw(result: dict[str, Any], path: Path) -> None:
    from salus.bench.plots import bars

    bars(
        path,
        {"": {side: row["makespan_s"] or 0.0 for side, row in result["sides"].items()}},
        "seconds until all are done",
    )
