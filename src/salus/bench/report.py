"""`salus bench report`: docs/evaluation.md from results that were committed. No number in it is typed by hand.

For each experiment: what the paper found, what was measured here, on what machine and when, and how to run it again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from salus.bench.experiments import EXPERIMENTS, find
from salus.errors import RequestRejected

Verdict = tuple[str, str, str, bool]

PAPER = {
    "overhead": "1.003 to 1.08 times the time of an iteration for most models, 1.8 for two small ones.",
    "fairness": "Three equal jobs, started 15 s apart: each gets half, then a third; the total stays flat.",
    "jct": "100 jobs: average completion 170.6 min under FIFO, 53.4 under SRTF (3.19 times better), 96.6 under FAIR.",
    "preemption": "Six jobs under SRTF: the next job's iteration starts at once.",
    "pair": "Two AlexNet, batch 25: static partition 105 s, MPS 88.5 s, Salus 89 s.",
    "memory": "Across iterations 110 to 822 MB, within one up to 13.8 GB.",
    "paging": "It could not do that.",
    "tuning": "300 jobs at once: 2.38 times faster than one by one (super-resolution), 1.07 times (ResNet-50).",
}
REASONS = "why.json"
"""Beside the results: of each in which a target is missed, where that comes from and what would help."""
PICTURES = {"gpu-pressure.json": "pictures/paging.png"}
"""Drawn by benchmarks/paging_timeline.py."""
FIGURES = "pictures"
"""Beside the page: what `draw` makes."""
DEVICES = ("gpu", "host")
HEAD = """# Evaluation

