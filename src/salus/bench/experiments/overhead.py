"""What Salus costs one job that is alone: the time of an iteration against the bare script, for each model.

Three processes of the same script, two bare and one under Salus, take turns block by block, so that all see the same
weather; how much the two bare ones differ is the measure of what can be seen. The paper: 1.003 to 1.08 for most models,
1.8 for two small ones.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from salus.bench.experiment import WARM_UP, WORKLOAD, Ran, Say, Settings, Steps
from salus.bench.models_of_paper import BATCHES, ON_THE_PROCESSOR
from salus.bench.own_service import OwnService
from salus.bench.switch import take_turn
from salus.errors import SalusError

BLOCK = 10
TARGETS = {"median": 1.005, "worst": 1.03}


def run(settings: Settings, steps: Steps, say: Say) -> dict[str, Any]:
    sizes = {model: batches[0] for model, batches in BATCHES.items()}
    if settings.device == "cpu":
        sizes = dict.fromkeys(ON_THE_PROCESSOR, 32)
    if settings.jobs is not None:
        sizes = dict(list(sizes.items())[: settings.jobs])
    blocks = max(4, round(12 * settings.scale))
    rows: dict[str, Any] = {}
    for number, (model, batch) in enumerate(sizes.items()):
        say(f"overhead of {model}, {number + 1} of {len(sizes)}")
        ran = {one.name: one for one in steps.runs(model, lambda m=model, b=batch: _sides(m, b, blocks, settings))}  # type: ignore[misc]
        failed = next((one.failed for one in ran.values() if one.failed), None)
        rows[model] = {"batch": batch, "failed": failed} if failed else {"batch": batch, **_compare(ran)}
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


def _sides(model: str, batch: int, blocks: int, settings: Settings) -> list[Ran]:
    command = [
        sys.executable, str(WORKLOAD), "--model", model, "--batch", str(batch), "--device", settings.device,
        "--iterations", str(blocks * BLOCK), "--block", str(BLOCK), "--warm-up", str(WARM_UP),
    ]  # fmt: skip
    with OwnService(*settings.service("fair")) as service:
        sides = {"bare": service.start_bare(command), "salus": service.run(command, "--name", model)}
        sides["again"] = service.start_bare(command)
        try:
            for turn in range(blocks):
                # What comes first must not always be the same one.
                for side in list(sides) if turn % 2 == 0 else list(reversed(sides)):
                    take_turn(sides[side])
        except SalusError as error:
            return [Ran(side, 0.0, [], failed=str(error)) for side in sides]
        told = {side: process.communicate()[0].splitlines()[-1] for side, process in sides.items()}
    # Of one that ran in turns, how long each iteration took is what counts.
    return [Ran(side, 0.0, json.loads(line)["seconds"]) for side, line in told.items()]


def _compare(ran: dict[str, Ran]) -> dict[str, float]:
    # Not the first block, which warms up, and of each the lower quartile: others make some slower and none faster.
    blocks = {
        side: [statistics.quantiles(one.ends_s[at : at + BLOCK], n=4)[0] for at in range(BLOCK, len(one.ends_s), BLOCK)]
        for side, one in ran.items()
    }

    def against_bare(side: str) -> float:
        return statistics.median(b / a for a, b in zip(blocks["bare"], blocks[side], strict=True))

    return {
        "iteration_ms": 1000 * statistics.median(blocks["bare"]),
        "ratio": against_bare("salus"),
        "bare_to_bare": against_bare("again"),
    }


def verdicts(result: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    rows = [
        (f"{model}, batch {row['batch']}", row.get("failed") or f"{row['ratio']:.3f}", "", True)
        for model, row in result["models"].items()
    ]
    rows += [
        (key, f"{result[key]:.4f}", f"at most {target}", result[key] <= target)
        for key, target in TARGETS.items()
        if result[key] is not None
    ]
    if result["bare_to_bare"] is not None:
        rows.append(("bare against bare, median", f"{result['bare_to_bare']:.4f}", "", True))
    return rows


def draw(result: dict[str, Any], path: Path) -> None:
    from salus.bench.plots import bars

    rows = {model: row["ratio"] for model, row in result["models"].items() if "ratio" in row}
    bars(path, {"Salus": rows}, "time of an iteration, against the bare script", line_at=1.0)
