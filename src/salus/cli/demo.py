"""`salus demo`: see policies at work, with real jobs on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Table

from salus.bench import demo as jobs_of_demo
from salus.bench import machine
from salus.cli.console import make_console
from salus.errors import RequestRejected
from salus.simulate import report
from salus.simulate.engine import Outcome
from salus.simulate.metrics import Summary, summarize


def demo(
    device: Annotated[str, typer.Option(metavar="auto|cuda|cpu", help="Where the jobs train.")] = "auto",
    policy: Annotated[str, typer.Option(help="Policies to try, in this order.")] = "fifo,srtf,fair",
    folder: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Where the timelines go: demo.html and demo.png.")
    ] = Path("."),
    scale: Annotated[float, typer.Option(min=0.01, max=100, help="Length of the jobs, in times the usual.")] = 1.0,
) -> None:
    """Train four models of different lengths on one device under FIFO, SRTF and FAIR, and compare.

    Each job runs alone first, without Salus. Takes about two minutes. It has a service of its own; one that runs is
    left alone.

    Example: `salus demo`
    """
    if device not in ("auto", "cuda", "cpu"):
        raise RequestRejected(f"--device: {device!r} is not understood; expected auto, cuda or cpu")
    folder.mkdir(parents=True, exist_ok=True)
    device = machine.device_to_run_on(device)
    outcomes: dict[str, Outcome] = {}
    summaries: dict[str, Summary] = {}
    digests: set[tuple[str, ...]] = set()
    with _Bars() as bars:
        measured = jobs_of_demo.measure_alone(device, scale, bars.show)
        digests.add(tuple(one.digest for one in measured))
        for name in filter(None, (part.strip() for part in policy.split(","))):
            bars.begin({one.job.name: one.iterations for one in measured})
            outcomes[name], losses = jobs_of_demo.run_policy(name, measured, device, bars.show)
            summaries[name] = summarize(outcomes[name])
            digests.add(tuple(losses))
    if not outcomes:
        raise RequestRejected("--policy: expected at least one policy, like fifo,srtf")
    console = make_console()
    console.print("seconds from arrival to completion", highlight=False)
    console.print(_jobs_table(outcomes, [one.alone_s for one in measured]))
    console.print("\naverages over the jobs, in seconds", highlight=False)
    console.print(_policies_table(summaries))
    same = "the same to the last bit" if len(digests) == 1 else "NOT the same"
    console.print(f"\nthe losses of all jobs are {same} alone and under every policy", highlight=False)
    page, picture = folder / "demo.html", folder / "demo.png"
    report.write_timeline(page, outcomes, summaries, device="processor" if device == "cpu" else "GPU")
    console.print(f"wrote {page}", highlight=False, markup=False)
    try:
        report.check_can_plot(picture)
    except RequestRejected:
        console.print("no picture without matplotlib; install it with: pip install 'salus[plot]'", markup=False)
    else:
        report.write_timeline_picture(picture, outcomes)
        console.print(f"wrote {picture}", highlight=False, markup=False)


def _jobs_table(outcomes: dict[str, Outcome], alone_s: list[float]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("job", no_wrap=True)
    table.add_column("alone", justify="right")
    for name in outcomes:
        table.add_column(name, justify="right")
    first = next(iter(outcomes.values()))
    for row, record in enumerate(first.records):
        cells = [f"{outcome.records[row].jct_s:.1f}" for outcome in outcomes.values()]
        table.add_row(record.job.name, f"{alone_s[row]:.1f}", *cells)
    return table


def _policies_table(summaries: dict[str, Summary]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("policy", no_wrap=True)
    for column in ("avg queuing", "avg JCT", "makespan"):
        table.add_column(column, justify="right")
    best = min(summary.avg_jct_s for summary in summaries.values())
    for name, summary in summaries.items():
        jct = f"[green]{summary.avg_jct_s:.1f}[/]" if summary.avg_jct_s == best else f"{summary.avg_jct_s:.1f}"
        table.add_row(name, f"{summary.avg_queuing_s:.1f}", jct, f"{summary.makespan_s:.1f}")
    return table


class _Bars:
    """Progress on stderr: bars where somebody looks, else a line for each new thing."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._live = sys.stderr.isatty()
        columns = (SpinnerColumn(), TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not self._live)
        self._what = self._progress.add_task("", total=None)
        self._jobs: dict[str, TaskID] = {}
        self._said = ""

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, totals: dict[str, int]) -> None:
        for task in self._jobs.values():
            self._progress.remove_task(task)
        self._jobs = {name: self._progress.add_task(f"  {name}", total=total) for name, total in totals.items()}

    def show(self, what: str, done: dict[str, int]) -> None:
        if what != self._said and not self._live:
            print(f"salus: {what}", file=sys.stderr)
        self._said = what
        self._progress.update(self._what, description=what)
        for name, iterations in done.items():
            self._progress.update(self._jobs[name], completed=iterations)
