"""The jobs of others in `ps` and `top`: how many, and what they use together."""

from __future__ import annotations

import contextlib
from typing import Any

import typer

from salus.client.start import connect
from salus.errors import ServiceUnavailable
from salus.protocol import messages as msg
from salus.units import format_bytes


def others_line(status: dict[str, Any]) -> str | None:
    """None: there are none, or all of them may be seen."""
    others = status.get("others")
    if not others or not others["jobs"]:
        return None
    jobs = f"{others['jobs']} {'job' if others['jobs'] == 1 else 'jobs'}"
    return f"others: {jobs}, {format_bytes(others['memory_bytes'])}, {others['share']:.0%} of the device's time"


def print_others() -> None:
    """Where there is a service, and it has some."""
    with contextlib.suppress(ServiceUnavailable), connect(start=False) as connection:
        status: msg.Status = connection.request(msg.GetStatus())
        line = others_line(status.status)
        if line is not None:
            typer.echo(line)
