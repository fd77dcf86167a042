"""`salus bench`: measure what Salus costs and gains on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from salus.bench import arena as arena_bench
from salus.bench import crowd as crowd_bench
from salus.bench import hooks as hooks_bench
from salus.bench import machine
from salus.bench import report as report_bench
from salus.bench import sharing as sharing_bench
from salus.bench import switch as switch_bench
from salus.bench import switch_gpu as switch_gpu_bench
from salus.bench.experiment import Settings, Steps
from salus.bench.experiments import find
from salus.cli.console import make_console, progress
from salus.cli.options import parsed
from salus.errors import RequestRejected
from salus.simulate.report import check_can_plot
from salus.units import parse_bytes

app = typer.Typer(
    help="Measure what Salus costs and gains on this machine.", no_args_is_help=True, rich_markup_mode="markdown"
)


@app.callback()
def _bench() -> None:
    """Measure what Salus costs and gains on this machine.

    Example: `salus bench switch --quick`
    """


@app.command()
def switch(
    device: Annotated[str, typer.Option(metavar="host|cuda", help="Where the jobs run.")] = "host",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JSON.")] = None,
    rounds: Annotated[
        int, typer.Option(min=0, help="With how many pairs of new processes throughput is measured; about 6 s each.")
    ] = 60,
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the work, and no training script.")] = False,
) -> None:
    """Measure a boundary, a hand-over from job to job, and the throughput of one job against the bare script.

    On a GPU, the hand-over alone: from the moment one job's GPU is idle to the moment it is another's.

    Example: `salus bench switch --device host --out switch.json`
    """
    if device not in ("host", "cuda"):
        raise RequestRejected(f"--device: {device!r} is not understood; expected host or cuda")
    scale = 10 if quick else 1
    if device == "cuda":
        machine.device_to_run_on(device)
        with progress() as say:
            result = switch_gpu_bench.measure(say, 300 // scale)
        _show(switch_gpu_bench.verdicts(result))
        if out is not None:
            machine.write(out, "switch", {"device": device, **machine.trained_on(device), **result})
        return
    with progress() as say:
        result = switch_bench.measure(
            say,
            boundaries=200_000 // scale,
            hand_overs=2000 // scale,
            kills=20 // scale,
            rounds=0 if quick else rounds,
        )
    _show(switch_bench.verdicts(result))
    if out is not None:
        machine.write(out, "switch", {"device": device, **result})


@app.command()
def hooks(
    device: Annotated[str, typer.Option(metavar="host|cuda", help="Where the job runs.")] = "host",
    rounds: Annotated[int, typer.Option(min=10, help="How often they are put in and taken out.")] = 400,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JSON.")] = None,
) -> None:
    """Measure what Salus adds to an iteration of a job that is alone, within one process.

    Example: `salus bench hooks --device host`
    """
    if device not in ("host", "cuda"):
        raise RequestRejected(f"--device: {device!r} is not understood; expected host or cuda")
    where = "cpu" if device == "host" else machine.device_to_run_on(device)
    with progress() as say:
        result = hooks_bench.measure(say, where, rounds)
    _show(hooks_bench.verdicts(result))
    if out is not None:
        machine.write(out, "hooks", {"device": device, **machine.trained_on(where), **result})


@app.command()
def arena(
    device: Annotated[str, typer.Option(metavar="host|cuda", help="Whose memory.")] = "host",
    size: Annotated[str, typer.Option(metavar="SIZE", help="Of the lane.")] = "16GiB",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JSON.")] = None,
) -> None:
    """Measure the arena: an allocation, making a lane, joining it from another process.

    Example: `salus bench arena --device cuda --size 16GiB`
    """
    if device not in ("host", "cuda"):
        raise RequestRejected(f"--device: {device!r} is not understood; expected host or cuda")
    result = arena_bench.measure(device, parsed("--size", parse_bytes, size))
    _show(arena_bench.verdicts(result))
    if out is not None:
        machine.write(out, "arena", {"device": device, **result})


@app.command()
def crowd(
    jobs: Annotated[int, typer.Option(min=1, max=1000, help="How many are connected at once.")] = 100,
    seconds: Annotated[float, typer.Option(min=1, help="How long they run.")] = 20.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JSON.")] = None,
) -> None:
    """Measure the service with many jobs connected at once: its processor time and memory, and how fast ps is.

    Example: `salus bench crowd --jobs 100`
    """
    with progress() as say:
        say(f"{jobs} jobs at once")
        result = crowd_bench.measure(jobs, seconds)
    _show(crowd_bench.verdicts(result))
    if out is not None:
        machine.write(out, "crowd", result)


@app.command()
def sharing(
    seconds: Annotated[float, typer.Option(min=1, help="How long shares are measured.")] = 8.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JSON.")] = None,
) -> None:
    """Measure who gets how much: fair shares, weights, and a short job behind a long one. On the CPU, with PyTorch.

    Example: `salus bench sharing`
    """
    with progress() as say:
        result = sharing_bench.measure(say, seconds, short_iterations=500)
    _show(sharing_bench.verdicts(result))
    if out is not None:
        machine.write(out, "sharing", result)


Device = Annotated[str, typer.Option(metavar="auto|cuda|cpu", help="Where the jobs run.")]
Scale = Annotated[float, typer.Option(min=0.001, help="How long the jobs are; 1 fits in about eight minutes.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="How many jobs, or models.")]
Capacity = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory that Salus may use, as on a smaller GPU.")]
Out = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JSON, with all raw data.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the figure, as .png, .pdf or .svg.")]


@app.command()
def overhead(
    device: Device = "auto", scale: Scale = 1.0, jobs: Jobs = None, capacity: Capacity = None, out: Out = None,
    plot: Plot = None,
) -> None:  # fmt: skip
    """Measure what Salus costs a job that is alone, for each model of the paper.

    Example: `salus bench overhead --jobs 3 --plot overhead.png`
    """
    _experiment("overhead", device, scale, jobs, capacity, out, plot)


@app.command()
def fairness(
    device: Device = "auto", scale: Scale = 1.0, capacity: Capacity = None, out: Out = None, plot: Plot = None
) -> None:
    """Measure the parts that equal jobs get as they join one after another, and jobs of different weight.

    Example: `salus bench fairness --plot fairness.png`
    """
    _experiment("fairness", device, scale, None, capacity, out, plot)


@app.command()
def jct(
    device: Device = "auto", scale: Scale = 1.0, jobs: Jobs = None, capacity: Capacity = None, out: Out = None,
    plot: Plot = None,
) -> None:  # fmt: skip
    """Measure how long jobs of different lengths take under each policy, one by one, and with plain time-slicing.

    Example: `salus bench jct --jobs 30 --scale 0.5`
    """
    _experiment("jct", device, scale, jobs, capacity, out, plot)


@app.command()
def preemption(
    device: Device = "auto", scale: Scale = 1.0, capacity: Capacity = None, out: Out = None, plot: Plot = None
) -> None:
    """Measure how soon shorter jobs run that arrive while longer ones do, under srtf.

    Example: `salus bench preemption --plot preemption.png`
    """
    _experiment("preemption", device, scale, None, capacity, out, plot)


@app.command()
def pair(
    device: Device = "auto", scale: Scale = 1.0, capacity: Capacity = None, out: Out = None, plot: Plot = None
) -> None:
    """Measure two small jobs side by side.

    Example: `salus bench pair`
    """
    _experiment("pair", device, scale, None, capacity, out, plot)


@app.command()
def memory(
    device: Device = "auto", jobs: Jobs = None, capacity: Capacity = None, out: Out = None, plot: Plot = None
) -> None:
    """Measure what each model needs of the GPU's memory: across iterations, within one, and outside any allocator.

    Example: `salus bench memory --jobs 5 --plot memory.png`
    """
    _experiment("memory", device, 1.0, jobs, capacity, out, plot)


@app.command()
def paging(
    device: Device = "auto", scale: Scale = 1.0, jobs: Jobs = None, capacity: Capacity = None, out: Out = None,
    plot: Plot = None,
) -> None:  # fmt: skip
    """Measure what it costs when the jobs need more memory than the GPU has, 16 GiB unless --capacity says otherwise.

    Example: `salus bench paging --jobs 4 --capacity 8GiB`
    """
    _experiment("paging", device, scale, jobs, capacity, out, plot)


@app.command()
def tuning(
    device: Device = "auto", scale: Scale = 1.0, jobs: Jobs = None, capacity: Capacity = None, out: Out = None,
    plot: Plot = None,
) -> None:  # fmt: skip
    """Measure many small jobs at once, as in a search for hyper-parameters.

    Example: `salus bench tuning --jobs 20`
    """
    _experiment("tuning", device, scale, jobs, capacity, out, plot)


@app.command()
def report(
    results: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the results are.")] = Path(
        "benchmarks/results"
    ),
    out: Annotated[Path, typer.Option(metavar="FILE", help="What to write.")] = Path("docs/evaluation.md"),
) -> None:
    """Write the evaluation as a page, from results in JSON, and draw its figures beside it (with matplotlib).

    Example: `salus bench report --results benchmarks/results --out docs/evaluation.md`
    """
    report_bench.write(results, out)
    typer.echo(f"wrote {out}")
    try:
        check_can_plot(out.with_suffix(".png"))
    except RequestRejected as error:
        typer.echo(f"salus: the figures are not drawn: {error}", err=True)
        return
    for figure in report_bench.draw(results, out.parent / report_bench.FIGURES):
        typer.echo(f"wrote {figure}")


def _experiment(
    name: str, device: str, scale: float, jobs: int | None, capacity: str | None, out: Path | None, plot: Path | None
) -> None:
    if device not in ("auto", "cuda", "cpu"):
        raise RequestRejected(f"--device: {device!r} is not understood; expected auto, cuda or cpu")
    if capacity is not None:
        parsed("--capacity", parse_bytes, capacity)
    if plot is not None:
        check_can_plot(plot)
    module, run, judge, draw = find(name)
    settings = Settings(machine.device_to_run_on(device), scale, jobs, capacity)
    # What is done is kept beside the result, so that an interrupted run can be resumed.
    kept = None if out is None else out.with_name(out.name + ".partial")
    steps = Steps(kept, {"experiment": name, **asdict(settings)})
    if len(steps):
        typer.echo(f"salus: goes on with {kept}, in which {len(steps)} steps are done", err=True)
    with progress() as say:
        result = getattr(module, run)(settings, steps, say)
    _show(getattr(module, judge)(result))
    if plot is not None:
        getattr(module, draw)(result, plot)
        typer.echo(f"wrote {plot}")
    if out is not None:
        where = machine.trained_on(settings.device)
        machine.write(out, name, {**asdict(settings), **where, "result": result, "raw": steps.raw()})
        steps.forget()


def _show(verdicts: list[tuple[str, str, str, bool]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("measured", "value", "target", ""):
        table.add_column(column)
    for what, value, target, met in verdicts:
        table.add_row(what, value, target, "" if not target else "[green]met[/]" if met else "[red]missed[/]")
    make_console().print(table)
