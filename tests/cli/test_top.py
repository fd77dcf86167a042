"""`salus top` at a terminal, while jobs and services come and go."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.service.harness import Service

LIMIT_S = 60.0


class Screen:
    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self.shown = ""

    def wait_for(self, text: str) -> None:
        """Reads on until the text is shown; what came before it is forgotten."""
        deadline = time.monotonic() + LIMIT_S
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} is not in {self.shown!r}"
            if select.select([self._terminal], [], [], 1.0)[0]:
                self.shown += os.read(self._terminal, 1 << 16).decode(errors="replace")
        self.shown = self.shown.partition(text)[2]

    def press(self, key: bytes) -> None:
        os.write(self._terminal, key)


@contextmanager
def top_at_a_terminal(service: Service) -> Iterator[tuple[Screen, subprocess.Popen[bytes]]]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "salus", "top", "--interval", "100ms"],
        env={**service.environment, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        # The first terminal that the leader of a session opens becomes the session's own.
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
    )
    os.close(theirs)
    try:
        yield Screen(ours), process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_top_goes_on_when_the_last_job_ends_and_when_the_service_does(serve):
    service = serve()
    with top_at_a_terminal(service) as (screen, process):
        screen.wait_for("no jobs")
        job = service.job("--name", "visitor", iterations=100_000, seconds=0.005)
        screen.wait_for("visitor")
        job.terminate()
        screen.wait_for("no jobs")
        service.kill()
        screen.wait_for("the service has ended; this goes on when one is started")
        service.start()
        screen.wait_for("no jobs")
        screen.press(b"\x03")
        screen.wait_for("\x1b[?1049l")  # the terminal shows what it showed before
        assert process.wait(timeout=LIMIT_S) == 0, "Ctrl-C is the way to end it"
        assert "interrupted" not in screen.shown
