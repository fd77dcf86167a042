"""`salus install-service`: a systemd unit, so that a service runs from boot (all users) or from login (one user)."""

from __future__ import annotations

import os
import pwd
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from salus import machine
from salus.errors import RequestRejected

UNIT = "salus.service"
_BOOTED = Path("/run/systemd/system")
"""Is there where systemd runs the machine; see sd_booted(3)."""
_MARK = "Commands of all users go to the machine-wide service of Salus, also while it is stopped.\n"


@dataclass(frozen=True)
class Place:
    """Where a unit goes, and how systemd is spoken to there."""

    system: bool

    @property
    def file(self) -> Path:
        if self.system:
            return Path(os.environ.get("SALUS_SYSTEM_UNIT_DIR") or "/etc/systemd/system").absolute() / UNIT
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        return Path(base) / "systemd" / "user" / UNIT

    @property
    def systemctl(self) -> str:
        return "systemctl" if self.system else "systemctl --user"


def install_service(
    user: Annotated[bool, typer.Option("--user", help="A service of your own that stays.")] = False,
    system: Annotated[bool, typer.Option("--system", help="One service for every user of this machine.")] = False,
    run_as: Annotated[
        str | None, typer.Option(metavar="USER", help="With --system: the user it runs as. Default: root.")
    ] = None,
    print_only: Annotated[bool, typer.Option("--print", help="Print the unit and do nothing.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Take away what was installed.")] = False,
) -> None:
    """Install a systemd unit that runs the service. Says what it did, and which commands start the service.

    Without --user and --system: for all users if you are root, else for yourself.

    Example: `sudo salus install-service --system`

    Example: `salus install-service --user --print`
    """
    if user and system:
        raise RequestRejected("--user, --system: leave one of the two out")
    place = Place(system or (not user and os.getuid() == machine.ROOT))
    if run_as is not None and not place.system:
        raise RequestRejected("--run-as: a service of your own runs as you; leave it out, or add --system")
    unit = _unit(place, run_as)
    if print_only:
        typer.echo(unit, nl=False)
        return
    if not _BOOTED.is_dir() and "SALUS_SYSTEM_UNIT_DIR" not in os.environ:
        by_hand = "salus serve --system" if place.system else "salus serve"
        raise RequestRejected(f"systemd does not run this machine; start the service by hand ({by_hand})")
    if remove:
        _remove(place)
    else:
        _install(place, unit, run_as)


def _unit(place: Place, run_as: str | None) -> str:
    if run_as is not None:
        try:
            pwd.getpwnam(run_as)
        except KeyError:
            raise RequestRejected(
                f"--run-as: there is no user {run_as!r} here; make one: useradd --system {run_as}"
            ) from None
    text = (files("salus.service") / ("machine-wide.service" if place.system else "user.service")).read_text()
    # It runs as root otherwise, and owns what systemd makes for it.
    as_user = "" if run_as is None else f"User={run_as}\n"
    return text.replace("@USER@\n", as_user).replace("@COMMAND@", f"{_quoted(sys.executable)} -m salus")


def _quoted(path: str) -> str:
    """As systemd.service(5) wants it: a word may be in quotes, and % and $ are written twice."""
    escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if escaped != path or " " in path else path


def _install(place: Place, unit: str, run_as: str | None) -> None:
    if place.system and run_as is None:
        _warn_of_code_that_others_can_change()
    _write(place.file, unit)
    typer.echo(f"wrote {place.file}")
    if place.system:
        _write(machine.mark(), _MARK)
        typer.echo(f"wrote {machine.mark()}: the commands of all users go to this service from now on")
    typer.echo(f"start it, now and at every {'boot' if place.system else 'login'}:")
    typer.echo(f"  {place.systemctl} daemon-reload && {place.systemctl} enable --now salus")
    if not place.system:
        typer.echo("let it run while you are not logged in:\n  loginctl enable-linger")
    typer.echo(f"see how it is:\n  {place.systemctl} status salus")


def _remove(place: Place) -> None:
    there = [path for path in (place.file, *([machine.mark()] if place.system else [])) if path.exists()]
    if not there:
        raise RequestRejected(f"{place.file}: nothing is installed")
    for path in there:
        try:
            path.unlink()
        except OSError as error:
            raise RequestRejected(f"{path}: cannot be removed ({error.strerror}){_advice(place)}") from None
        typer.echo(f"removed {path}")
    typer.echo(f"stop the service, if it still runs:\n  {place.systemctl} disable --now salus")
    typer.echo(f"  {place.systemctl} daemon-reload")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o644)
    except OSError as error:
        raise RequestRejected(f"{path}: cannot be written ({error.strerror}); run it as root, or with --user") from None


def _advice(place: Place) -> str:
    return "; run it as root" if place.system else ""


def _warn_of_code_that_others_can_change() -> None:
    """The service runs as root: whoever may change its code is root too."""
    for path in (Path(sys.executable), Path(machine.__file__)):
        part = machine.writable_by_others(path)
        if part is not None:
            typer.echo(
                f"salus: {path} would run as root, and others may change {part}; install Salus where only root "
                "writes, or name a user for it with --run-as",
                err=True,
            )
            return
