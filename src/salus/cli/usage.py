"""`salus usage`: who used how much of the device, by user, day and job."""

from __future__ import annotations

import csv
import json
import re
import sys
import time
from typing import Annotated, Any

import typer
from rich.table import Table

from salus.cli.console import make_console
from salus.client.start import connect
from salus.errors import NoService, RequestRejected
from salus.paths import state_dir
from salus.service.usage import KEYS, day_of, open_book
from salus.units import GIB, HOUR_S, parse_duration

GPU_HOURS, MEMORY_HOURS = "gpu_hours", "memory_gib_hours"
TITLES = {GPU_HOURS: "GPU hours", MEMORY_HOURS: "memory, GiB hours"}


def usage(
    by: Annotated[
        str, typer.Option(metavar="user|day|job", help="What to add up by, or several separated by commas.")
    ] = "user",
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME|DATE", help="From that day on, like 7d or 2026-11-01. Default: all that is kept."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list and nothing else.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print a CSV table and nothing else.")] = False,
) -> None:
    """Show the GPU hours and memory hours of jobs, with those that run now.

    You see your own; root and the user who runs the service see everybody's. GPU hours are the device time of
    `salus ps`: time that several jobs share is divided among them. Memory hours are GiB reserved on the GPU, times
    hours. Days are whole days of the machine's local time.

    Example: `salus usage --by user,day --since 7d`
    """
    if as_json and as_csv:
        raise RequestRejected("--json, --csv: leave one of them out")
    rows = [_in_hours(row) for row in _rows(_keys(by), None if since is None else _first_day(since))]
    if as_json:
        typer.echo(json.dumps(rows))
    elif as_csv:
        _print_csv(rows, _keys(by))
    elif not rows:
        typer.echo("no usage yet" if since is None else f"no usage since {_first_day(since)}")
    else:
        make_console().print(_table(rows))


def _keys(text: str) -> list[str]:
    keys = [part.strip() for part in text.split(",")]
    for key in keys:
        if key not in KEYS:
            raise RequestRejected(f"--by: {key!r:.60} is not understood; expected user, day or job, or several of them")
    return keys


def _first_day(text: str) -> str:
    if re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        try:
            time.strptime(text, "%Y-%m-%d")
        except ValueError:
            raise RequestRejected(f"--since: there is no day {text}; write it like 2026-11-01, or 7d") from None
        return text
    try:
        return day_of(max(0.0, time.time() - parse_duration(text)))
    except RequestRejected:
        raise RequestRejected(f"--since: {text!r:.60} is not understood; write it like 7d or 2026-11-01") from None


def _rows(by: list[str], since: str | None) -> list[dict[str, Any]]:
    """What the service has; where there is none, what the last one of this user has left."""
    try:
        with connect(start=False) as connection:
            return connection.usage(by, since)
    except NoService:
        pass
    with open_book(state_dir()) as book:
        return [] if book is None else book.sums(by, since)


def _in_hours(row: dict[str, Any]) -> dict[str, Any]:
    hours = {GPU_HOURS: row["gpu_time_s"] / HOUR_S, MEMORY_HOURS: row["memory_byte_s"] / GIB / HOUR_S}
    return {**row, **hours}


def _print_csv(rows: list[dict[str, Any]], by: list[str]) -> None:
    columns = list(rows[0]) if rows else [*by, GPU_HOURS, MEMORY_HOURS]
    out = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    out.writeheader()
    out.writerows(rows)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    labels = [column for column in rows[0] if column in (*KEYS, "name", "jobs")]
    for column in (*labels, *TITLES.values()):
        table.add_column(column, justify="right" if column in ("jobs", *TITLES.values()) else "left")
    for row in rows:
        table.add_row(*(str(row[label]) for label in labels), *(_shown(row[column]) for column in TITLES))
    if len(rows) > 1:
        total = [_shown(sum(row[column] for row in rows)) for column in TITLES]
        table.add_row("total", *("" for _ in labels[1:]), *total, style="bold")
    return table


def _shown(hours: float) -> str:
    return f"{hours:,.2f}" if hours >= 1 else f"{hours:.4f}"
