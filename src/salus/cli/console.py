"""Where commands print."""

from __future__ import annotations

import sys

from rich.console import Console

PIPED_WIDTH = 160


def make_console() -> Console:
    """Stdout. As wide as the terminal; where there is none, wide enough that no table is broken up."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
