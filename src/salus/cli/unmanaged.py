"""Ending a job that goes on without a service."""

from __future__ import annotations

import contextlib
import signal

from salus import processes
from salus.client.keeper import FORCE
from salus.ending import end_all
from salus.registry import Record


def end_unmanaged(record: Record, force: bool) -> None:
    """Through its launcher, which keeps its processes and writes down how it ended. Without that, by itself."""
    launcher = processes.look_at(record.launcher) if record.launcher else None
    if launcher is not None:
        with contextlib.suppress(PermissionError):
            processes.send(launcher, FORCE if force else signal.SIGTERM)
            processes.resume(launcher)
        return
    worker = processes.look_at(record.worker) if record.worker else None
    end_all(lambda: processes.of_job(record.token, worker), force=force)
