"""`salus set`, `pause` and `resume`: changing jobs while they run."""

from __future__ import annotations

from typing import Annotated

import typer

from salus.cli.select import OVER, AllMine, Jobs, Row, chosen, for_each
from salus.client.start import connect
from salus.core.model import HEAVIEST, LIGHTEST
from salus.errors import RequestRejected
from salus.names import check_job_name
from salus.protocol import messages as msg


def set_(
    jobs: Jobs = None,
    weight: Annotated[
        float | None, typer.Option(help=f"Share of the device under the policy fair, {LIGHTEST:g} to {HEAVIEST:g}.")
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(
            min=-msg.MOST, max=msg.MOST, metavar="N", help="Larger is more urgent, under the policy priority."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="What to call the job from now on.")] = None,
) -> None:
    """Change jobs while they run. It counts from now on: nothing is made up for.

    Example: `salus set 3 --weight 2`

    Example: `salus set sweep-3 sweep-4 --priority -1`
    """
    if weight is None and priority is None and name is None:
        raise RequestRejected("nothing to set; give --weight, --priority or --name")
    if weight is not None and not LIGHTEST <= weight <= HEAVIEST:
        raise RequestRejected(
            f"--weight: {weight} is out of range; expected a number from {LIGHTEST:g} to {HEAVIEST:g}"
        )
    words = chosen(jobs, False)
    if name is not None:
        check_job_name(name)
        if len(words) > 1:
            raise RequestRejected("--name: a name is for one job; give one job")
    for_each(words, lambda row: _ask(row, msg.SetJob(row["id"], name, weight, priority)))


def pause(jobs: Jobs = None, all_mine: AllMine = False) -> None:
    """Pause jobs: each stops at its next boundary until salus resume. Meanwhile others may have its memory.

    Example: `salus pause 3`
    """
    for_each(chosen(jobs, all_mine), lambda row: _ask(row, msg.PauseJob(row["id"])))


def resume(jobs: Jobs = None, all_mine: AllMine = False) -> None:
    """Continue jobs that were paused. With --all, those of your jobs that are.

    Example: `salus resume 3`
    """
    words = chosen(jobs, all_mine)

    def do(row: Row) -> None:
        if not all_mine or row.get("paused_by") is not None:
            _ask(row, msg.ResumeJob(row["id"]))

    for_each(words, do)


def _ask(row: Row, message: msg.Message) -> None:
    if row["state"] in OVER:
        raise RequestRejected(f"job {row['id']} has ended already")
    if row["state"] == "unmanaged":
        raise RequestRejected(f"job {row['id']} goes on without a service, so nothing can be changed about it")
    with connect(start=False) as connection:
        done: msg.Done = connection.request(message)
    typer.echo(done.text)