Made by `salus bench report` from the files in `benchmarks/results/`; what is not there was not measured. How the
experiments are done is told in [experiments.md](experiments.md).
"""


def write(results: Path, out: Path) -> None:
    if not results.is_dir():
        raise RequestRejected(f"{results}: there is no such folder; --results names the one with the JSON files")
    reasons = _read(results / REASONS) or {}
    parts = [HEAD, *(_experiment(results, name, reasons) for name in EXPERIMENTS)]
    for file, title, tell in SUITE:
        found = _read(results / file)
        if found is not None:
            picture = PICTURES.get(file)
            shown = [] if picture is None else ["", f"![{title}]({picture})"]
            rows = tell(found)
            told = [*_table(rows), *_why(rows, file, reasons), "", _origin(found, file)]
            parts.append("\n".join([f"## {title}", "", *told, *shown]))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n\n".join(part.rstrip() for part in parts) + "\n")


def draw(results: Path, folder: Path) -> list[Path]:
    """The figures that the page shows, one for each result of an experiment."""
    drawn = []
    for name in EXPERIMENTS:
        for device in DEVICES:
            found = _read(results / f"{device}-{name}.json")
            if found is not None:
                module, _, _, draw_one = find(name)
                folder.mkdir(parents=True, exist_ok=True)
                drawn.append(folder / f"{device}-{name}.png")
                getattr(module, draw_one)(found["result"], drawn[-1])
    return drawn


def _experiment(results: Path, name: str, reasons: dict[str, str]) -> str:
    lines = [f"## {name}", "", f"The paper: {PAPER[name]}", ""]
    there = False
    for device in DEVICES:
        found = _read(results / f"{device}-{name}.json")
        if found is None:
            continue
        there = True
        module, _, judge, _ = find(name)
        file = f"{device}-{name}"
        rows = getattr(module, judge)(found["result"])
        lines += [*_table(rows), *_why(rows, f"{file}.json", reasons), "", _origin(found, f"{file}.json"), ""]
        lines += [f"![{name}]({FIGURES}/{file}.png)", ""]
    if not there:
        lines += ["Not measured yet.", ""]
    return "\n".join([*lines, f"Again: `salus bench {name} --out {name}.json --plot {name}.png`"])


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RequestRejected(f"{path}: cannot be read as a result ({error}); measure it again") from None


def _table(rows: list[Verdict]) -> list[str]:
    lines = ["| measured | value | target | |", "|---|---|---|---|"]
    for what, value, target, met in rows:
        lines.append(f"| {what} | {value} | {target} | {('met' if met else '**missed**') if target else ''} |")
    return lines


def _why(rows: list[Verdict], file: str, reasons: dict[str, str]) -> list[str]:
    missed = any(target and not met for _, _, target, met in rows)
    return ["", f"{'Why' if missed else 'Note'}: {reasons[file]}"] if file in reasons else []


def _origin(found: dict[str, Any], file: str) -> str:
    machine = found["machine"]
    gpu = f"{found['gpu']}, " if isinstance(found.get("gpu"), str) else ""
    torch = f", torch {found['torch']}" if "torch" in found else ""
    return (
        f"{found['date']}, {gpu}{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}{torch}; "
        f"[{file}](../benchmarks/results/{file})"
    )


# The GPU suite (`make test-gpu`) and the benchmarks of the parts.


def _alone(found: dict[str, Any]) -> list[Verdict]:
    rows: list[Verdict] = []
    for row in found["alone"]:
        if "failed" in row:
            rows.append((row["kind"], "failed", "the same losses", False))
            continue
        losses = "the same losses" if row["same"] else "other losses"
        # Older results compared processes, which differ by more than what is looked for.
        within = "error" in row
        how_sure = f"± {row['error']:.3f}" if within else f"bare against bare {row['ratio_of_bare_to_bare']:.3f}"
        iteration_ms = row["bare_us"] / 1000 if within else row["iteration_ms"]["bare"]
        value = f"{losses}, {row['ratio']:.3f} of the time; {how_sure}; {iteration_ms:.1f} ms an iteration"
        rows.append((row["kind"], value, "the same, at most 1.01", row["same"] and row["ratio"] <= 1.01))
    return rows


def _together(found: dict[str, Any]) -> list[Verdict]:
    jobs = found["together"]["jobs"]
    same = sum(bool(row.get("same")) for row in jobs.values())
    return [
        ("jobs at once, switched at every boundary, lanes poisoned", str(len(jobs)), "", True),
        ("losses as bare, to the last bit", f"{same} of {len(jobs)}", "all", same == len(jobs)),
    ]


def _lane(found: dict[str, Any]) -> list[Verdict]:
    rows: list[Verdict] = []
    sides = found["memory"]
    alone = [row for name, row in sides.items() if name.startswith("alone")]
    one = alone[-1]
    context = max(one["nvml_mib_by_process"].values()) - sum(one["persistent_mib"]) - sum(one["ephemeral_mib"])
    for name, row in sides.items():
        if name.startswith("alone"):
            rows.append((f"{name}, iterations a second", f"{row['iterations_a_second']:.1f}", "", True))
            continue
        took = row["hand_over_us"]["median_us"]
        rows.append((f"{name}: hand-over, median", f"{took:.0f} us", "at most 250 us", took <= 250))
        whole = len(row["persistent_mib"]) * context + sum(row["persistent_mib"]) + row["lane_chunks_mib"]
        memory = row["nvml_mib"] / whole
        what = f"{name}: memory, to three contexts, what is persistent and one lane"
        rows.append((what, f"{memory:.3f}", "at most 1.03", memory <= 1.03))
    return rows


def _throughput(found: dict[str, Any]) -> list[Verdict]:
    """What the three get done, to one alone: turn by turn, and by what each lease loses at its ends."""
    told = found["throughput"]
    rows: list[Verdict] = []
    for how in ("by turns", "at equal speed", "by leases"):
        key = how.replace(" ", "_")
        value = f"{told[key]:.3f} ± {told[f'{key}_error']:.3f}"
        rows.append((f"three in one lane to one alone, {how}", value, "at least 0.99", told[key] >= 0.99))
    return [
        *rows,
        ("a lease, at the median", f"{told['lease_s']:.2f} s", "", True),
        ("a switch costs, at the median", f"{told['switch_ms']:.1f} ms", "", True),
    ]


def _arena(found: dict[str, Any]) -> list[Verdict]:
    from salus.bench.arena import verdicts

    return verdicts(found)


def _paging(found: dict[str, Any]) -> list[Verdict]:
    rows: list[Verdict] = []
    for policy, row in found["paging"]["policies"].items():
        rows.append((f"{policy}: losses as bare", "all" if row["same"] else "not all", "all", row["same"]))
        size = row["persistent_gib"]
        rows.append((f"{policy}: what is persistent, of all", f"{size:.1f} GiB", "at least 32 GiB", size >= 32))
        for key, what in (("page_out_to_pinned", "page-out"), ("page_in_to_pinned", "page-in")):
            if (
                row.get(key) is not None
                and row["alone_on_the_bus"][{"page-out": "PageOut", "page-in": "PageIn"}[what]] > 4
            ):
                value = f"{row[key]:.3f}"
                rows.append((f"{policy}: rate of a {what}, to pinned copies", value, "at least 0.85", row[key] >= 0.85))
        if row.get("hidden") is not None and any(copy["kind"] == "PageIn" for copy in row["copies"]):
            rows.append(
                (f"{policy}: page-in behind others' work", f"{row['hidden']:.0%}", "at least 70%", row["hidden"] >= 0.7)
            )
    return rows


def _shares(found: dict[str, Any]) -> list[Verdict]:
    index = found["shares"]["jain"]
    return [("Jain's index of memory x time, twenty jobs", f"{index:.3f}", "at least 0.95", index >= 0.95)]


def _faults(found: dict[str, Any]) -> list[Verdict]:
    large, kills = found["faults"]["too large"], found["faults"]["kills"]
    slower = large["neighbours_slower_by"]

    def told(what: str, good: bool, yes: str, no: str) -> Verdict:
        return what, yes if good else no, yes, good

    return [
        told("one that needs more than the GPU", large["out_of_memory"], "out of memory", "something else"),
        told("its neighbours' losses", large["neighbours_same"], "the same", "changed"),
        (
            "an iteration of theirs, to before it came",
            "not seen" if slower is None else f"{slower:.3f}",
            "at most 1.05",
            slower is not None and slower <= 1.05,
        ),
        told(f"survivors' losses after {kills['kills']} kills", kills["survivors_same"], "the same", "changed"),
        told("GPU memory after them", kills["left_mib"] <= 0, "all of it is back", f"{kills['left_mib']} MiB are left"),
    ]


def _crowd(found: dict[str, Any]) -> list[Verdict]:
    told = found["crowd"]
    jobs, most, capacity = told["jobs"], told["most_gib"], told["capacity_gib"]
    return [
        ("jobs with the losses of the bare script", f"{told['same']} of {jobs}", f"{jobs}", told["same"] == jobs),
        ("the GPU's memory at the most", f"{most:.2f} GiB", f"at most {capacity} GiB", most <= capacity),
        ("contexts at a time, at the most", f"{told['most_contexts']}", "", True),
        ("processes that waited before they made theirs", f"{told['most_at_the_door']}", "", True),
    ]


def _switch(found: dict[str, Any]) -> list[Verdict]:
    from salus.bench.switch import verdicts

    return verdicts(found)


def _hooks(found: dict[str, Any]) -> list[Verdict]:
    from salus.bench.hooks import verdicts

    return verdicts(found)


def _switch_gpu(found: dict[str, Any]) -> list[Verdict]:
    from salus.bench.switch_gpu import verdicts

    return verdicts(found)


SUITE: tuple[tuple[str, str, Callable[[dict[str, Any]], list[Verdict]]], ...] = (
    ("gpu-alone.json", "Kinds of scripts, alone under Salus", _alone),
    ("gpu-together.json", "All kinds of scripts at once", _together),
    ("gpu-lane.json", "Three ResNet-50 in one lane", _lane),
    ("gpu-throughput.json", "Three ResNet-50 in one lane against one alone", _throughput),
    ("gpu-arena.json", "The arena: a lane of 16 GiB, on a GPU", _arena),
    ("gpu-pressure.json", "Eight jobs of 4 GiB on 16 GiB", _paging),
    ("gpu-shares.json", "Fair by memory and time", _shares),
    ("gpu-faults.json", "Faults", _faults),
    ("gpu-crowd.json", "Twelve jobs where there is room for the contexts of six", _crowd),
    ("gpu-switch.json", "Switching, on a GPU", _switch_gpu),
    ("host-switch.json", "Switching, on the host device", _switch),
    ("host-arena.json", "The arena: a lane of 16 GiB, on the host device", _arena),
    ("gpu-hooks.json", "What Salus adds to an iteration, on a GPU", _hooks),
    ("host-hooks.json", "What Salus adds to an iteration, on the host device", _hooks),
)
