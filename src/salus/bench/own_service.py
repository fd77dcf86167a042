"""A service of its own for a benchmark or the demo: in a folder of its own, gone with it; the user's is not touched."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from salus.client.connection import ServiceConnection
from salus.errors import SalusError, ServiceUnavailable
from salus.service.gpu import Nvml, choose

START_TIMEOUT_S = 20.0


class OwnService:
    """With this, a service runs; the jobs started through it end with it at the latest."""

    def __init__(self, *options: str) -> None:
        # Of one GPU: jobs that are to share it must not end up on several.
        gpus = [] if "--gpu" in options or "--device" in options else Nvml().gpus()
        one = choose(gpus, None) if len(gpus) > 1 else None
        self._options = options if one is None else (*options, "--gpu", one.uuid)
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> OwnService:
        _end_with_what_was_started()
        self._folder = tempfile.TemporaryDirectory(prefix="salus-")
        folder = Path(self._folder.name)
        self.state = folder / "state"
        self.socket = folder / "run" / "service.sock"
        self.bare_environment = {key: value for key, value in os.environ.items() if not key.startswith("SALUS_")}
        self.environment = {
            **self.bare_environment,
            "SALUS_RUNTIME_DIR": str(self.socket.parent),
            "SALUS_STATE_DIR": str(self.state),
            # What somebody has set for their work must not change what is measured.
            "SALUS_CONFIG": str(folder / "config.toml"),
            "SALUS_SYSTEM_CONFIG_DIR": str(folder / "etc"),
        }
        self._service = self._start("serve", *self._options)
        try:
            self._wait_until_it_answers()
        except BaseException:
            # Also where we are told to end meanwhile.
            self.__exit__(None, None, None)
            raise
        return self

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.connect().close()
                return
            except ServiceUnavailable:
                if self._service.poll() is not None or time.monotonic() > deadline:
                    self._service.kill()
                    said = self._service.communicate()[1].strip()
                    raise ServiceUnavailable(f"the service did not start: {said or 'it does not answer'}") from None
                time.sleep(0.02)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._started):
            with contextlib.suppress(ProcessLookupError):
                # The whole group. The keeper of a job sees to the rest of it.
                os.killpg(process.pid, signal.SIGTERM if process is self._service else signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            for pipe in (process.stdin, process.stdout, process.stderr):
                # What one that was killed had yet to read does not matter.
                with contextlib.suppress(OSError, ValueError):
                    if pipe is not None:
                        pipe.close()
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        return self._service.pid

    def connect(self) -> ServiceConnection:
        return ServiceConnection(self.socket)

    def run(self, command: Sequence[str], *options: str) -> subprocess.Popen[str]:
        """A job, as `salus run` would start it in a terminal."""
        return self._start("run", *options, "--", *command)

    def who_waits_for_memory(self) -> set[str]:
        """By name."""
        with self.connect() as connection:
            return {row["name"] for row in connection.jobs() if row["position"] is not None}

    def wait_until_registered(self, count: int) -> None:
        """One after the other, so that first come, first served means what it says."""
        deadline = time.monotonic() + START_TIMEOUT_S
        with self.connect() as connection:
            while len(connection.jobs(everything=True)) < count:
                if time.monotonic() > deadline:
                    raise SalusError("a job did not start")
                time.sleep(0.01)

    def journal(self) -> Path:
        """The folder."""
        return self.state / "journal"

    def stop(self) -> None:
        """Ends the service, so that its journal is whole."""
        self._service.terminate()
        self._service.wait(timeout=20)

    def start_bare(self, command: Sequence[str]) -> subprocess.Popen[str]:
        """The command without Salus, with everything else the same."""
        return self._spawn(list(command), self.bare_environment)

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        return self._spawn([sys.executable, "-m", "salus", *arguments], self.environment)

    def _spawn(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process


def _end_with_what_was_started() -> None:
    """Whoever is told to end leaves its `with` blocks, as for Ctrl-C, and no service and no jobs behind."""

    def end(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, end)
