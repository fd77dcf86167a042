"""`salus install-hook`: for jobs whose Python is started with -I or -E."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from salus.client import hook
from salus.errors import RequestRejected


def install_hook(
    python: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help="Of which environment. Default: the python that is first on the PATH."),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take the hook out again.")] = False,
) -> None:
    """Let Salus into jobs of a Python that is started with -I or -E, or with a PYTHONPATH of its own.

    Writes two small files next to the packages of that Python. Outside jobs they do nothing.

    Example: `salus install-hook --python .venv/bin/python`
    """
    chosen = python or shutil.which("python") or shutil.which("python3")
    if chosen is None:
        raise RequestRejected("there is no python on the PATH; name one with --python")
    if not remove:
        typer.echo(f"wrote {hook.install(chosen)}")
        return
    removed = hook.remove(chosen)
    typer.echo(f"there is no hook in {hook.folder_of(chosen)}" if removed is None else f"removed {removed}")
