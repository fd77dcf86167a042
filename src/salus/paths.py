"""Where the socket and the state live: under the user's own directories, closed to everybody else.

Standard library only: jobs need the socket too.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from salus.errors import RequestRejected


def runtime_dir() -> Path:
    """For the socket: $SALUS_RUNTIME_DIR, else under $XDG_RUNTIME_DIR, else a folder of the user's own in /tmp."""
    given = os.environ.get("SALUS_RUNTIME_DIR")
    if given:
        return Path(given)
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "salus" if base and Path(base).is_dir() else Path(f"/tmp/salus-{os.getuid()}")


def state_dir() -> Path:
    """For the journal, the history and the output of jobs: $SALUS_STATE_DIR, else under $XDG_STATE_HOME."""
    given = os.environ.get("SALUS_STATE_DIR")
    if given:
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "salus"


def socket_path() -> Path:
    given = os.environ.get("SALUS_SOCKET")
    return Path(given) if given else runtime_dir() / "service.sock"


def make_private(folder: Path) -> Path:
    """Makes the folder, mode 0700, and sees to it that it is ours: in /tmp somebody else may have been first."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.getuid():
            raise RequestRejected(
                f"{folder}: belongs to another user; set SALUS_RUNTIME_DIR and SALUS_STATE_DIR elsewhere"
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            folder.chmod(0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise RequestRejected(f"{folder}: cannot be written; set SALUS_RUNTIME_DIR and SALUS_STATE_DIR elsewhere")
    except OSError as error:
        raise RequestRejected(
            f"{folder}: cannot be made ({error.strerror}); set SALUS_STATE_DIR to a folder of yours"
        ) from None
    return folder
