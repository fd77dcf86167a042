"""Explicit marks, for loops that no hook can see (an update by hand, another framework, a batch of requests).

    import salus.api

    for batch in batches:
        with salus.api.iteration():
            ...

    @salus.api.step
    def train_step(batch): ...

A mark is one iteration whatever happens inside; nested marks count once. Outside Salus both do nothing. The module
needs the standard library alone, so a script that uses it runs anywhere Salus is installed, with a service or without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

from salus.adaptors import iterations as _iterations

P = ParamSpec("P")
R = TypeVar("R")


class iteration:  # noqa: N801, RUF100 - read as a verb phrase: with iteration()
    """The body of the `with` is one iteration."""

    __slots__ = ("_held",)

    def __enter__(self) -> None:
        # Kept, because what is installed may change before the end.
        self._held = _iterations.installed
        if self._held is not None:
            self._held.mark_began()

    def __exit__(self, *exc: object) -> Literal[False]:
        if self._held is not None:
            self._held.mark_ended()
        return False


def step(function: Callable[P, R]) -> Callable[P, R]:
    """Every call of the function is one iteration."""

    @functools.wraps(function)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        held = _iterations.installed
        if held is None:
            return function(*args, **kwargs)
        held.mark_began()
        try:
            return function(*args, **kwargs)
        finally:
            held.mark_ended()

    return marked
