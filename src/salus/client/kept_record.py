"""The user's own record of a job in a service of somebody else, as the machine-wide one: kept by the job's launcher.

The launcher runs as the user, so the record is the user's: it is there when the service has ended, and nobody else can
read it. Nothing here fails a job; what cannot be written down is said once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from salus import machine
from salus.client.connection import ServiceConnection
from salus.client.say import say
from salus.errors import RequestRejected
from salus.names import user_name
from salus.paths import take_over
from salus.protocol import messages as msg
from salus.records import kept_path
from salus.registry import Registry


def begin(connection: ServiceConnection, asked: msg.Register, job: msg.Registered) -> KeptRecord | None:
    """None: the service is the user's own, and keeps its records in the same place."""
    if connection.served_by == os.getuid() and connection.path != machine.socket_path():
        return None
    try:
        take_over(kept_path().parent, "SALUS_STATE_DIR")
        record = KeptRecord(kept_path())
        record.keep(asked, job, connection.path)
    except RequestRejected as error:
        say(f"job {job.job_id}: no record of it will be kept: {error}")
        return None
    return record


class KeptRecord:
    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self, asked: msg.Register, job: msg.Registered, socket: Path) -> None:
        registry = Registry(self._path, str(socket))
        try:
            registry.trim()
            registry.keep(job.job_id, job.token, os.getuid(), asked, os.getpid(), user_name(os.getuid()))
        finally:
            registry.close()

    def describe(self, row: dict[str, Any]) -> None:
        """What the service has said of the job."""
        try:
            registry = Registry(self._path, None)
        except RequestRejected as error:
            say(str(error))
            return
        try:
            registry.describe(row)
        finally:
            registry.close()
