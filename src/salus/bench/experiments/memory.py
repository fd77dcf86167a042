"""What each model needs of the GPU: what lives across iterations, within one, and outside any allocator.

Each trains for a few iterations under Salus, several at once, and what Salus measured of it is read off at its end. The
paper: across iterations 110 to 822 MB, within one up to 13.8 GB; so what could be shared is most of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from salus.bench.experiment import Job, Say, Settings, Steps
from salus.bench.models_of_paper import BATCHES
from salus.bench.own_service import OwnService
from salus.errors import RequestRejected

AT_ONCE = 5
SETTLE_S = 2.0
"""For so long each runs on at least: what the driver takes is looked at twice a second."""
KINDS = {"persistent": "persistent_bytes", "ephemeral": "ephemeral_bytes", "internal": "internal_bytes"}
TIMEOUT_S = 300.0


def run(settings: Settings, steps: Steps, say: Say) -> dict[str, Any]:
    if settings.device != "cuda":
        raise RequestRejected("bench memory: there is no GPU here, and on the processor no memory is shared")
    sizes = {model: batches[0] for model, batches in BATCHES.items()}
    names = list(sizes)[: settings.jobs]
    found: dict[str, Any] = {}
    for at in range(0, len(names), AT_ONCE):
        group = names[at : at + AT_ONCE]
        say(f"memory of {', '.join(group)}; {at} of {len(names)} are done")
        jobs = [Job(model, model, sizes[model], 0, seconds=SETTLE_S) for model in group]
        rows = steps.rows(" ".join(group), lambda jobs=jobs: _measure(jobs, settings))  # type: ignore[misc]
        found |= {row["name"]: {"batch": sizes[row["name"]], **row} for row in rows}
    return {"models": found}


def _measure(jobs: list[Job], settings: Settings) -> list[dict[str, Any]]:
    with OwnService(*settings.service("pack")) as service:
        go = service.socket.parent / "go"
        go.write_text("")
        started = [service.run(job.command(settings.device, go, 0.0), "--name", job.name) for job in jobs]
        errors = {
            job.name: process.communicate(timeout=TIMEOUT_S)[1] for job, process in zip(jobs, started, strict=True)
        }
        with service.connect() as connection:
            rows = connection.jobs(everything=True)
    return [
        {
            "name": row["name"],
            **{kind: row[key] / 2**20 for kind, key in KINDS.items()},
            "failed": None if row["exit_code"] == 0 else (errors[row["name"]].strip().splitlines() or ["?"])[-1][:300],
        }
        for row in rows
    ]


def verdicts(result: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    rows = []
    for model, row in result["models"].items():
        value = row["failed"] or ", ".join(f"{kind} {row[kind]:.0f} MiB" for kind in KINDS)
        rows.append((f"{model}, batch {row['batch']}", value, "", True))
    return rows


def draw(result: dict[str, Any], path: Path) -> None:
    from salus.bench.plots import bars

    rows = result["models"]
    done = {model: rows[model] for model in BATCHES if model in rows and not rows[model]["failed"]}
    bars(path, {kind: {model: row[kind] / 1024 for model, row in done.items()} for kind in KINDS}, "GiB")
