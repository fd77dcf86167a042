"""Processes as the kernel shows them: who descends from whom, and signals that reach the process they are meant for.

The number of a process is given to another one some time after its end. So a process is known by its number and the
time at which it began, and a signal goes through a descriptor of the process (a pidfd), never to a bare number.

Standard library only: launchers use it too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

APART = "SALUS_APART"
"""A process that was started with this variable, and all below it, belong to no job that it descends from: a service
that a launcher started, and the launcher of a job that was submitted from within another job."""
STOPPED = "T"
STOPPED_STATES = (STOPPED, "t")
"""By a signal, as of Ctrl-Z, or in a debugger."""
_GONE = ("Z", "X", "x")
"""States of a process that has ended and that its parent has not asked about yet."""


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    began: int
    """In ticks of the kernel's clock."""
    state: str
    """One letter, as in `ps`."""
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.pid})"


def look_at(pid: int) -> Process | None:
    """None: there is no such process, or it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in brackets, may hold anything.
            head, _, tail = file.read().rpartition(b")")
        fields = tail.split()
        state, threads = fields[0].decode(), int(fields[17])
        if state in _GONE and threads <= 1:
            # (Where only its first thread has ended, the others go on.)
            return None
        name = head.partition(b"(")[2].decode(errors="replace")
        return Process(pid, int(fields[1]), int(fields[19]), state, name)
    except (OSError, ValueError, IndexError):
        return None


def everything() -> dict[int, Process]:
    """All processes there are, by number."""
    found = (look_at(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return {process.pid: process for process in found if process is not None}


def is_there(pid: int, began: int) -> bool:
    """Whether the process that began then has not ended."""
    process = look_at(pid)
    return process is not None and process.began == began


def began(pid: int) -> int:
    """When the process began; 0: there is no such process."""
    process = look_at(pid)
    return 0 if process is None else process.began


def below(pid: int) -> list[Process]:
    """All processes that descend from this one, parents before their children."""
    there = everything()
    return _in_order({pid}, there)[1:] if pid in there else []


def of_job(token: str, also: Process | None = None) -> list[Process]:
    """The processes that were started with the token of a job, and all that descend from them; parents first.

    Only those of the user who asks can be seen. `also`: one more process of the job.
    """
    there, mark = everything(), f"SALUS_TOKEN={token}".encode()
    roots = {pid for pid in there if mark in _environment(pid) and not _is_apart(pid)}
    if also is not None and also.pid in there and there[also.pid].began == also.began:
        roots.add(also.pid)
    return _in_order(roots, there)


def send(process: Process, number: int) -> bool:
    """Sends a signal. False: the process has ended. Raises `PermissionError` where it is not ours to end."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        # The descriptor is of whichever process has the number now.
        if not is_there(process.pid, process.began):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def resume(process: Process) -> None:
    """Lets a process go on if it was stopped, as by Ctrl-Z."""
    now = look_at(process.pid)
    if now is not None and now.state == STOPPED:
        send(process, signal.SIGCONT)


def _in_order(roots: set[int], there: Mapping[int, Process]) -> list[Process]:
    """The roots and all that descend from them, without those that are apart."""
    children: dict[int, list[int]] = {}
    for process in there.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: dict[int, Process] = {}
    # A root that descends from another root comes after its parents.
    generation: Iterable[int] = [pid for pid in roots if not _descends(pid, roots, there)]
    while generation:
        following: list[int] = []
        for pid in generation:
            if pid not in found and (pid in roots or not _is_apart(pid)):
                found[pid] = there[pid]
                following += children.get(pid, ())
        generation = following
    return list(found.values())


def _descends(pid: int, roots: set[int], there: Mapping[int, Process]) -> bool:
    seen = {pid}
    while (parent := there[pid].parent) in there and parent not in seen:
        if parent in roots:
            return True
        seen.add(parent)
        pid = parent
    return False


def _environment(pid: int) -> list[bytes]:
    """What the process was started with; nothing where that is another user's business."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _is_apart(pid: int) -> bool:
    return f"{APART}=1".encode() in _environment(pid)
