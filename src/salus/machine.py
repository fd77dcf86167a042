"""The machine-wide service: where it is, whether it is there, and who may be behind a socket.

Standard library only: jobs look at the socket too.

A service learns a user's commands and may end the user's jobs, so no command speaks to a stranger's. Behind a socket
may be root, the user, or the owner of the socket's folder, where that owner got the folder from root (the dedicated
user of the machine-wide service) or was named by the user (SALUS_SOCKET).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from salus.errors import RequestRejected

ROOT = 0
OPEN_TO_OTHERS = 0o022
_SERVICES = ("auto", "own", "system")
_turned_away = False
"""The machine-wide service has not let this user in; the commands of this process use the user's own."""


def runtime_dir() -> Path:
    """For the socket. The variables are for tests and packagers; who owns what is checked all the same."""
    return Path(os.environ.get("SALUS_SYSTEM_RUNTIME_DIR") or "/run/salus").absolute()


def state_dir() -> Path:
    return Path(os.environ.get("SALUS_SYSTEM_STATE_DIR") or "/var/lib/salus").absolute()


def config_dir() -> Path:
    return Path(os.environ.get("SALUS_SYSTEM_CONFIG_DIR") or "/etc/salus").absolute()


def socket_path() -> Path:
    return runtime_dir() / "service.sock"


def mark() -> Path:
    """A file that says: a machine-wide service is installed here. It may be stopped for the moment."""
    return config_dir() / "machine-wide"


def is_installed() -> bool:
    return mark().exists()


def may_be_used() -> bool:
    """Whether the commands of this user go to the machine-wide service where it is there."""
    wanted = os.environ.get("SALUS_SERVICE") or "auto"
    if wanted not in _SERVICES:
        raise RequestRejected(f"SALUS_SERVICE: {wanted!r:.60} is not understood; expected auto, own or system")
    if wanted == "auto":
        return not os.environ.get("SALUS_RUNTIME_DIR") and not _turned_away
    return wanted == "system"


def is_used() -> bool:
    if not may_be_used():
        return False
    return os.environ.get("SALUS_SERVICE") == "system" or is_installed() or _is_socket(socket_path())


def turned_away() -> None:
    """It has not let this user in."""
    global _turned_away
    _turned_away = True


def none_runs(path: Path) -> str:
    """What a user is told when nobody answers at a socket."""
    if path != socket_path():
        return f"no service runs at {path}; salus run starts one when it is needed, salus serve one that stays"
    return (
        f"the machine-wide service ({path}) does not run; an administrator starts it (systemctl start salus), "
        "and with SALUS_SERVICE=own you use a service of your own meanwhile"
    )


def check_server(path: Path, uid: int, own_folder: Path) -> None:
    """Refuses to speak to a stranger. `uid`: who listens at the socket, by the kernel's word."""
    if uid in (ROOT, os.getuid()) or (path.parent != own_folder and uid == _trusted_owner(path.parent)):
        return
    raise RequestRejected(
        f"{path}: the service there belongs to user {uid}, and anybody could have put it there; "
        "set SALUS_SOCKET to the socket of a service that you trust"
    )


def _trusted_owner(folder: Path) -> int:
    """The owner of a folder that nobody else can write to. ROOT where there is no owner to trust."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_mode & OPEN_TO_OTHERS:
            return ROOT
        named_by_user = folder != runtime_dir()
        return found.st_uid if named_by_user or _was_made_by_root(folder) else ROOT
    except OSError:
        return ROOT


def _was_made_by_root(folder: Path) -> bool:
    """Whoever owns it now got it from root: nobody else can make or rename anything where it is."""
    parent, *above = folder.resolve().parents
    return not parent.stat().st_mode & OPEN_TO_OTHERS and all(map(_only_root_writes, (parent, *above)))


def prepare_runtime_dir() -> None:
    """The folder of the machine-wide service's socket, for everybody to enter and for its user alone to write."""
    folder = runtime_dir()
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise RequestRejected(f"{folder}: belongs to user {found.st_uid}; run the service as that user")
        folder.chmod(0o755)
    except OSError as error:
        raise RequestRejected(
            f"{folder}: cannot be made ({error.strerror}); run the machine-wide service as root, "
            "or let systemd make it: salus install-service --system"
        ) from None
    if os.getuid() != ROOT and not _was_made_by_root(folder):
        raise RequestRejected(f"{folder}: others could have made it, so no user would trust it; run this as root")


def writable_by_others(path: Path) -> Path | None:
    """The part of a path that somebody besides root may change; None: there is none."""
    return next((part for part in _parts(path) if not _only_root_writes(part)), None)


def _parts(path: Path) -> Iterator[Path]:
    resolved = path.resolve()
    yield from (resolved, *resolved.parents)


def _only_root_writes(path: Path) -> bool:
    found = path.stat()
    sticky = bool(found.st_mode & stat.S_ISVTX)
    return found.st_uid == ROOT and (sticky or not found.st_mode & OPEN_TO_OTHERS)


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False
