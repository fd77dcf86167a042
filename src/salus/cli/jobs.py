"""`salus wait` and `cancel`: the end of jobs."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Annotated

import typer

from salus.cli import streams
from salus.cli.select import OVER, AllMine, Jobs, Row, chosen, find, for_each
from salus.cli.unmanaged import end_unmanaged
from salus.client.launch import as_shell_status
from salus.client.start import connect
from salus.errors import NoService, RequestRejected
from salus.protocol import messages as msg
from salus.records import open_records

POLL_S = 0.1


def wait(jobs: Jobs = None, all_mine: AllMine = False) -> None:
    """Wait until jobs have ended, and end with the status of the first one given that did not end with 0.

    Example: `salus wait 3 && salus logs 3`

    Example: `salus wait --all`
    """
    words = chosen(jobs, all_mine)
    statuses: list[int] = []

    def do(row: Row) -> None:
        exit_code = _await(row["id"])
        status = 1 if exit_code is None else as_shell_status(exit_code)
        if exit_code is None:
            streams.say(f"how job {row['id']} ended is not known")
        elif status and len(words) > 1:
            streams.say(f"job {row['id']} ({row['name']}) ended with status {status}")
        statuses.append(status)

    for_each(words, do)
    raise typer.Exit(next(filter(None, statuses), 0))


def _await(job_id: str) -> int | None:
    """Its exit status, by the service's word or, of one that goes on without, by the launcher's."""
    while (row := find(job_id))["state"] not in OVER:
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
    jobs: Jobs = None,
    all_mine: AllMine = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --all: do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Kill them at once.")] = False,
) -> None:
    """End jobs and all their processes: SIGTERM, and after ten seconds (run --grace) SIGKILL to what is left.

    Example: `salus cancel 3 sweep-4`

    Example: `salus cancel --all --yes`
    """
    words = chosen(jobs, all_mine)
    if all_mine and words and not yes:
        _ask_whether_to_end(words)
    if all_mine and not words:
        typer.echo("no jobs of yours are running")
        return

    def do(row: Row) -> None:
        job_id, state = row["id"], row["state"]
        if state in OVER:
            raise RequestRejected(f"job {job_id} has ended already")
        if state != "unmanaged" or not _end_unmanaged(job_id, force):
            with connect(start=False) as connection:
                done: msg.Done = connection.request(msg.CancelJob(job_id, force))
            typer.echo(done.text)

    for_each(words, do)


def _ask_whether_to_end(job_ids: list[str]) -> None:
    which = f"{len(job_ids)} {'job' if len(job_ids) == 1 else 'jobs'} ({', '.join(job_ids[:10])}"
    which += ", ...)" if len(job_ids) > 10 else ")"
    if not sys.stdin.isatty():
        raise RequestRejected(f"--all: {which} would be ended; add --yes where nobody can be asked")
    typer.confirm(f"End {which}?", abort=True)


def _end_unmanaged(job_id: str, force: bool) -> bool:
    """One that goes on without its service. False: it was another's service."""
    with open_records() as records:
        record = records.find(job_id)
        if record is None or not record.goes_on:
            return False
        records.cancelled(job_id)
    end_unmanaged(record, force)
    typer.echo(f"job {job_id} was {'killed' if force else 'told to end'}")
    return True
