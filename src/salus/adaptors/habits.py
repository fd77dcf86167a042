"""Whether the iterations of a script are all alike, judged by the last ones.

Most scripts do the same in every iteration: forwards of the same module, backwards that keep no graph, one step of the
same optimizer; or of two in turns, or all of it inside the step. Or they serve, forward after forward without
gradients. Once they have for a while, an adaptor does only what such an iteration needs (`Usual`, `Serving`).

Must not know: torch. Modules and optimizers are told apart by their ids: to be equal is something else for a module.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple, TypeVar
from weakref import ReferenceType, ref

from salus.adaptors.iterations import Iterations

AFTER = 8
"""So many iterations that were alike are followed by more of the same, it is assumed."""
MOST = 4
"""Modules and optimizers of such iterations, each."""

Thing = TypeVar("Thing")


class Stepping(NamedTuple):
    """An optimizer that ends iterations."""

    optimizer: ReferenceType[Any]
    closure: bool
    """They begin with its step, too."""


class Usual(NamedTuple):
    """What all iterations consist of, lately."""

    thread: int
    """Theirs; others begin theirs with locks."""
    iterations: Iterations
    modules: dict[int, ReferenceType[Any]]
    optimizers: dict[int, Stepping]
    begin: Callable[[], bool]
    end: Callable[[int], bool]


class Serving(NamedTuple):
    """All iterations are forwards of this one without gradients, lately."""

    thread: int
    iterations: Iterations
    module: ReferenceType[Any]
    begin: Callable[[], bool]
    end: Callable[[int], bool]


class Habits:
    """Told what happens in each iteration that is not taken to be like all others."""

    def __init__(self) -> None:
        self._alike = 0
        self._modules: dict[int, ReferenceType[Any]] = {}
        self._stepping: dict[int, Stepping] = {}
        # Of the open iteration: it began with its step; it had something that no other should have.
        self._closure = self._odd = False
        self._served: ReferenceType[Any] | None = None
        self._served_times = 0
        self._thread = 0

    def _in_this_thread(self) -> None:
        """Iterations of two threads are never all alike."""
        if self._thread != get_ident():
            self._thread = get_ident()
            self._modules, self._stepping = {}, {}
            self.are_over()

    def saw_forward(self, module: Any, *, trains: bool) -> None:
        self._in_this_thread()
        known = self._modules.get(id(module))
        if known is None or known() is not module:
            self._modules = with_one_more(self._modules, id(module), ref(module))
            self._odd = True
        self._odd = self._odd or not trains

    def saw_closure(self, *, begins: bool) -> None:
        """A step was given one; the iteration begins with that step, or had begun before."""
        self._closure = begins
        self._odd = self._odd or not begins

    def saw_something_else(self) -> None:
        self._odd = True

    def saw_step(self, optimizer: Any) -> bool:
        """An iteration has ended with it. True: so have enough that were alike."""
        self._in_this_thread()
        odd, closure = self._odd, self._closure
        self._odd = self._closure = False
        known = self._stepping.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer or known.closure != closure:
            self._stepping = with_one_more(self._stepping, id(optimizer), Stepping(ref(optimizer), closure))
            odd = True
        self._alike = 0 if odd else self._alike + 1
        return self._alike >= AFTER

    def saw_inference(self, module: Any) -> bool:
        """A forward was an iteration; None: one with gradients, or of no module. True as for a step."""
        self._in_this_thread()
        if module is None:
            self._served = None
            return False
        if self._served is None or self._served() is not module:
            self._served, self._served_times = ref(module), 0
        self._served_times += 1
        return self._served_times > AFTER

    def are_over(self) -> None:
        """Something happened that no iteration had before, or somebody waits."""
        self._alike, self._odd, self._served = 0, True, None

    def usual(self, iterations: Iterations) -> Usual | None:
        """What they all are like; None: they cannot begin and end in the short way."""
        self._alike = 0
        quick = iterations.usual()
        return None if quick is None else Usual(get_ident(), iterations, self._modules, self._stepping, *quick)


def with_one_more(known: dict[int, Thing], key: int, value: Thing) -> dict[int, Thing]:
    """A few more than those; where it would be too many, none but the new one."""
    return {**(known if len(known) < MOST else {}), key: value}
