"""`salus clean`: makes room on the disk."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from typing import Annotated

import typer

from salus.cli.options import parsed
from salus.config import schema
from salus.config.load import Settings, load
from salus.errors import RequestRejected
from salus.paths import state_dir
from salus.service.storage import SMALLEST_BYTES, Limits, Tidied, tidy_files, tidy_records
from salus.units import format_bytes, parse_bytes, parse_duration

NAMES = {
    "journal": ("the journal", "file"),
    "output": ("output of ended jobs", "file"),
    "records": ("records of ended jobs", "job"),
    "history": ("what commands used before", "run"),
    "usage": ("who used how much", "row"),
}


def clean(
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Remove what is older than this, like 30d; 0: all of it. Default: as the service does."
        ),
    ] = None,
    keep_journal: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Keep at most this much of the journal, like 64MiB.")
    ] = None,
    keep_output: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Keep at most this much output of jobs that have ended.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
) -> None:
    """Remove what is old from the state folder: journal, output, records and history, the oldest first.

    A service does this by itself, within the limits of salus serve. What is in use stays: the output of a job that
    runs, the part of the journal that is being written.

    Example: `salus clean --dry-run --older-than 30d`
    """
    limits = limits_of(load())
    if older_than is not None:
        limits = replace(limits, keep_s=parsed("--older-than", parse_duration, older_than))
    if keep_journal is not None:
        limits = replace(limits, journal_bytes=parsed("--keep-journal", parse_bytes, keep_journal))
    if keep_output is not None:
        limits = replace(limits, output_bytes=parsed("--keep-output", parse_bytes, keep_output))
    state = state_dir()
    try:
        found = [*tidy_files(state, limits, dry_run=dry_run), *tidy_records(state, limits, dry_run=dry_run)]
    except OSError as error:
        raise RequestRejected(f"{error.filename or state}: cannot be cleaned ({error.strerror})") from None
    except sqlite3.Error as error:
        raise RequestRejected(f"{state}: the records cannot be cleaned ({error}); try again") from None
    for tidied in found:
        typer.echo(_told(tidied, dry_run))
        for note in tidied.notes:
            typer.echo(f"salus: {note}", err=True)
    # What was in a database stays in its file, for what comes next.
    freed = format_bytes(sum(one.removed_bytes for one in found if one.kind in ("journal", "output")))
    typer.echo(f"{'would free' if dry_run else 'freed'} {freed} in {state}")


def limits_of(settings: Settings) -> Limits:
    for setting in (schema.JOURNAL_SIZE, schema.OUTPUT_SIZE):
        if settings[setting] < SMALLEST_BYTES:
            raise RequestRejected(f"{settings.label(setting)}: write at least {format_bytes(SMALLEST_BYTES)}")
    return Limits(settings[schema.JOURNAL_SIZE], settings[schema.OUTPUT_SIZE], settings[schema.KEEP_FOR] or None)


def _told(tidied: Tidied, dry_run: bool) -> str:
    name, noun = NAMES[tidied.kind]
    would = "would be " if dry_run else ""
    parts = []
    if tidied.compressed:
        parts.append(f"{_count(tidied.compressed, noun)} {would}compressed")
    if tidied.removed:
        parts.append(f"{_count(tidied.removed, noun)} {would}removed ({format_bytes(tidied.removed_bytes)})")
    parts.append(f"{_count(tidied.kept, noun)} {'stays' if tidied.kept == 1 else 'stay'}")
    size = f" ({format_bytes(tidied.kept_bytes)})" if tidied.kept else ""
    return f"{name}: {', '.join(parts)}{size}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
