"""Where commands print."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console

PIPED_WIDTH = 160
SAY_EVERY_S = 10.0


def make_console() -> Console:
    """Stdout. As wide as the terminal; where there is none, wide enough that no table is broken up."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Call it with what is being done. In a terminal that stands in one line; elsewhere a line is said now and then."""
    if sys.stderr.isatty():
        with Console(stderr=True).status("") as status:
            yield status.update
        return
    next_s = 0.0

    def say(text: str) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + SAY_EVERY_S
            print(f"salus: {text}", file=sys.stderr, flush=True)

    yield say
