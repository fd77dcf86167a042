"""What is known of a user's jobs without a service: where it is written down, and how that is read together.

There are up to three lists (`salus.registry`):

- the user's own (`jobs.sqlite` in the state folder): jobs of the services that the user has run;
- the kept one (`kept-HOST.sqlite` there): jobs that the user has run in services of others, as the machine-wide one.
  Each launcher writes its job there, as the user, so that nobody else can read it and no service has to be asked;
- the machine-wide service's, for an administrator who may read it.

No id is in two of them (`registry.Numbers`), but that a service which was stopped in the middle of a job does not know
how the job ended, and the kept list does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from salus import machine
from salus.paths import own_socket_path, socket_path, state_dir
from salus.registry import FILE, Record, Registry, usable


class Records:
    """The lists as if they were one."""

    def __init__(self, lists: Sequence[Registry]) -> None:
        self._lists = lists

    def all(self) -> list[Record]:
        found: dict[str, Record] = {}
        for one in self._lists:
            with usable(one.path):
                for record in one.all():
                    known = found.get(record.row["id"])
                    if known is None or known.row["finished_at"] is None:
                        found[record.row["id"]] = record
        return sorted(found.values(), key=lambda record: int(record.row["id"]))

    def find(self, job_id: str) -> Record | None:
        return next((record for record in self.all() if record.row["id"] == job_id), None)

    def cancelled(self, job_id: str) -> None:
        for one in self._lists:
            one.cancelled(job_id)

    def finish(
        self, job_id: str, token: str, exit_code: int, why: str = "", counts: Mapping[str, float] | None = None
    ) -> None:
        """From a launcher: its job has ended, and no service has heard of it. `counts`: what it did, if known."""
        for one in self._lists:
            one.finish(job_id, token, exit_code, why, counts)

    def beside(self, rows: list[dict[str, Any]], everything: bool) -> list[dict[str, Any]]:
        """Rows of a service, together with what it does not know: jobs of other services, and ends of its own ones."""
        records = {record.row["id"]: record for record in self.all()}
        together = {job_id: one.row for job_id, one in records.items() if everything or one.goes_on}
        for row in rows:
            record = records.get(row["id"])
            if row["state"] in ("lost", "unmanaged") and record is not None and record.row["exit_code"] is not None:
                continue  # the service was stopped before the job ended
            together[row["id"]] = row
        return sorted(together.values(), key=lambda row: int(row["id"]))


def kept_path() -> Path:
    """Of one machine: another one, which has the same home, gives out the same numbers."""
    return state_dir() / f"kept-{os.uname().nodename}.sqlite"


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return False  # the folder is another user's, and so is what lies in it


@contextlib.contextmanager
def open_records() -> Iterator[Records]:
    """Everything that this user may read. Empty where nothing has run yet."""
    used = socket_path()
    places: list[tuple[Path, Path | None]] = [
        (state_dir() / FILE, own_socket_path() if used == machine.socket_path() else used),
        (kept_path(), None),
    ]
    of_machine = machine.state_dir() / FILE
    if "SALUS_SOCKET" not in os.environ and machine.may_be_used() and os.access(of_machine, os.R_OK | os.W_OK):
        places.append((of_machine, machine.socket_path()))
    with contextlib.ExitStack() as stack:
        lists = []
        for path, socket in places:
            if _is_there(path):
                lists.append(Registry(path, None if socket is None else str(socket)))
                stack.callback(lists[-1].close)
        yield Records(lists)
