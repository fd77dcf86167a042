"""`salus policy`: which policies there are."""

from __future__ import annotations

import inspect

from rich.table import Table

from salus.cli.console import make_console
from salus.plugins import policy_classes


def policy() -> None:
    """List the scheduling policies, with their parameters.

    Write a parameter behind the name: `fair:by=memory`, `srtf:fill=off`.
    Example: `salus policy`
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("policy", "what it does", "parameters"):
        table.add_column(column)
    for name, found in sorted(policy_classes().items()):
        options = [f"{o.name}={o.expected}, default {o.default}: {o.help}" for o in found.options]
        table.add_row(name, inspect.cleandoc(found.__doc__ or "").partition("\n")[0], "\n".join(options))
    make_console().print(table)
