"""`salus ps`: the list of jobs."""

from __future__ import annotations

import fnmatch
import json
from typing import Annotated

import typer

from salus.cli.console import make_console
from salus.cli.jobs_table import COLUMNS, jobs_table
from salus.cli.others import print_others
from salus.cli.select import OVER, Row, mine, rows
from salus.errors import RequestRejected
from salus.protocol.states import STATES


def _complete_columns(incomplete: str) -> list[str]:
    before, comma, word = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in COLUMNS if name.startswith(word)]


def _complete_states(incomplete: str) -> list[str]:
    before, comma, word = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in STATES if name.startswith(word)]


def ps(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list and nothing else.")] = False,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also jobs that have ended.")] = False,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Which columns, separated by commas: {', '.join(COLUMNS)}. Default: those there is room for.",
            autocompletion=_complete_columns,
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            metavar="STATES", help="Only jobs in these states, like running,paused.", autocompletion=_complete_states
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Only jobs that are called so; * stands for anything.")
    ] = None,
    user: Annotated[str | None, typer.Option(metavar="NAME", help="Only jobs of this user.")] = None,
    only_mine: Annotated[bool, typer.Option("--mine", help="Only jobs of yours.")] = False,
    last: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the last N that were started, ended ones too.")
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="[-]COLUMN",
            help="Order by a column; -COLUMN: largest first.",
            autocompletion=_complete_columns,
        ),
    ] = None,
) -> None:
    """List the jobs.

    Example: `salus ps --all`

    Example: `salus ps --mine --state running,paused --columns id,name,elapsed,weight --sort -elapsed`
    """
    wanted = None if columns is None else _parsed_columns(columns)
    states = None if state is None else _parsed_states(state)
    if sort is not None and sort.removeprefix("-") not in COLUMNS:
        raise _unknown_column("--sort", sort.removeprefix("-"))
    # Who asks for ended jobs means them.
    everything = everything or last is not None or (states is not None and not states.isdisjoint(OVER))
    found = rows(everything)
    there = bool(found)
    found = mine(found) if only_mine else found
    found = [
        row
        for row in found
        if (states is None or row["state"] in states)
        and (name is None or fnmatch.fnmatchcase(row["name"], name))
        and (user is None or row["user"] == user)
    ]
    found = found[-last:] if last is not None else found
    if sort is not None:
        found = _sorted(found, sort)
    if as_json:
        typer.echo(json.dumps(found))
    elif not found and there:
        typer.echo("no such jobs")
    elif not found:
        typer.echo("no jobs yet" if everything else "no jobs; salus ps --all lists those that have ended")
    else:
        console = make_console()
        console.print(jobs_table(found, console.width, columns=wanted))
    if not as_json and not only_mine:
        print_others()


def _sorted(found: list[Row], sort: str) -> list[Row]:
    key = COLUMNS[sort.removeprefix("-")].key
    known = [row for row in found if key(row) is not None]
    # What has no value stands at the end, whichever way round.
    return [*sorted(known, key=key, reverse=sort.startswith("-")), *(row for row in found if key(row) is None)]


def _parsed_columns(text: str) -> list[str]:
    names = list(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))
    for name in names:
        if name not in COLUMNS:
            raise _unknown_column("--columns", name)
    if not names:
        raise RequestRejected(f"--columns: it is empty; there are: {', '.join(COLUMNS)}")
    return names


def _unknown_column(option: str, name: str) -> RequestRejected:
    return RequestRejected(f"{option}: there is no column {name!r:.40}; there are: {', '.join(COLUMNS)}")


def _parsed_states(text: str) -> set[str]:
    names = set(filter(None, (part.strip() for part in text.split(","))))
    for name in sorted(names):
        if name not in STATES:
            raise RequestRejected(f"--state: there is no state {name!r:.40}; there are: {', '.join(STATES)}")
    return names
