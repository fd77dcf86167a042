"""`salus bench`: measure what Salus costs and gains on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from salus.bench import arena as arena_bench
from salus.bench import crowd as crowd_bench
from salus.bench import machine
from salus.bench import sharing as sharing_bench
from salus.bench import switch as switch_bench
from salus.cli.console import make_console
from salus.cli.options import parsed
from salus.errors import RequestRejected
from salus.units import parse_bytes

app = typer.Typer(
    help="Measure what Salus costs and gains on this machine.", no_args_is_help=True, rich_markup_mode="markdown"
)


@app.callback()
def _bench() -> None:
    pass


@app.command()
def switch(
    device: Annotated[str, typer.Option(metavar="host", help="Where the jobs run.")] = "host",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JSON.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the work, and no training script.")] = False,
) -> None:
    """Measure a boundary, a hand-over from job to job, and the throughput of one job against the bare script.

    Example: `salus bench switch --device host --out switch.json`
    """
    if device != "host":
        raise RequestRejected(f"--device: {device!r} is not understood; expected host")
    scale = 10 if quick else 1
    with Console(stderr=True).status("") as status:
        result = switch_bench.measure(
            lambda text: status.update(text),
            boundaries=200_000 // scale,
            hand_overs=2000 // scale,
            kills=20 // scale,
            rounds=0 if quick else 9,
        )
    _show(switch_bench.verdicts(result))
    if out is not None:
        machine.write(out, "switch", {"device": device, **result})


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
    with Console(stderr=True).status(f"{jobs} jobs at once"):
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
    with Console(stderr=True).status("") as status:
        result = sharing_bench.measure(lambda text: status.update(text), seconds, short_iterations=500)
    _show(sharing_bench.verdicts(result))
    if out is not None:
        machine.write(out, "sharing", result)


def _show(verdicts: list[tuple[str, str, str, bool]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("measured", "value", "target", ""):
        table.add_column(column)
    for what, value, target, met in verdicts:
        table.add_row(what, value, target, "" if not target else "[green]met[/]" if met else "[red]missed[/]")
    make_console().print(table)
