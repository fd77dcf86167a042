"""Where the socket and the state live: under the user's own directories, closed to everybody else.

Standard library only: jobs need the socket too.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from salus import machine
from salus.errors import RequestRejected

LONGEST_SOCKET_BYTES = 107
OURS = ("service", "mps", "journal", "output", "history.sqlite", "jobs.sqlite", "usage.sqlite", "kept-")
"""How everything begins that is in our folders. A service for several users opens the one of its socket."""


def runtime_dir() -> Path:
    """For the socket: $SALUS_RUNTIME_DIR, else under $XDG_RUNTIME_DIR, else a folder of the user's own in /tmp."""
    given = os.environ.get("SALUS_RUNTIME_DIR")
    if given:
        return Path(given).absolute()
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "salus" if base and Path(base).is_dir() else Path(f"/tmp/salus-{os.getuid()}")


def state_dir() -> Path:
    """For the journal, the history and the output of jobs: $SALUS_STATE_DIR, else under $XDG_STATE_HOME."""
    given = os.environ.get("SALUS_STATE_DIR")
    if given:
        return Path(given).absolute()
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "salus"


def socket_path() -> Path:
    """Of the service that commands use: $SALUS_SOCKET, else the machine-wide one if it is there, else the own one."""
    given = os.environ.get("SALUS_SOCKET")
    if given:
        return Path(given).absolute()
    return machine.socket_path() if machine.is_used() else own_socket_path()


def own_socket_path() -> Path:
    return runtime_dir() / "service.sock"


def config_path() -> Path:
    """The user's settings: $SALUS_CONFIG, else under $XDG_CONFIG_HOME."""
    given = os.environ.get("SALUS_CONFIG")
    if given:
        return Path(given).absolute()
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "salus" / "config.toml"


def machine_config_path() -> Path:
    return machine.config_dir() / "config.toml"


def lock_path(socket: Path) -> Path:
    """Who holds a lock on this file is the service of that socket."""
    return socket.with_name(f"{socket.name}.lock")


def check_socket(path: Path) -> None:
    """Before anything is put there, or asked."""
    if len(os.fsencode(path)) > LONGEST_SOCKET_BYTES:
        raise RequestRejected(f"{path}: is too long for a socket; set SALUS_SOCKET to a shorter path")
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return  # whoever goes on says what is wrong with it
    if not is_socket:
        raise RequestRejected(f"{path}: is there and is no socket; set SALUS_SOCKET to another path")


def take_over(folder: Path, setting: str) -> Path:
    """As below, for one that a person may have named.

    If it is there, open to others, and they can have a use for it, it is left as it is and not used.
    """
    if _is_open(folder) and not _holds_only_ours(folder):
        raise RequestRejected(
            f"{folder}: is open to other users; close it (chmod 700 {folder}), or set {setting} to a folder of yours"
        )
    return make_private(folder, setting)


def _is_open(folder: Path) -> bool:
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and bool(stat.S_IMODE(found.st_mode) & 0o077)


def _holds_only_ours(folder: Path) -> bool:
    try:
        return all(entry.name.startswith(OURS) for entry in folder.iterdir())
    except OSError:
        return False


def make_private(folder: Path, setting: str) -> Path:
    """Makes the folder, mode 0700, and sees to it that it is ours: in /tmp somebody else may have been first.

    `setting`: the variable that names another.
    """
    advice = f"set {setting} to a folder of yours"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if {found.st_uid, folder.lstat().st_uid} != {os.getuid()}:
            raise RequestRejected(f"{folder}: belongs to another user; {advice}")
        if stat.S_IMODE(found.st_mode) & 0o077:
            folder.chmod(0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise RequestRejected(f"{folder}: cannot be written; {advice}")
    except OSError as error:
        raise RequestRejected(f"{folder}: cannot be made ({error.strerror}); {advice}") from None
    return folder


def prepare_for_socket(path: Path) -> bool:
    """The folder that the socket goes to. Whether nobody has anything else in it."""
    check_socket(path)
    if path == machine.socket_path():
        machine.prepare_runtime_dir()
    elif path.parent == runtime_dir():
        take_over(path.parent, "SALUS_RUNTIME_DIR")
    elif not path.parent.exists():
        make_private(path.parent, "SALUS_SOCKET")
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        raise RequestRejected(f"{path.parent}: cannot be written; set SALUS_SOCKET to a path in a folder of yours")
    return path.parent.stat().st_uid == os.getuid() and _holds_only_ours(path.parent)
