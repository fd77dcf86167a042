"""Where a service is spoken to: its socket, the folder of that, and the lock of whoever serves there.

Nothing that is not ours is deleted, emptied, closed or opened to others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
from pathlib import Path
from typing import TextIO

from salus.errors import RequestRejected
from salus.paths import lock_path, prepare_for_socket
from salus.service.descriptors import refuse_descriptors

BACKLOG = 512


class Address:
    """Ours from when it is made until it is left."""

    def __init__(self, path: Path, *, for_others: bool) -> None:
        self._path, self._for_others = path, for_others
        self._folder_is_ours = prepare_for_socket(path)
        self._lock = _lock(path)
        _check_that_nobody_answers(path)
        if for_others and not self._folder_is_ours:
            _check_that_others_can_reach(path.parent)

    def listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._remove()
        listener.bind(str(self._path))
        if self._for_others:
            # Who may speak is decided by who it is, not by who can reach the socket.
            if self._folder_is_ours:
                self._path.parent.chmod(0o755)
            self._path.chmod(0o666)
        else:
            self._path.chmod(0o600)
        refuse_descriptors(listener)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        return listener

    def close(self, listener: socket.socket) -> None:
        """Nobody is heard any more. It is still ours."""
        listener.close()
        self._remove()

    def leave(self) -> None:
        self._lock.close()

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()


def _check_that_nobody_answers(path: Path) -> None:
    """None of ours does: we have the lock. But it may be another program's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError as error:
            fault = error.strerror
        else:
            fault = "it answers"
    raise RequestRejected(f"{path}: is another program's socket ({fault}); set SALUS_SOCKET to another path")


def _check_that_others_can_reach(folder: Path) -> None:
    if not folder.stat().st_mode & 0o001:
        raise RequestRejected(
            f"--users: others cannot reach {folder}, which holds more than the service's; "
            "set SALUS_SOCKET to a path in a folder for it alone"
        )


def _open_lock(path: Path) -> TextIO:
    """Never what is not ours: it is emptied."""
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+")
    except OSError as error:
        raise RequestRejected(f"{path}: cannot be used ({error.strerror}); set SALUS_SOCKET to another path") from None
    found = os.fstat(file.fileno())
    ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and found.st_size < 32
    if not ours or re.fullmatch(r"\d*\s*", file.read()) is None:
        file.close()
        raise RequestRejected(f"{path}: is no lock of ours; set SALUS_SOCKET to another path")
    return file


def _lock(path: Path) -> TextIO:
    """One service a socket: whoever holds the lock file is it. A dead one's lock is gone with it."""
    file = _open_lock(lock_path(path))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        pid = file.read().strip() or "unknown"
        file.close()
        raise RequestRejected(
            f"a service runs on {path} already (process {pid}); stop it, or set SALUS_SOCKET"
        ) from None
    file.seek(0)
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file
