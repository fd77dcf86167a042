"""`salus top`: the service and its jobs, live in the terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Annotated, Any

import typer
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from salus.cli.console import make_console
from salus.cli.jobs_table import device_name, jobs_table
from salus.cli.options import parsed
from salus.cli.others import others_line
from salus.client.connection import ServiceConnection
from salus.client.start import connect
from salus.errors import RequestRejected, ServiceUnavailable
from salus.protocol import messages as msg
from salus.units import format_bytes, format_duration, parse_duration

GONE = "salus  the service has ended; this goes on when one is started. Ctrl-C ends it."
MARKS = {"running": "●", "ready": "○"}


def top(
    interval: Annotated[
        str, typer.Option(metavar="TIME", help="How often to look, like 500ms; a bare number is seconds.")
    ] = "1s",
    once: Annotated[bool, typer.Option("--once", help="Look twice, an interval apart, print and end.")] = False,
) -> None:
    """Watch the jobs live: who runs now, shares of the device, lanes and memory. Ctrl-C ends it.

    Example: `salus top --interval 500ms`
    """
    pause_s = parsed("--interval", parse_duration, interval)
    if pause_s < 0.05:
        raise RequestRejected("--interval: less than 50ms is not to be read; expected a time like 500ms")
    console = make_console()
    with connect(start=False) as connection:
        before = Look(connection)
        if once or not sys.stdout.isatty():
            time.sleep(pause_s)
            console.print(screen(before, Look(connection), console.width))
            return
    # Ctrl-C is the way out.
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            _watch(live, console, pause_s)
            live.update(Text(GONE), refresh=True)
            time.sleep(pause_s)


def _watch(live: Live, console: Console, pause_s: float) -> None:
    """Shows one service until it ends, or returns at once if there is none."""
    with contextlib.suppress(ServiceUnavailable), connect(start=False) as connection:
        before = Look(connection)
        while True:
            now = Look(connection)
            live.update(screen(before, now, console.width), refresh=True)
            before = now
            time.sleep(pause_s)


class Look:
    """What the service said at one moment."""

    def __init__(self, connection: ServiceConnection) -> None:
        status: msg.Status = connection.request(msg.GetStatus())
        self.status: dict[str, Any] = status.status
        self.jobs = connection.jobs()
        self.at_s = time.monotonic()

    def used_s(self) -> dict[str, float]:
        return {row["id"]: row["gpu_time_s"] for row in self.jobs}

    def used_by_others_s(self) -> dict[str, float]:
        """By device."""
        return {one["device"]: one["others"]["gpu_time_s"] for one in self.status["devices"]}


def screen(before: Look, now: Look, width: int) -> RenderableType:
    status = now.status
    head = Text.assemble(
        ("salus", "bold"),
        f"  policy {status['policy']}, quantum {format_duration(status['quantum_s'])}, ",
        f"{status['jobs']} {'job' if status['jobs'] == 1 else 'jobs'}, {status['queue_length']} waiting for memory",
    )
    memory = Table.grid(padding=(0, 1))
    several = len(status["devices"]) > 1
    for one in status["devices"]:
        used = one["capacity_bytes"] - one["free_bytes"]
        memory.add_row(
            f"memory of {device_name(one)}" if several else "memory",
            Bar(one["capacity_bytes"], 0, used, width=30, color="cyan"),
            f"{format_bytes(used)} of {format_bytes(one['capacity_bytes'])}",
        )
    line = others_line(status)
    others = () if line is None else (Text(), Text(line))
    if not now.jobs:
        return Group(head, memory, *others, Text(), Text("no jobs" if line is None else "no jobs of yours"))
    return Group(head, memory, Text(), _lanes(now), Text(), _jobs(before, now, width), *others)


def _lanes(now: Look) -> Table:
    names = {row["id"]: row["name"] for row in now.jobs}
    table = Table(box=None, pad_edge=False, header_style="bold")
    several = len(now.status["devices"]) > 1
    for column in (*(("gpu",) if several else ()), "lane", "size", "runs now", "jobs"):
        table.add_column(column, no_wrap=column != "jobs")
    for lane in now.status["lanes"]:
        where = (device_name(lane),) if several else ()
        holder = lane["holder"]
        runs = Text("" if holder is None else f"{holder} {names.get(holder, '')}")
        table.add_row(*where, str(lane["lane"]), format_bytes(lane["size_bytes"]), runs, " ".join(lane["jobs"]))
    return table


def _jobs(before: Look, now: Look, width: int) -> Table:
    """Shares are of the time on the job's device since the look before."""
    earlier = before.used_s()
    gained = {row["id"]: max(0.0, row["gpu_time_s"] - earlier.get(row["id"], row["gpu_time_s"])) for row in now.jobs}
    others, others_earlier = now.used_by_others_s(), before.used_by_others_s()
    total = {device: max(0.0, used_s - others_earlier.get(device, used_s)) for device, used_s in others.items()}
    for row in now.jobs:
        total[row["device"]] = total.get(row["device"], 0.0) + gained[row["id"]]
    also = {}
    for row in now.jobs:
        share = gained[row["id"]] / total[row["device"]] if total[row["device"]] else 0.0
        also[row["id"]] = {"": MARKS.get(row["state"], " "), "share": f"{share:.0%}"}
    return jobs_table(now.jobs, width, also)
