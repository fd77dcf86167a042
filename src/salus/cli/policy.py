"""`salus policy`: which policies there are, and which one rules."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer
from rich.table import Table

from salus.cli.console import make_console
from salus.cli.options import complete_policy
from salus.client.launch import connect
from salus.errors import ServiceUnavailable
from salus.plugins import load_policy, policy_classes
from salus.protocol import messages as msg


def policy(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[POLICY]", help="Change to this one, at once.", autocompletion=complete_policy),
    ] = None,
) -> None:
    """Change the policy of the running service, or list the policies there are.

    Write a parameter behind the name: `fair:by=memory`, `srtf:fill=off`.
    Example: `salus policy srtf`
    """
    if name is not None:
        load_policy(name)
        with connect(start=False) as connection:
            done: msg.Done = connection.request(msg.SetPolicy(name))
        typer.echo(done.text)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("policy", "what it does", "parameters"):
        table.add_column(column)
    for known, found in sorted(policy_classes().items()):
        options = [f"{o.name}={o.expected}, default {o.default}: {o.help}" for o in found.options]
        table.add_row(known, inspect.cleandoc(found.__doc__ or "").partition("\n")[0], "\n".join(options))
    console = make_console()
    console.print(table)
    try:
        with connect(start=False) as connection:
            status: msg.Status = connection.request(msg.GetStatus())
        console.print(f"\nthe service runs {status.status['policy']}", highlight=False)
    except ServiceUnavailable:
        pass
