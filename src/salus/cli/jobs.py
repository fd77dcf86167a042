"""`salus ps`, `logs`, `wait` and `cancel`: looking at jobs and ending them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from salus.cli.console import make_console
from salus.client.connection import ServiceConnection
from salus.client.launch import as_shell_status, connect
from salus.errors import RequestRejected, SalusError
from salus.protocol import messages as msg
from salus.units import format_bytes, format_duration


def _complete_job() -> list[tuple[str, str]]:
    try:
        with connect(start=False) as connection:
            return [(row["id"], row["name"]) for row in connection.jobs(everything=True)]
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
    with connect(start=False) as connection:
        rows = connection.jobs(everything)
    if as_json:
        typer.echo(json.dumps(rows))
    else:
        make_console().print(jobs_table(rows))


def device_name(row: dict[str, Any]) -> str:
    return str(row["device"]) if row["gpu"] is None else str(row["gpu"])


def why_it_waits(row: dict[str, Any]) -> Text:
    """With its place in the queue, where it waits for memory."""
    place = "" if row["position"] is None else f"place {row['position']}: "
    return Text(place + (row["wait_reason"] or ""))


def jobs_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    # Which device, only where that is a question.
    several = len({row["device"] for row in rows}) > 1
    for column in ("id", "name", "user", "state", *(("gpu",) if several else ()), "lane"):
        table.add_column(column, no_wrap=True)
    for column in ("iterations", "device time", "persistent", "ephemeral"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("why it waits")
    for row in rows:
        ended = f" ({row['exit_code']})" if row["finished_at"] is not None and row["exit_code"] else ""
        table.add_row(
            row["id"],
            Text(row["name"]),  # not a string: what looks like markup in a name is none
            row["user"],
            row["state"] + ended,
            *((device_name(row),) if several else ()),
            "" if row["lane"] is None else str(row["lane"]),
            f"{row['iterations']:,}",
            format_duration(row["gpu_time_s"]),
            format_bytes(row["persistent_bytes"]),
            format_bytes(row["ephemeral_bytes"]),
            why_it_waits(row),
        )
    return table


def logs(
    job: JobId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
) -> None:
    """Print what a submitted job has written.

    Example: `salus logs -f 3`
    """
    with connect(start=False) as connection:
        path = _log_of(_find(connection, job))
        with path.open("rb") as file:
            while True:
                piece = file.read(1 << 16)
                if piece:
                    sys.stdout.buffer.write(piece)
                    sys.stdout.buffer.flush()
                elif not follow or _find(connection, job)["finished_at"] is not None:
                    rest = file.read()
                    sys.stdout.buffer.write(rest)
                    sys.stdout.buffer.flush()
                    return
                else:
                    time.sleep(0.1)


def wait(job: JobId) -> None:
    """Wait for a job, and end with its status.

    Example: `salus wait 3 && salus logs 3`
    """
    with connect(start=False) as connection:
        connection.wait_for_ever()
        ended: msg.Ended = connection.request(msg.AwaitJob(job))
    raise typer.Exit(1 if ended.exit_code is None else as_shell_status(ended.exit_code))


def cancel(
    job: JobId, force: Annotated[bool, typer.Option("--force", help="Kill it rather than ask it to end.")] = False
) -> None:
    """End a job.

    Example: `salus cancel 3`
    """
    with connect(start=False) as connection:
        done: msg.Done = connection.request(msg.CancelJob(job, force))
    typer.echo(done.text)


def _find(connection: ServiceConnection, job_id: str) -> dict[str, Any]:
    for row in connection.jobs(everything=True):
        if row["id"] == job_id:
            return row
    raise RequestRejected(f"there is no job {job_id}; salus ps --all lists those there are")


def _log_of(row: dict[str, Any]) -> Path:
    if row["log"] is None:
        raise RequestRejected(
            f"job {row['id']} writes to the terminal it was started in; only submitted ones have logs"
        )
    path = Path(row["log"])
    if not path.exists():
        raise RequestRejected(f"{path}: the output of job {row['id']} is gone")
    return path
