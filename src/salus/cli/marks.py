"""`salus marks`: the file with the marks, for a project that cannot depend on Salus."""

from __future__ import annotations

import inspect

import typer

from salus import marks as _marks


def marks() -> None:
    """Print the marks for iterations as one Python file, to copy into a project.

    Outside Salus, and without it, they do nothing. The file needs the standard library alone.

    Example: `salus marks > salus_marks.py`
    """
    typer.echo(inspect.getsource(_marks), nl=False)
