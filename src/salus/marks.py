"""Marks for iterations, where no hook can see them: an update by hand, another framework, plain Python, a server.

    with iteration():        # the body is one iteration
        ...

    @step                    # every call is one iteration
    def train_step(batch): ...

Under `salus run` a mark counts one iteration whatever happens inside it; nested marks count once. Everywhere else a
mark does nothing. A mark never raises and prints nothing to stdout.

This file needs the standard library alone, and Python 3.9 or newer. It may be copied into any project:

    salus marks > salus_marks.py
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["iteration", "step"]

F = TypeVar("F", bound=Callable[..., Any])
_none_here = "SALUS_JOB" not in os.environ
"""This process belongs to no job, or Salus could not be loaded in it: marks do nothing."""


class iteration:  # noqa: N801, RUF100 - read as a verb phrase: with iteration()
    """The body of the `with` is one iteration."""

    __slots__ = ("_counter",)

    def __enter__(self) -> None:
        # Kept, because another one may be there at the end.
        self._counter = _find_counter()
        if self._counter is not None:
            self._counter.mark_began()

    def __exit__(self, *exc: object) -> None:
        if self._counter is not None:
            self._counter.mark_ended()


def step(function: F) -> F:
    """Every call of the function is one iteration."""

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        counter = _find_counter()
        if counter is None:
            return function(*args, **kwargs)
        counter.mark_began()
        try:
            return function(*args, **kwargs)
        finally:
            counter.mark_ended()

    return marked  # type: ignore[return-value]


def _find_counter() -> Any:
    """What counts the iterations of this process (`salus.adaptors.iterations.Iterations`); None outside Salus."""
    known = sys.modules.get("salus.adaptors.iterations")
    if known is not None and known.installed is not None:
        return known.installed
    return None if _none_here else _make_counter()


def _make_counter() -> Any:
    """The first mark of a job's process, unless a framework's hooks came before it."""
    global _none_here
    try:
        # A Python that was started with -I, -E or -S, or with a PYTHONPATH of its own, has not run this file yet.
        bootstrap = os.environ.get("SALUS_BOOTSTRAP")
        if bootstrap:
            spec = importlib.util.spec_from_file_location("_salus_bootstrap", bootstrap)
            if spec is not None and spec.loader is not None:
                spec.loader.exec_module(importlib.util.module_from_spec(spec))
        from salus.adaptors import activate

        return activate.counter_for_marks()
    except Exception as error:
        _none_here = True
        if sys.stderr is not None:
            with contextlib.suppress(Exception):  # a stream that is closed or full is no reason to fail
                print(f"salus: marks do nothing in this process ({error})", file=sys.stderr)
        return None
