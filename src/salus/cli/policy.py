"""`salus policy`: which policies there are, and which one rules."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer
from rich.table import Table

from salus import machine
from salus.cli.config import write
from salus.cli.console import make_console
from salus.cli.options import complete_policy
from salus.client.start import connect
from salus.config.load import load
from salus.config.schema import POLICY
from salus.errors import NoService, RequestRejected, ServiceUnavailable
from salus.paths import socket_path
from salus.plugins import load_policy, policy_classes
from salus.protocol import messages as msg


def policy(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[POLICY]", help="Change to this one, at once.", autocompletion=complete_policy),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Only for the service that runs now; do not write it to the settings.")
    ] = False,
) -> None:
    """Change the policy, or list the policies there are.

    The running service changes at once, and the policy is written to your settings, so that the next service has it
    too. Write a parameter behind the name: `fair:by=memory`, `srtf:fill=off`.

    Example: `salus policy srtf`
    """
    if name is not None:
        load_policy(name)
        typer.echo(_change(name, once))
    elif once:
        raise RequestRejected("--once: name the policy to change to, like salus policy srtf --once")
    else:
        _show()


def _change(name: str, once: bool) -> str:
    try:
        with connect(start=False) as connection:
            done: msg.Done = connection.request(msg.SetPolicy(name))
            changed = done.text
    except NoService:
        if once:
            raise
        changed = "no service runs now"
    if once:
        return changed
    machine_wide = socket_path() == machine.socket_path()
    try:
        written = write(POLICY.keys, name, machine_wide=machine_wide)
    except RequestRejected as error:
        raise RequestRejected(f"{changed}; but the next service will not have it: {error}") from None
    return f"{changed}; the next service has {name} too, by {written.path}{written.but}"


def _show() -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("policy", "what it does", "parameters"):
        table.add_column(column)
    for known, found in sorted(policy_classes().items()):
        options = [f"{o.name}={o.expected}, default {o.default}: {o.help}" for o in found.options]
        table.add_row(known, inspect.cleandoc(found.__doc__ or "").partition("\n")[0], "\n".join(options))
    console = make_console()
    console.print(table)
    console.print()
    try:
        with connect(start=False) as connection:
            status: msg.Status = connection.request(msg.GetStatus())
        console.print(f"the service runs {status.status['policy']}", highlight=False)
    except ServiceUnavailable:
        machine_wide = socket_path() == machine.socket_path()
        settings = load(machine_wide=True, environment={}) if machine_wide else load()
        source = settings.source(POLICY)
        console.print(f"no service runs; the next one has {settings[POLICY]} ({source})", highlight=False)
