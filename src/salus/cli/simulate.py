"""`salus simulate`: try policies on a trace before they touch a GPU."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from salus.cli.console import make_console
from salus.cli.options import parsed
from salus.errors import RequestRejected
from salus.plugins import load_policy
from salus.simulate import report
from salus.simulate.engine import Hardware, Outcome, Simulation
from salus.simulate.metrics import Summary, summarize
from salus.simulate.trace import TraceJob, read_profile, read_trace, write_trace
from salus.simulate.workloads import DEFAULT_LOAD, generate
from salus.units import parse_bytes, parse_duration

MOST_JOBS = 10_000_000


def simulate(
    trace: Annotated[
        Path | None, typer.Argument(metavar="[TRACE.csv]", help="The jobs. See docs/simulator.md.")
    ] = None,
    count: Annotated[
        int | None, typer.Option("--generate", metavar="N", help="Make a trace of N jobs instead.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Policies to compare, with commas between.")] = "fifo,srtf,pack,fair",
    gpus: Annotated[int, typer.Option(min=1, help="How many GPUs.")] = 1,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of each GPU.")] = "16GiB",
    host_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Host memory for paging, for each GPU; 0 for no paging.")
    ] = "64GiB",
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CSV: workload, persistent_mb, ephemeral_mb.")
    ] = None,
    ignore_num_gpu: Annotated[
        bool, typer.Option("--ignore-num-gpu", help="Take every job of the trace as a one-GPU job.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the trace that --generate makes.")] = 0,
    load: Annotated[
        float, typer.Option(help="With --generate: work that arrives in a second, in GPU seconds for each GPU.")
    ] = DEFAULT_LOAD,
    quantum: Annotated[
        str,
        typer.Option(metavar="TIME", help="A lease lasts at least this long. auto: by the length of the trace."),
    ] = "auto",
    switch_cost: Annotated[str, typer.Option(metavar="TIME", help="Time lost when a lane changes hands.")] = "0.1ms",
    page_rate: Annotated[str, typer.Option(metavar="SIZE", help="Bytes paged in a second.")] = "12GB",
    side_by_side: Annotated[
        float,
        typer.Option(min=0.01, help="What jobs in parallel lanes get done together, of what their utilizations allow."),
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Plot how completion times are spread.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Chart of jobs and lanes over time, for a browser.")
    ] = None,
    save_trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Write the jobs that were simulated, to change and run again."),
    ] = None,
) -> None:
    """Try policies on a trace of jobs, with the scheduler that runs real ones.

    Example: `salus simulate --generate 100 --policy fifo,srtf --plot jct.png`

    Example: `salus simulate trace.csv --profile models.csv --gpus 4 --memory 40GiB --json`
    """
    memory_bytes = parsed("--memory", parse_bytes, memory)
    if memory_bytes == 0:
        raise RequestRejected("--memory: 0 is no GPU; write it like 16GiB")
    page_bytes_per_s = parsed("--page-rate", parse_bytes, page_rate)
    if page_bytes_per_s == 0:
        raise RequestRejected(
            "--page-rate: nothing can be paged at 0 bytes a second; for no paging say --host-memory 0"
        )
    names = _policy_names(policy)
    for path in (plot, timeline, save_trace):
        _check_can_write(path)
    if plot is not None:
        report.check_can_plot(plot)
    jobs = _jobs(trace, count, memory_bytes, profile, ignore_num_gpu, seed, gpus, load)
    hardware = Hardware(
        gpus=gpus,
        memory_bytes=memory_bytes,
        host_bytes=parsed("--host-memory", parse_bytes, host_memory),
        quantum_s=auto_quantum(jobs, gpus) if quantum == "auto" else parsed("--quantum", parse_duration, quantum),
        switch_s=parsed("--switch-cost", parse_duration, switch_cost),
        page_bytes_per_s=page_bytes_per_s,
        side_by_side=side_by_side,
    )
    outcomes: dict[str, Outcome] = {}
    summaries: dict[str, Summary] = {}
    with report.progress(len(jobs) * len(names), quiet=as_json or not sys.stderr.isatty()) as bar:
        for name in names:
            bar.begin(name)
            run = Simulation(
                jobs, partial(load_policy, name), hardware, keep_segments=timeline is not None, on_finish=bar.step
            )
            outcomes[name] = run.run()
            summaries[name] = summarize(outcomes[name])
    if save_trace is not None:
        report.writing(save_trace, lambda: write_trace(save_trace, jobs))
    if plot is not None:
        report.write_plot(plot, outcomes, summaries)
    if timeline is not None:
        report.write_timeline(timeline, outcomes, summaries)
    if as_json:
        typer.echo(json.dumps({"policies": {name: summary.as_dict() for name, summary in summaries.items()}}))
        return
    console = make_console()
    console.print(report.table(summaries, hardware))
    for path in (save_trace, plot, timeline):
        if path is not None:
            console.print(f"wrote {path}", highlight=False, markup=False)


def auto_quantum(jobs: list[TraceJob], gpus: int) -> float:
    """A thirtieth of the work there is for each GPU, but at most 5 minutes, or a 500th of it where that is more.

    Fine enough to show how a short trace is shared, coarse enough for a trace of weeks.
    """
    work_s = sum(job.duration_s for job in jobs) / gpus
    return min(max(300.0, work_s / 500), max(0.001, work_s / 30))


def _jobs(
    trace: Path | None,
    count: int | None,
    memory_bytes: int,
    profile: Path | None,
    ignore_num_gpu: bool,
    seed: int,
    gpus: int,
    load: float,
) -> list[TraceJob]:
    if (trace is None) == (count is None):
        raise RequestRejected("simulate takes either a TRACE.csv or --generate N (see salus simulate --help)")
    if trace is not None:
        workloads = read_profile(profile) if profile is not None else None
        return read_trace(trace, capacity_bytes=memory_bytes, profile=workloads, ignore_num_gpu=ignore_num_gpu)
    if profile is not None:
        raise RequestRejected("--profile goes with a TRACE.csv that names models; --generate has its own workloads")
    assert count is not None
    if count < 1:
        raise RequestRejected(f"--generate: {count} is too few; expected 1 job or more")
    if count > MOST_JOBS:
        raise RequestRejected(f"--generate: {count} is too many; expected {MOST_JOBS:,} at the most")
    if not 1e-6 <= load <= 1e6:
        raise RequestRejected(f"--load: {load} is out of range; expected a number above 0, up to a million")
    jobs = generate(count, seed=seed, gpus=gpus, load=load)
    largest = max(jobs, key=lambda job: job.footprint.total_bytes)
    if largest.footprint.total_bytes > memory_bytes:
        raise RequestRejected(
            f"--memory: job {largest.job_id} ({largest.name}) of the generated trace needs "
            f"{largest.footprint.total_bytes / 1e9:.1f} GB; expected a GPU that it fits on"
        )
    return jobs


def _check_can_write(path: Path | None) -> None:
    """Before the work rather than after it."""
    if path is None:
        return
    if path.is_dir():
        raise RequestRejected(f"{path}: is a folder; expected the name of a file")
    if not path.absolute().parent.is_dir():
        raise RequestRejected(f"{path}: there is no folder {path.parent}; make it first")


def _policy_names(text: str) -> list[str]:
    """Splits at commas, but not at those between the parameters of one policy: `fair:by=memory,patience=60,srtf`."""
    names: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if "=" in part and ":" not in part and names:
            names[-1] += ("," if ":" in names[-1] else ":") + part
        else:
            names.append(part)
    if not names:
        raise RequestRejected("--policy: expected at least one policy, like fifo,srtf")
    for name in names:
        load_policy(name)
    return list(dict.fromkeys(names))
