"""What Salus costs one job that is alone: the time of an iteration against the bare script, for each model.

Three processes of the same script, two bare and one under Salus, take turns block by block, so that all see the same
weather, and on the same cores; how much the two bare ones differ is the measure of what can be seen. A few models start
up at the same time, each with a service of its own, and then have the device one after another. The paper: 1.003 to
1.08 for most models, 1.8 for two small ones.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from salus.bench.experiment import WARM_UP, WORKLOAD, Say, Settings, Steps
from salus.bench.machine import few_cores
from salus.bench.models_of_paper import BATCHES, ON_THE_PROCESSOR
from salus.bench.own_service import OwnService
from salus.bench.switch import in_turn, take_turn
from salus.errors import SalusError

BLOCK = 5
COLD = 1
"""Iterations at the beginning of a block that do not count: somebody else had the device, and the caches."""
AT_ONCE = 5
CORES = 3
"""For each model: the script's threads, and those of the driver."""
MODEL_S = 9.0
"""For so long each model is measured."""
FEWEST_BLOCKS = 4
TARGETS = {"median": 1.005, "worst": 1.03}


def run(settings: Settings, steps: Steps, say: Say) -> dict[str, Any]:
    sizes = {model: batches[0] for model, batches in BATCHES.items()}
    if settings.device == "cpu":
        sizes = dict.fromkeys(ON_THE_PROCESSOR, 32)
    if settings.jobs is not None:
        sizes = dict(list(sizes.items())[: settings.jobs])
    names = list(sizes)
    rows: dict[str, Any] = {}
    for at in range(0, len(names), AT_ONCE):
        group = {model: sizes[model] for model in names[at : at + AT_ONCE]}
        say(f"overhead of {', '.join(group)}; {at} of {len(names)} are done")
        for row in steps.rows(" ".join(group), lambda group=group: _measure(group, settings, say)):  # type: ignore[misc]
            rows[row["model"]] = {"batch": sizes[row["model"]], **_compare(row)}
    ratios = [row["ratio"] for row in rows.values() if "ratio" in row]
    return {
        "models": rows,
        "median": statistics.median(ratios) if ratios else None,
        "worst": max(ratios, default=None),
        "bare_to_bare": statistics.median(row["bare_to_bare"] for row in rows.values() if "ratio" in row)
        if ratios
        else None,
        "targets": TARGETS,
    }


def _measure(sizes: dict[str, int], settings: Settings, say: Say) -> list[dict[str, Any]]:
    """For each model the seconds of every iteration, by side; or why there are none."""
    with contextlib.ExitStack() as stack:
        started = {
            model: _start(stack, model, batch, settings, number) for number, (model, batch) in enumerate(sizes.items())
        }
        return [{"model": model, **_take_turns(model, sides, settings, say)} for model, sides in started.items()]


def _start(
    stack: contextlib.ExitStack, model: str, batch: int, settings: Settings, number: int
) -> dict[str, subprocess.Popen[str]]:
    command = [
        sys.executable, str(WORKLOAD), "--model", model, "--batch", str(batch), "--device", settings.device,
        "--iterations", str(10**9), "--block", str(BLOCK), "--warm-up", str(WARM_UP),
    ]  # fmt: skip
    service = stack.enter_context(OwnService(*settings.service("fair")))
    with few_cores(number, CORES, AT_ONCE):
        return {
            "bare": service.start_bare(command),
            "salus": service.run(command, "--name", model),
            "again": service.start_bare(command),
        }


def _take_turns(model: str, sides: dict[str, subprocess.Popen[str]], settings: Settings, say: Say) -> dict[str, Any]:
    try:
        for process in sides.values():
            take_turn(process)
        began, turns = time.monotonic(), 0
        while turns < FEWEST_BLOCKS or time.monotonic() < began + MODEL_S * settings.scale:
            for side in in_turn(list(sides), turns):
                take_turn(sides[side])
            turns += 1
            say(f"overhead of {model}, turn {turns}")
    except SalusError as error:
        return {"failed": str(error)}
    # A script whose input has ended comes to its own end.
    told = {side: (process.communicate()[0].splitlines() or [""])[-1] for side, process in sides.items()}
    if not all(line.startswith("{") for line in told.values()):
        return {"failed": "a script did not come to its end"}
    return {"seconds": {side: json.loads(line)["seconds"] for side, line in told.items()}}


def _compare(row: dict[str, Any]) -> dict[str, Any]:
    if "failed" in row:
        return {"failed": row["failed"]}
    # Not the first block, which warms up, and of each the lower quartile: others make some slower and none faster.
    blocks: dict[str, list[float]] = {
        side: [
            statistics.quantiles(seconds[at + COLD : at + BLOCK], n=4)[0] for at in range(BLOCK, len(seconds), BLOCK)
        ]
        for side, seconds in row["seconds"].items()
    }

    def against_bare(side: str) -> float:
        return statistics.median(b / a for a, b in zip(blocks["bare"], blocks[side], strict=True))

    return {
        "iteration_ms": 1000 * statistics.median(blocks["bare"]),
        "ratio": against_bare("salus"),
        "bare_to_bare": against_bare("again"),
        "turns": len(blocks["bare"]),
    }


def verdicts(result: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    rows = [
        (f"{model}, batch {row['batch']}", row.get("failed") or _ratio(row), "", True)
        for model, row in result["models"].items()
    ]
    rows += [
        (key, f"{result[key]:.4f}", f"at most {target}", result[key] <= target)
        for key, target in TARGETS.items()
        if result[key] is not None
    ]
    if result["bare_to_bare"] is not None:
        rows.append(("bare against bare, median", f"{result['bare_to_bare']:.4f}", "", True))
        done = [row for row in result["models"].values() if "ratio" in row]
        unseen = sum(abs(row["bare_to_bare"] - 1) >= abs(row["ratio"] - 1) for row in done)
        what = "models in which the bare script differs from itself by as much"
        rows.append((what, f"{unseen} of {len(done)}", "", True))
    return rows


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.3f}; bare against bare {row['bare_to_bare']:.3f}; {row['iteration_ms']:.1f} ms an iteration"


def draw(result: dict[str, Any], path: Path) -> None:
    from salus.bench.plots import bars

    done = {model: row for model, row in result["models"].items() if "ratio" in row}
    series = {"Salus": "ratio", "the bare script again": "bare_to_bare"}
    bars(
        path,
        {label: {model: row[key] for model, row in done.items()} for label, key in series.items()},
        "time of an iteration, to the bare script",
        line_at=1.0,
    )
