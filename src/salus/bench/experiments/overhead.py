"""What Salus costs one job that is alone: the time of an iteration against the bare script, for each model.

From one process to the next the same script differs by more than what is to be seen. So one process has it all: block
by block Salus is taken out of it (no hooks, memory from torch's own pool) and put in again; and as often it is left out
once more, which shows what can be told apart. What stays in the process is a thread that sleeps. A few models start up
at the same time, each with a service and cores of its own, and then have the device one after another. The paper: 1.003
to 1.08 for most models, 1.8 for two small ones.

Of the paper's three batches the largest and the smallest: on a GPU of today the smallest ones are as fast as the
processor launches them, and that changes by several percent within seconds where others use the machine as well.
"""

from __future__ import annotations

import contextlib
import json
import select
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from salus.bench.experiment import Say, Settings, Steps
from salus.bench.hooks import compare
from salus.bench.machine import few_cores
from salus.bench.models_of_paper import BATCHES, ON_THE_PROCESSOR
from salus.bench.own_service import OwnService
from salus.bench.switch import TIMEOUT_S, finished, take_turn
from salus.errors import SalusError

BLOCK = 5
SIZES = {"largest": -1, "smallest": 0}
AT_ONCE = 8
CORES = 1
"""For each model. Its threads take turns; on several cores an iteration takes a fifth longer now and then, for seconds.
What Salus does in another thread, if it did anything, would count here too."""
MODEL_S, PRECISE = 9.0, 0.002
"""For so long each model is measured, or until its ratio is known to this."""
FEWEST_ROUNDS = 4
TARGETS = {"median": 1.005, "worst": 1.03}


def run(settings: Settings, steps: Steps, say: Say) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for size, sizes in _sizes(settings).items():
        names = list(sizes)
        for at in range(0, len(names), AT_ONCE):
            group = {model: sizes[model] for model in names[at : at + AT_ONCE]}
            say(f"overhead of {', '.join(group)}, {size} batch; {at} of {len(names)} are done")
            step = f"{size} {' '.join(group)}"
            for row in steps.rows(step, lambda group=group: _measure(group, settings, say)):  # type: ignore[misc]
                batch = sizes[row["model"]]
                rows[f"{row['model']} {batch}"] = {"size": size, "batch": batch, **_compare(row)}
    found = {size: _summary([row for row in rows.values() if row["size"] == size]) for size in _sizes(settings)}
    return {"models": rows, "sizes": found, "targets": TARGETS}


def _sizes(settings: Settings) -> dict[str, dict[str, int]]:
    """For each size, the models and their batches."""
    if settings.device == "cpu":
        return {"only": dict.fromkeys(ON_THE_PROCESSOR[: settings.jobs], 32)}
    models = list(BATCHES)[: settings.jobs]
    return {size: {model: BATCHES[model][which] for model in models} for size, which in SIZES.items()}


def _summary(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    done = [row for row in rows if "ratio" in row]
    return {
        "median": statistics.median(row["ratio"] for row in done) if done else None,
        "worst": max((row["ratio"] for row in done), default=None),
        "bare_to_bare": statistics.median(row["bare_to_bare"] for row in done) if done else None,
    }


def _measure(sizes: dict[str, int], settings: Settings, say: Say) -> list[dict[str, Any]]:
    """For each model the seconds of an iteration, by state, round by round; or why there are none."""
    with contextlib.ExitStack() as stack:
        started = {
            model: _start(stack, model, batch, settings, number) for number, (model, batch) in enumerate(sizes.items())
        }
        # Until all of them are warm, or have failed: whoever still warms up is in the way of the first one measured.
        for process in started.values():
            assert process.stdout is not None
            select.select([process.stdout], [], [], TIMEOUT_S)
        rows = []
        for model, process in started.items():
            say(f"overhead of {model}")
            rows.append({"model": model, **_measured(process)})
        return rows


def _start(
    stack: contextlib.ExitStack, model: str, batch: int, settings: Settings, number: int
) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "salus.bench.hooks_job", model, "--batch", str(batch), "--device", settings.device,
        "--states", "bare,salus,again", "--block", str(BLOCK), "--rounds", str(FEWEST_ROUNDS),
        "--seconds", str(MODEL_S * settings.scale), "--precise", str(PRECISE), "--wait",
    ]  # fmt: skip
    service = stack.enter_context(OwnService(*settings.service("fair")))
    with few_cores(number, CORES, AT_ONCE):
        return service.run(command, "--name", model)


def _measured(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        take_turn(process)
        return {"seconds": json.loads(finished(process).splitlines()[-1])}
    except SalusError as error:
        return {"failed": str(error)}


def _compare(row: dict[str, Any]) -> dict[str, Any]:
    if "failed" in row:
        return {"failed": row["failed"]}
    found = compare(row["seconds"])
    bare_us = found["bare_us"]
    return {
        "iteration_ms": bare_us / 1000,
        "ratio": 1 + found["added_us"] / bare_us,
        "error": found["error_us"] / bare_us,
        "bare_to_bare": 1 + found["again_added_us"] / bare_us,
        "added_us": found["added_us"],
        "turns": len(row["seconds"]["bare"]),
        "seconds": row["seconds"],
    }


def verdicts(result: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    rows = [(model, row.get("failed") or _ratio(row), "", True) for model, row in result["models"].items()]
    for size, found in result["sizes"].items():
        if found["median"] is None:
            continue
        rows += [
            (f"{size} batch, {key}", f"{found[key]:.4f}", f"at most {target}", found[key] <= target)
            for key, target in TARGETS.items()
        ]
        done = [row for row in result["models"].values() if row["size"] == size and "ratio" in row]
        unseen = sum(abs(row["bare_to_bare"] - 1) >= abs(row["ratio"] - 1) for row in done)
        again = f"{found['bare_to_bare']:.4f}; {unseen} of {len(done)} differ from themselves by as much"
        rows.append((f"{size} batch, bare against bare, median", again, "", True))
    return rows


def _ratio(row: dict[str, Any]) -> str:
    sure = f" ± {row['error']:.4f}" if "error" in row else ""
    again, took = f"bare against bare {row['bare_to_bare']:.4f}", f"{row['iteration_ms']:.1f} ms an iteration"
    return f"{row['ratio']:.4f}{sure}; {again}; {took}"


def draw(result: dict[str, Any], path: Path) -> None:
    from salus.bench.plots import ratios

    done = {model: row for model, row in result["models"].items() if "ratio" in row}
    series = {
        "Salus": {model: (row["ratio"], row["error"]) for model, row in done.items()},
        "the bare script again": {model: (row["bare_to_bare"], 0.0) for model, row in done.items()},
    }
    ratios(path, series, "time of an iteration, to the bare script", TARGETS["worst"])
