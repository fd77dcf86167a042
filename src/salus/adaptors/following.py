"""Iterations that follow one another: which hooks are left in place, and whether one of them is under way.

Once all iterations of a script are alike and nobody waits, only where one ends is of interest, and a hook that is not
there costs nothing: a call of Python's takes microseconds at a boundary, where the caches are full of the script's
numbers. So two of torch's hooks are left, before a step and after it, with next to nothing in them; and what we had put
in the place of torch's own functions is taken out. All of it is put back when something else happens.

Nobody notes any more that a backward or a step begins. Whoever has to know, because nothing was heard of the script for
long, puts the hooks back first and then looks at what the threads are in the middle of (`is_under_way`): one that began
before that is found there, one that begins after it runs into the hooks. Between looking a function up and being inside
it no other thread comes in, as long as Python has its global lock.

Values in torch's dictionaries of hooks are exchanged, never added or removed: torch may be walking them.

Must not know: what an iteration is, or what the hooks do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from sys import _current_frames
from types import CodeType
from typing import Any, NamedTuple

Hook = Callable[[Any, Any, Any], None]


class InTorch(NamedTuple):
    """A hook in one of torch's dictionaries."""

    hooks: dict[int, Any]
    key: int
    ours: Hook


class InPlaceOf(NamedTuple):
    """A function of torch's, and ours around it."""

    owner: Any
    name: str
    theirs: Any
    ours: Any


class Following:
    def __init__(self) -> None:
        self.on = False
        self._before_step: InTorch | None = None
        self._after_step: InTorch | None = None
        self._functions: list[InPlaceOf] = []
        self._codes: set[CodeType] = set()

    def knows_steps(self, before: InTorch, after: InTorch) -> None:
        self._before_step, self._after_step = before, after

    def knows(self, function: InPlaceOf) -> None:
        """It is in the way of every iteration, and not needed while they follow one another."""
        self._functions.append(function)

    def knows_code(self, *functions: Any) -> None:
        """Whoever is inside one of these is in the middle of an iteration."""
        self._codes |= {code for function in functions if (code := getattr(function, "__code__", None)) is not None}

    def forget(self) -> None:
        """Everything was taken out."""
        self._before_step = self._after_step = None
        self._functions.clear()

    @property
    def can_begin(self) -> bool:
        return self._before_step is not None and self._after_step is not None

    def begin(self, before_step: Hook, after_step: Hook) -> None:
        for hook, quick in ((self._before_step, before_step), (self._after_step, after_step)):
            if hook is not None and hook.key in hook.hooks:
                hook.hooks[hook.key] = quick
        for owner, name, theirs, ours in self._functions:
            # Somebody may have wrapped ours meanwhile; then it stays inside theirs.
            if getattr(owner, name, None) is ours:
                setattr(owner, name, theirs)
        self.on = True

    def end(self) -> None:
        if not self.on:
            return
        for owner, name, theirs, ours in self._functions:
            if getattr(owner, name, None) is theirs:
                setattr(owner, name, ours)
        for hook in (self._before_step, self._after_step):
            if hook is not None and hook.key in hook.hooks:
                hook.hooks[hook.key] = hook.ours
        self.on = False

    def is_under_way(self, frames: Iterable[Any] | None = None) -> bool:
        """Is any thread inside a backward or a step? To be asked after `end`; `frames`: where to look instead."""
        return any(self._is_inside(frame) for frame in (_current_frames().values() if frames is None else frames))

    def _is_inside(self, frame: Any) -> bool:
        while frame is not None:
            if frame.f_code in self._codes:
                return True
            frame = frame.f_back
        return False


def nothing(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    """Before a step."""
