"""`salus replay`: does a journal give the same actions again?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from salus.errors import InvariantBroken
from salus.paths import state_dir
from salus.plugins import load_policy
from salus.service.replay import Replayed
from salus.service.replay import replay as replay_all


def replay(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[JOURNAL]...",
            help="Files of the journal folder, compressed or not, or a folder of them. Default: all there are.",
        ),
    ] = None,
) -> None:
    """Feed the events of live runs to the scheduler again and compare what it orders.

    Any file can be replayed by itself: each begins with what the scheduler knew. For each run of the service it is said
    from when to when its files cover it.

    Example: `salus replay`

    Example: `salus replay ~/.local/state/salus/journal/20261115-120000-4711.0007.jsonl.gz`
    """
    differences = []
    for found in replay_all(paths or [state_dir() / "journal"], load_policy):
        for note in found.notes:
            typer.echo(f"salus: {note}", err=True)
        if found.difference is None:
            typer.echo(f"{found.run}: {found.events} events{_when(found)} give the same actions")
        else:
            differences.append(f"after {found.events} events: {found.difference}")
    if differences:
        raise InvariantBroken("; ".join(differences))


def _when(found: Replayed) -> str:
    if found.since is None:
        return ""
    until = found.since if found.until is None else found.until
    since_text, until_text = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) for at in (found.since, until))
    if since_text[:10] == until_text[:10]:
        until_text = until_text[11:]
    return f" from {since_text} to {until_text}"
