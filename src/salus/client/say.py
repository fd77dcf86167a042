"""The one way in which code in a user's process speaks: a line on stderr, never stdout, never an error."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    # Whatever is wrong with the stream (closed, full, replaced by something odd), it is no reason to fail.
    with contextlib.suppress(Exception):
        # Of a process that was started without one, it is None; to `print` that means stdout.
        if sys.stderr is not None:
            print(f"salus: {' '.join(text.split())}", file=sys.stderr, flush=True)
