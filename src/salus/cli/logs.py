"""`salus logs`: what submitted jobs have written."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from salus.cli.select import OVER, AllMine, Jobs, Row, chosen, find, for_each, rows
from salus.errors import RequestRejected

POLL_S = 0.1
PIECE_BYTES = 1 << 16


def logs(
    jobs: Jobs = None,
    all_mine: AllMine = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the jobs have ended.")] = False,
) -> None:
    """Print what submitted jobs have written. Of several, each part comes under a line that says whose it is.

    Example: `salus logs -f 3`

    Example: `salus logs sweep-1 sweep-2`
    """
    words = chosen(jobs, all_mine)
    printer = _Printer(titles=len(words) > 1)
    followed: list[tuple[Row, BinaryIO]] = []

    def begin(row: Row) -> None:
        file = output_of(row)
        if follow:
            followed.append((row, file))
            return
        with file:
            printer.print_rest(row, file)

    try:
        for_each(words, begin)
    finally:
        _follow(followed, printer)


def output_of(row: Row) -> BinaryIO:
    """What a submitted job has written so far."""
    job_id, log = row["id"], row["log"]
    if log is None:
        raise RequestRejected(f"job {job_id} writes to the terminal it was started in; only submitted jobs have logs")
    try:
        return Path(log).open("rb")
    except FileNotFoundError:
        raise RequestRejected(f"{log}: the output of job {job_id} is gone") from None
    except OSError as error:
        owner = f", which is {row['user']}'s" if row["user"] else ""
        raise RequestRejected(
            f"{log}: the output of job {job_id}{owner}, cannot be read here ({error.strerror}); ask its owner for it"
        ) from None


def _follow(followed: list[tuple[Row, BinaryIO]], printer: _Printer) -> None:
    while followed:
        # First who has ended, then what was written: so nothing is missed that a job wrote last.
        over = _ended([row for row, _ in followed])
        wrote = [printer.print_rest(row, file) for row, file in followed]
        for row, file in followed:
            if row["id"] in over:
                file.close()
        followed = [(row, file) for row, file in followed if row["id"] not in over]
        if followed and not any(wrote):
            time.sleep(POLL_S)


def _ended(asked: list[Row]) -> set[str]:
    running = {row["id"] for row in rows(everything=False)}
    return {row["id"] for row in asked if row["id"] not in running and find(row["id"])["state"] in OVER}


class _Printer:
    def __init__(self, *, titles: bool) -> None:
        self._titles = titles
        self._last = ""

    def print_rest(self, row: Row, file: BinaryIO) -> bool:
        """Prints what there is; whether there was anything."""
        wrote = False
        while piece := file.read(PIECE_BYTES):
            wrote = True
            if self._titles and self._last != row["id"]:
                before = "\n" if self._last else ""
                typer.echo(f"{before}==> job {row['id']} ({row['name']}) <==")
                self._last = row["id"]
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
        return wrote
