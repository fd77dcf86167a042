"""A connection to the user's service, which is started if there is none."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from salus import machine
from salus.client.connection import ServiceConnection
from salus.client.environment import HIDES_ALL
from salus.client.say import say
from salus.errors import RequestRejected, ServiceUnavailable
from salus.interpreter import python_command
from salus.paths import lock_path, socket_path, state_dir, take_over
from salus.processes import APART
from salus.protocol.errors import NotLetIn

START_TIMEOUT_S = 10.0


def connect(*, start: bool, timeout_s: float | None = 10.0) -> ServiceConnection:
    """A connection to the user's service. With `start`, one is started if there is none; it ends with its last job."""
    path = socket_path()
    try:
        return ServiceConnection(path, timeout_s)
    except NotLetIn:
        if path != machine.socket_path():
            raise
        machine.turned_away()
        if start:
            say(f"the machine-wide service ({path}) has not let you in; a service of your own is used")
        return connect(start=start, timeout_s=timeout_s)
    except ServiceUnavailable:
        # Another service would take the GPUs that the machine-wide one shares when it is back.
        if not start or path == machine.socket_path():
            raise
    log, service = _start_service(path)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        ended = service.poll() is not None
        try:
            return ServiceConnection(path, timeout_s)
        except ServiceUnavailable:
            if ended and not _another_starts(path):
                raise ServiceUnavailable(f"a service was started and has ended: {_last_line(log)}") from None
            time.sleep(0.02)
    raise ServiceUnavailable(f"a service was started and does not answer; see {log}")


def _another_starts(path: Path) -> bool:
    """Ours has found one that was there before it, and is about to answer."""
    try:
        os.kill(int(lock_path(path).read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1].removeprefix("salus: ") if lines else f"see {log}"


def _start_service(path: Path) -> tuple[Path, subprocess.Popen[bytes]]:
    log = state_dir() / "service.log"
    try:
        take_over(log.parent, "SALUS_STATE_DIR")
        with log.open("ab") as output:
            command = python_command("salus.cli.main", "main", "serve", "--linger")
            # It is for all jobs to come, and not a part of the one that it is started for.
            environment = {**os.environ, "SALUS_SOCKET": str(path), APART: "1"}
            if environment.get("CUDA_VISIBLE_DEVICES") not in HIDES_ALL:
                # What one job may see is not what the service may share.
                environment.pop("CUDA_VISIBLE_DEVICES", None)
            service = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=environment
            )
    except RequestRejected as error:
        raise ServiceUnavailable(str(error)) from None
    except OSError as error:
        raise ServiceUnavailable(
            f"{log}: cannot be written ({error.strerror}); set SALUS_STATE_DIR to a folder of yours"
        ) from None
    return log, service
