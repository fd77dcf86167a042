"""`salus ps`, `logs`, `wait` and `cancel`: looking at jobs and ending them."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from salus.cli.console import make_console
from salus.cli.jobs_table import jobs_table
from salus.cli.unmanaged import end_unmanaged
from salus.client.launch import as_shell_status
from salus.client.start import connect
from salus.errors import NoService, RequestRejected, SalusError
from salus.paths import socket_path, state_dir
from salus.protocol import messages as msg
from salus.registry import open_registry

POLL_S = 0.1
OVER = ("done", "failed", "cancelled", "lost")
"""States of a job that has ended; how, nobody knows of the last."""


def _complete_job() -> list[tuple[str, str]]:
    try:
        return [(row["id"], row["name"]) for row in _rows(everything=True)]
    except SalusError:
        return []  # the shell's prompt is no place for a complaint


JobId = Annotated[
    str, typer.Argument(metavar="JOB", help="The number that salus ps shows.", autocompletion=_complete_job)
]


def ps(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list and nothing else.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Also jobs that have ended.")] = False,
) -> None:
    """List the jobs.

    Example: `salus ps --all`
    """
    rows = _rows(everything)
    if as_json:
        typer.echo(json.dumps(rows))
    elif not rows:
        typer.echo("no jobs yet" if everything else "no jobs; salus ps --all lists those that have ended")
    else:
        console = make_console()
        console.print(jobs_table(rows, console.width))


def logs(
    job: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
) -> None:
    """Print what a submitted job has written.

    Example: `salus logs -f 3`
    """
    with _output_of(_find(job)) as file:
        while True:
            piece = file.read(1 << 16)
            if piece:
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()
            elif not follow or _find(job)["state"] in OVER:
                rest = file.read()
                sys.stdout.buffer.write(rest)
                sys.stdout.buffer.flush()
                return
            else:
                time.sleep(POLL_S)


def wait(job: JobId) -> None:
    """Wait for a job, and end with its status.

    Example: `salus wait 3 && salus logs 3`
    """
    exit_code = _await(job)
    if exit_code is None:
        typer.echo(f"salus: how job {job} ended is not known", err=True)
        raise typer.Exit(1)
    raise typer.Exit(as_shell_status(exit_code))


def _await(job_id: str) -> int | None:
    """Its exit status, by the service's word or, of one that goes on without, by the launcher's."""
    while (row := _find(job_id))["state"] not in OVER:
        if row["state"] == "unmanaged":
            time.sleep(POLL_S)
            continue
        # A service that ends meanwhile leaves the job to itself.
        with contextlib.suppress(NoService), connect(start=False) as connection:
            connection.wait_for_ever()
            ended: msg.Ended = connection.request(msg.AwaitJob(job_id))
            return ended.exit_code
    exit_code: int | None = row["exit_code"]
    return exit_code


def cancel(
    job: JobId,
    force: Annotated[bool, typer.Option("--force", help="Kill it at once.")] = False,
) -> None:
    """End a job and all its processes: SIGTERM, and after ten seconds (run --grace) SIGKILL to what is left.

    Example: `salus cancel 3`
    """
    state = _find(job)["state"]
    if state in OVER:
        raise RequestRejected(f"job {job} has ended already")
    if state != "unmanaged" or not _end_unmanaged(job, force):
        with connect(start=False) as connection:
            done: msg.Done = connection.request(msg.CancelJob(job, force))
        typer.echo(done.text)


def _end_unmanaged(job_id: str, force: bool) -> bool:
    """One that goes on without its service. False: it was another's service."""
    with open_registry(state_dir(), socket_path()) as registry:
        record = None if registry is None else registry.find(job_id)
    if record is None or not record.goes_on:
        return False
    with open_registry(state_dir(), socket_path()) as registry:
        if registry is not None:
            registry.cancelled(job_id)
    end_unmanaged(record, force)
    typer.echo(f"job {job_id} was {'killed' if force else 'told to end'}")
    return True


def _rows(everything: bool) -> list[dict[str, Any]]:
    """What the service says; where there is none, what it has left."""
    try:
        with connect(start=False) as connection:
            return connection.jobs(everything)
    except NoService:
        pass
    with open_registry(state_dir(), socket_path()) as registry:
        records = [] if registry is None else registry.all()
    return [record.row for record in records if everything or record.goes_on]


def _find(job_id: str) -> dict[str, Any]:
    # Those that run first: they are fewer.
    for everything in (False, True):
        for row in _rows(everything):
            if row["id"] == job_id:
                return row
    raise RequestRejected(f"there is no job {job_id}; salus ps --all lists those there are")


def _output_of(row: dict[str, Any]) -> BinaryIO:
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
