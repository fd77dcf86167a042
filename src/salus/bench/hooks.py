"""What Salus adds to an iteration of a job that is alone: its hooks, put in and taken out again within one process.

From one process to the next the same script differs by far more than that, so it cannot be seen between processes
unless there are hundreds of them (`salus bench switch`). What a process has besides, under Salus, is a thread that
sleeps. And what an explicit mark costs, in a job without a framework and outside Salus.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from salus.bench.own_service import OwnService
from salus.bench.switch import Say, finished

MODELS = ("lstm", "convnet", "transformer", "mlp")
STATES = {"cpu": "bare,salus", "cuda": "bare,sorted,salus"}
BLOCK = 5
MARKS = 20_000
TARGET = 0.01
"""Of an iteration."""


def measure(say: Say, device: str, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with OwnService() as service:
        for model in MODELS:
            say(f"hooks in and out, {model}")
            command = [
                sys.executable, "-m", "salus.bench.hooks_job", model, "--device", device, "--states", STATES[device],
                "--rounds", str(rounds), "--block", str(BLOCK),
            ]  # fmt: skip
            found[model] = compare(json.loads(finished(service.run(command)).splitlines()[-1]))
        say("marks")
        command = [sys.executable, "-m", "salus.bench.marks_job", str(MARKS)]
        started = {"mark_us": service.run, "mark_outside_us": service.start_bare}
        marks = {name: 1e6 * float(finished(start(command))) for name, start in started.items()}
    return {"models": found, **marks, "rounds": rounds, "block": BLOCK, "target": TARGET}


def compare(told: Mapping[str, list[float]]) -> dict[str, float]:
    """Round by round: whatever the machine does at the moment, it does to both."""
    bare = told["bare"]
    found = {"bare_us": 1e6 * statistics.median(bare)}
    both = [(one + other) / 2 for one, other in zip(bare, told.get("again", bare), strict=True)]
    for state, name, without_it in (("salus", "", both), ("sorted", "by_sorting_", both), ("again", "again_", bare)):
        if state in told:
            added = [with_it - without for with_it, without in zip(told[state], without_it, strict=True)]
            # Not the mean: there are few rounds where iterations are long, and now and then one that was disturbed.
            found |= {
                f"{name}added_us": 1e6 * statistics.median(added),
                f"{name}error_us": 1e6 * error_of_median(added),
            }
    return found


def error_of_median(values: list[float]) -> float:
    """How far from the truth it is to be expected, judged by the middle half of the values."""
    if len(values) < 4:
        return float("inf")
    lower, _, upper = statistics.quantiles(values, n=4)
    return float(1.25 * (upper - lower) / 1.35 / len(values) ** 0.5)


def verdicts(result: Mapping[str, Any]) -> list[tuple[str, str, str, bool]]:
    """What was measured, the value, the target, and whether it was met."""
    rows = []
    for model, row in result["models"].items():
        part = row["added_us"] / row["bare_us"]
        value = f"{row['added_us']:.0f} ± {row['error_us']:.0f} us of {row['bare_us']:.0f} us, {part:.2%}"
        rows.append((f"{model}, added to an iteration", value, f"at most {TARGET:.0%}", part <= TARGET))
        if "by_sorting_added_us" in row:
            value = f"{row['by_sorting_added_us']:.0f} ± {row['by_sorting_error_us']:.0f} us"
            rows.append(("of that, by sorting memory", value, "", True))
    if "mark_us" in result:
        rows.append(("a mark", f"{result['mark_us']:.1f} us", "", True))
        rows.append(("a mark outside Salus", f"{result['mark_outside_us']:.1f} us", "", True))
    return rows
