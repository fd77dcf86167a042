"""Which jobs a command is about: those given by number or name, or all of one's own.

A command that takes several jobs does what it can for each. What fails is a line on stderr, and status 2 at the end.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import typer

from salus.cli import streams
from salus.client.start import connect
from salus.errors import NoService, RequestRejected, SalusError
from salus.names import user_name
from salus.records import open_records

Row = dict[str, Any]
"""A job as `salus ps --json` shows it."""
OVER = ("done", "failed", "cancelled", "lost")
"""States of a job that has ended; nobody knows how a lost one did."""
MOST_CANDIDATES = 8


def complete_job(incomplete: str) -> list[tuple[str, str]]:
    """For the shell: numbers of jobs, and names that one job has."""
    try:
        found = rows(everything=True)
    except SalusError:
        return []  # the shell's prompt is no place for a complaint
    names = [row["name"] for row in found]
    completed = [(row["id"], f"{row['name']}, {row['state']}") for row in found if row["id"].startswith(incomplete)]
    if incomplete:
        completed += [
            (row["name"], f"job {row['id']}, {row['state']}")
            for row in found
            if row["name"].startswith(incomplete) and names.count(row["name"]) == 1
        ]
    return completed


Jobs = Annotated[
    list[str] | None,
    typer.Argument(metavar="JOB...", help="Jobs, by number or name as in salus ps.", autocompletion=complete_job),
]
AllMine = Annotated[bool, typer.Option("--all", help="All jobs of yours that have not ended.")]


def rows(everything: bool) -> list[Row]:
    """What the service says, and what is written down; where there is no service, that alone."""
    found: list[Row] = []
    with contextlib.suppress(NoService), connect(start=False) as connection:
        found = connection.jobs(everything)
    with open_records() as records:
        return records.beside(found, everything)


def find(word: str) -> Row:
    """The job with this number, or else the only one with this name. A job that runs comes before ended ones."""
    for everything in (False, True):
        found = rows(everything)
        by_name = [row for row in found if row["name"] == word]
        for row in found:
            if row["id"] == word:
                return row
        if len(by_name) == 1 and (not everything or not word.isdigit()):
            return by_name[0]
        if by_name:
            raise RequestRejected(_ambiguous(word, by_name))
    raise RequestRejected(f"there is no job {word}; salus ps --all lists those there are")


def mine(found: Iterable[Row]) -> list[Row]:
    me = user_name(os.getuid())
    return [row for row in found if row["user"] == me]


def chosen(words: Sequence[str] | None, all_mine: bool) -> list[str]:
    """What the user named, each job once; with --all the numbers of the user's own jobs that have not ended."""
    if all_mine and words:
        raise RequestRejected("give jobs or --all, not both")
    if all_mine:
        return [row["id"] for row in mine(rows(everything=False))]
    if not words:
        raise RequestRejected("which job? give its number or its name, several of them, or --all")
    return list(dict.fromkeys(words))


def for_each(words: Sequence[str], do: Callable[[Row], None]) -> None:
    """Does it to every job. What cannot be done to one of several does not keep the others from it."""
    if len(words) == 1:
        do(find(words[0]))
        return
    failed = False
    done: set[str] = set()
    for word in words:
        try:
            row = find(word)
            if row["id"] not in done:
                done.add(row["id"])
                do(row)
        except SalusError as error:
            streams.say(str(error))
            failed = True
    if failed:
        raise typer.Exit(2)


def _ambiguous(name: str, found: Sequence[Row]) -> str:
    shown = ", ".join(f"{row['id']} ({row['state']})" for row in found[-MOST_CANDIDATES:])
    more = f"{len(found) - MOST_CANDIDATES} earlier ones and " if len(found) > MOST_CANDIDATES else ""
    return f"several jobs are called {name}: {more}{shown}; give the number of the one you mean"
