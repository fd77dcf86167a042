"""`salus replay`: does a journal give the same actions again?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from salus.errors import InvariantBroken
from salus.plugins import load_policy
from salus.service import journal


def replay(
    path: Annotated[Path, typer.Argument(metavar="JOURNAL", help="A file of the journal folder.")],
) -> None:
    """Feed the events of a live run to the scheduler again and compare what it orders.

    Example: `salus replay ~/.local/state/salus/journal/20261115-120000-4711.jsonl`
    """
    events, difference = journal.replay(path, load_policy)
    if difference is not None:
        raise InvariantBroken(f"after {events} events: {difference}")
    typer.echo(f"{events} events give the same actions")
