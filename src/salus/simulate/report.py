"""What a person sees of a simulation: progress, the table, the plot, the timeline."""

from __future__ import annotations

import colorsys
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from salus.errors import RequestRejected
from salus.simulate.engine import Hardware, Outcome, Segment
from salus.simulate.metrics import Summary
from salus.units import format_bytes, format_duration

SHOW_AFTER_JOBS = 200
"""Runs shorter than this are over before a bar could be read."""
TIMELINE_LIMIT = 200_000
"""Segments in a timeline; a browser is slow with more, so shorter ones are then merged."""


class _Bar:
    def __init__(self, bar: Progress | None, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total) if bar is not None else None
        self._before = 0
        self._last = 0

    def begin(self, name: str) -> None:
        self._before += self._last
        self._last = 0
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=name)

    def step(self, finished: int) -> None:
        self._last = finished
        if self._bar is not None and self._task is not None and finished % 50 == 0:
            self._bar.update(self._task, completed=self._before + finished)


@contextmanager
def progress(total_jobs: int, *, quiet: bool) -> Iterator[_Bar]:
    """A progress bar on stderr, where somebody looks at it and it is worth it."""
    if quiet or total_jobs < SHOW_AFTER_JOBS:
        yield _Bar(None, total_jobs)
        return
    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Bar(bar, total_jobs)


def table(summaries: Mapping[str, Summary], hardware: Hardware) -> Table:
    jobs = next(iter(summaries.values())).jobs
    longest = max(summary.makespan_s for summary in summaries.values())
    size, unit = next((size, unit) for size, unit in _UNITS if longest >= 5 * size or size == 1)
    gpus = f"{hardware.gpus} GPU{'s' if hardware.gpus > 1 else ''} of {format_bytes(hardware.memory_bytes)}"
    shown = Table(
        box=None,
        pad_edge=False,
        header_style="bold",
        title_justify="left",
        title_style="",
        title=f"{jobs:,} jobs on {gpus}, quantum {format_duration(hardware.quantum_s)}; times in {unit}",
    )
    shown.add_column("policy", no_wrap=True)
    for column in (*_TIMES.values(), "GPU utilization"):
        shown.add_column(column, justify="right")
    rows = {name: summary.as_dict() for name, summary in summaries.items()}
    best = {key: min(row[key] for row in rows.values()) for key in _TIMES}
    for name, row in rows.items():
        cells = [
            f"[green]{row[key] / size:,.1f}[/]" if row[key] == best[key] else f"{row[key] / size:,.1f}" for key in best
        ]
        shown.add_row(name, *cells, f"{row['utilization']:.1%}")
    return shown


_UNITS = ((86400.0, "days"), (60.0, "minutes"), (1.0, "seconds"))
_TIMES = {
    "makespan_s": "makespan",
    "avg_queuing_s": "avg queuing",
    "avg_jct_s": "avg JCT",
    "p95_jct_s": "95 % JCT",
}


# The plot


def check_can_plot(path: Path) -> None:
    """Before the work rather than after it."""
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise RequestRejected(f"{path}: a plot is written as .png, .pdf or .svg; name the file so")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RequestRejected("--plot needs matplotlib; install it with: pip install 'salus[plot]'") from None


