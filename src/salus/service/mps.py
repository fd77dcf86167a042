"""NVIDIA MPS: a daemon of our own for one GPU, so that jobs in several lanes run side by side, not in slices of time.

It has a pipe directory of its own: nobody else's daemon is touched, and nobody else's jobs join. It outlives a service
that is killed, because its clients would die with it; the next service finds it there. On purpose it ends when the last
of its clients has.

What it costs: a fatal fault of one client (an illegal address) ends all clients of the daemon. That cannot be prevented
from here. It is read off the daemon's log, and whoever dies of it is told. The log names one client as the cause, and
it has been seen to name the wrong one; so nobody is accused.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from salus.errors import RequestRejected
from salus.paths import make_private

CONTROL = "nvidia-cuda-mps-control"
PLACES = ("/usr/bin", "/usr/local/nvidia/bin", "/usr/local/cuda/bin", "/opt/nvidia/bin", "/run/nvidia/driver/usr/bin")
"""Where the driver's tools are when they are not on the PATH."""
ANSWER_S = 5.0
START_S = 10.0
STOP_S = 0.5
LONGEST_SOCKET = 107
"""Characters in the path of a socket."""
_VICTIMS = "have a sticky error set"
_LINE = re.compile(r"^\[[^\]]*\]\s*(.*)$")


class MpsUnavailable(RequestRejected):
    """There is no MPS here, or it does not start."""


def find_control() -> str | None:
    return shutil.which(CONTROL) or shutil.which(CONTROL, path=os.pathsep.join(PLACES))


class Mps:
    def __init__(self, folder: Path, gpu: str) -> None:
        self.pipe, self._logs, self._gpu = folder / "pipe", folder / "log", gpu
        self._control = find_control()
        self._read_bytes = self._seen_bytes = 0

    def start(self) -> None:
        """Starts the daemon, or takes over the one that the service before us left. Raises `MpsUnavailable`."""
        if self._control is None:
            raise MpsUnavailable(f"{CONTROL} is not there; it comes with the driver's tools")
        if len(str(self.pipe / "control_privileged")) > LONGEST_SOCKET:
            raise MpsUnavailable(f"{self.pipe} is too long for a socket; set SALUS_RUNTIME_DIR to a shorter folder")
        for folder in (self.pipe.parent, self.pipe, self._logs):
            make_private(folder, "SALUS_RUNTIME_DIR")
        if not self.is_alive():
            self._start_new()
        # What was in the log before is no news.
        self._read_bytes = self._seen_bytes = self._log_bytes()

    def _start_new(self) -> None:
        assert self._control is not None
        environment = {**self._environment(), "CUDA_VISIBLE_DEVICES": self._gpu}
        try:
            done = subprocess.run(
                [self._control, "-d"], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=START_S, check=False, start_new_session=True,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MpsUnavailable(f"{self._control} cannot be started ({error})") from None
        deadline = time.monotonic() + START_S
        while not self.is_alive():
            if done.returncode or time.monotonic() > deadline:
                said = (done.stdout + done.stderr).strip().splitlines()
                raise MpsUnavailable(f"{CONTROL} does not start: {said[-1] if said else 'it does not answer'}")
            time.sleep(0.05)

    def is_alive(self) -> bool:
        if self._control is None or not self.pipe.is_dir():
            return False
        try:
            done = subprocess.run(
                [self._control], env=self._environment(), input="get_default_active_thread_percentage\n",
                capture_output=True, text=True, timeout=ANSWER_S, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    def stop(self) -> None:
        """When its last client has ended, which nobody waits for."""
        if self._control is None or not self.is_alive():
            return
        with contextlib.suppress(OSError):
            process = subprocess.Popen(
                [self._control], env=self._environment(), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, text=True, start_new_session=True,
            )  # fmt: skip
            assert process.stdin is not None
            process.stdin.write("quit\n")
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)

    def lost(self) -> set[int]:
        """Processes that a fatal fault ended, one of them by its own doing; each is told of once."""
        found: set[int] = set()
        listed = False
        for line in self._new_lines():
            said = match.group(1).strip() if (match := _LINE.match(line)) else ""
            if listed and said.isdigit():
                found.add(int(said))
            else:
                listed = _VICTIMS in said
        return found

    def _new_lines(self) -> list[str]:
        """Once the daemon has written no more since the last look: a list of processes has many lines."""
        before, self._seen_bytes = self._seen_bytes, self._log_bytes()
        if self._seen_bytes < self._read_bytes:
            self._read_bytes = 0  # it was begun anew
        if self._seen_bytes != before or self._seen_bytes == self._read_bytes:
            return []
        with contextlib.suppress(OSError), (self._logs / "server.log").open("rb") as file:
            file.seek(self._read_bytes)
            text = file.read()
            self._read_bytes += len(text)
            return text.decode(errors="replace").splitlines()
        return []

    def _log_bytes(self) -> int:
        with contextlib.suppress(OSError):
            return (self._logs / "server.log").stat().st_size
        return 0

    def _environment(self) -> dict[str, str]:
        # Without what would make the control program speak to another daemon.
        kept = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
        return {**kept, "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_MPS_LOG_DIRECTORY": str(self._logs)}