def write_plot(path: Path, outcomes: Mapping[str, Outcome], summaries: Mapping[str, Summary]) -> None:
    """For each policy, the part of the jobs that are done within a time; and the averages as the paper shows them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    spread, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    for name, outcome in outcomes.items():
        jcts = sorted(max(record.jct_s, 1e-3) / 60 for record in outcome.records)
        parts = [(rank + 1) / len(jcts) for rank in range(len(jcts))]
        spread.step([jcts[0], *jcts], [0.0, *parts], where="post", label=name)
    spread.set(xscale="log", xlabel="completion time, minutes", ylabel="part of the jobs", ylim=(0, 1))
    spread.grid(alpha=0.3, which="both")
    spread.legend(frameon=False)
    names = list(summaries)
    for offset, (label, values) in enumerate(
        (
            ("average JCT", [summary.avg_jct_s / 60 for summary in summaries.values()]),
            ("average queuing", [summary.avg_queuing_s / 60 for summary in summaries.values()]),
        )
    ):
        drawn = bars.bar([i + (offset - 0.5) * 0.4 for i in range(len(names))], values, width=0.38, label=label)
        bars.bar_label(drawn, fmt="%.1f", fontsize=8)
    bars.set_xticks(range(len(names)), names, rotation=20 if len(names) > 4 else 0)
    bars.set_ylabel("minutes")
    bars.legend(frameon=False)
    bars.margins(y=0.12)
    for axes in (spread, bars):
        axes.spines[["top", "right"]].set_visible(False)
    writing(path, lambda: figure.savefig(path, dpi=130))


# The timeline

COLOURS = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf",
)  # fmt: skip
"""Of the first jobs, in the picture and on the page."""
WAITS = "#dde1e6"
"""As in timeline.html, where that is on a light page."""


def colour_of(rank: int) -> str:
    """Neighbours get colours that are far apart: beyond the table, by the golden angle."""
    if rank < len(COLOURS):
        return COLOURS[rank]
    parts = colorsys.hls_to_rgb(rank * 0.381966 % 1, 0.45 + rank % 3 * 0.08, 0.62)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def write_timeline_picture(path: Path, outcomes: Mapping[str, Outcome]) -> None:
    """A row for each job, one panel above the other for each policy: grey while it waits, coloured while it runs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = max(len(outcome.records) for outcome in outcomes.values())
    figure = Figure(figsize=(10, 0.9 + len(outcomes) * (0.7 + 0.32 * rows)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(outcomes), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (name, outcome) in zip(panels, outcomes.items(), strict=True):
        begin = min(record.job.submit_s for record in outcome.records)
        for row, record in enumerate(outcome.records):
            panel.broken_barh([(record.job.submit_s - begin, record.jct_s)], (row - 0.36, 0.72), color=WAITS)
            ran = [(s.start_s - begin, s.end_s - s.start_s) for s in outcome.segments if s.job_id == record.job.job_id]
            panel.broken_barh(ran, (row - 0.36, 0.72), color=colour_of(row))
        panel.set_yticks(
            range(len(outcome.records)), [record.job.name or record.job.job_id for record in outcome.records]
        )
        panel.invert_yaxis()
        panel.set_title(name, loc="left", fontsize=11)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="x", alpha=0.3)
    panels[-1].set_xlabel("seconds; grey: submitted and waiting")
    writing(path, lambda: figure.savefig(path, dpi=130))


def write_timeline(
    path: Path, outcomes: Mapping[str, Outcome], summaries: Mapping[str, Summary], *, device: str = "GPU"
) -> None:
    """A page with a chart for each policy. It needs no network: data and program are in the file.

    `device`: what the jobs share, as a person is told.
    """
    runs = [_timeline_data(name, outcome, summaries[name]) for name, outcome in outcomes.items()]
    data = {"device": device, "runs": runs}
    page = files("salus.simulate").joinpath("timeline.html").read_text("utf-8")
    # "</" would end the script element in mid-string.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    writing(path, lambda: path.write_text(page.replace("/*DATA*/{}", text), "utf-8"))


def _timeline_data(name: str, outcome: Outcome, summary: Summary) -> dict[str, object]:
    begin = min(record.job.submit_s for record in outcome.records)
    order = {record.job.job_id: rank for rank, record in enumerate(outcome.records)}
    return {
        "policy": name,
        "summary": summary.as_dict(),
        "jobs": [
            {
                "id": record.job.job_id,
                "name": record.job.name,
                "colour": colour_of(rank),
                "gpu": record.gpu,
                "submit": record.job.submit_s - begin,
                "start": record.started_s - begin,
                "end": record.finished_s - begin,
            }
            for rank, record in enumerate(outcome.records)
        ],
        "segments": [
            [order[s.job_id], s.gpu, s.lane, round(s.start_s - begin, 3), round(s.end_s - begin, 3)]
            for s in _merged(outcome.segments)
        ],
    }


def _merged(segments: list[Segment]) -> list[Segment]:
    """Joins what is too short to be seen, so that the page stays usable: a job's leases in a lane with small gaps."""
    if len(segments) <= TIMELINE_LIMIT:
        return segments
    span = max(s.end_s for s in segments) - min(s.start_s for s in segments)
    gap = span / 2000
    merged: list[Segment] = []
    last: dict[tuple[str, int, int], int] = {}
    for s in sorted(segments, key=lambda s: s.start_s):
        key = (s.job_id, s.gpu, s.lane)
        at = last.get(key)
        if at is not None and s.start_s - merged[at].end_s <= gap:
            merged[at] = Segment(s.job_id, s.gpu, s.lane, merged[at].start_s, s.end_s)
        else:
            last[key] = len(merged)
            merged.append(s)
    return merged


def writing(path: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise RequestRejected(f"{path}: cannot be written ({error.strerror})") from None
