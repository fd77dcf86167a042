"""Iterations that follow one another: which hooks are left in place, and whether one of them is under way.

Once all iterations of a script are alike and nobody waits, only where one ends is of interest, and a hook that is not
there costs nothing: a call of Python's takes microseconds at a boundary, where the caches are full of the script's
numbers. So two of torch's hooks are left, before a step and after it, with next to nothing in them (where there is one
optimizer, they are written in C); and what we had put in the place of torch's own functions is taken out. All of it is
put back when something else happens.

Nobody notes any more that a backward or a step begins. Whoever has to know, because nothing was heard of the script for
long, puts the hooks back first and then looks at what the threads are in the middle of (`is_under_way`): one that began
before that is found there, one that begins after it runs into the hooks. (So what is put in and taken out is where
nothing comes between looking it up and being inside it, as long as Python has its global lock: torch's own call of its
engine, and not the function that a script calls, of which it may have looked up either.)

Values in torch's dictionaries of hooks are exchanged, never added or removed: torch may be walking them.

Must not know: torch, or what our other hooks do.
"""

from __future__ import annotations

from sys import _current_frames
from types import CodeType
from typing import Any, NamedTuple
from weakref import ref

from salus.adaptors.iterations import LEADER_SILENT_STEPS, Iterations
from salus.client.turns import Hook, Turn, counted_in_c, hooks_in_c


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
        self._steps_taken = 0

    def knows_steps(self, before: InTorch, after: InTorch) -> None:
        self._before_step, self._after_step = before, after

    def knows(self, function: InPlaceOf) -> None:
        """It is in the way of every iteration, and not needed while they follow one another."""
        self._functions.append(function)

    def knows_code(self, *codes: CodeType) -> None:
        """Of functions: whoever is inside one of them is in the middle of an iteration."""
        self._codes.update(codes)

    def forget(self) -> None:
        """Everything was taken out."""
        self._before_step = self._after_step = None
        self._functions.clear()

    @property
    def can_begin(self) -> bool:
        return self._before_step is not None and self._after_step is not None

    @property
    def steps_taken(self) -> int:
        return self._steps_taken + counted_in_c()

    def begin(self, turn: Turn, iterations: Iterations, leader: Any, optimizers: list[Any], sorts: bool) -> None:
        """From now on a step of one of these ends an iteration; it is counted if it is the leader's.

        `on` was set before that, before another thread could come to end it; and one that did has its way.
        `sorts`: the memory of the job. An optimizer that had a state and makes it anew makes it outside of the lane.
        """
        before, after = self._before_step, self._after_step
        assert before is not None and after is not None
        keep = {id(known) for known in optimizers if sorts and known.state}
        quick = None
        if len(optimizers) == 1:
            quick = hooks_in_c(turn, leader, before.ours, after.ours, keeps_state=bool(keep))
        if quick is None:
            counts = {id(known): int(known is leader) for known in optimizers}
            quick = _before_step(before.ours, keep), self._count_steps(turn, iterations, leader, counts, after.ours)
        for hook, quick_one in zip((before, after), quick, strict=True):
            if hook.key in hook.hooks:
                hook.hooks[hook.key] = quick_one
        for owner, name, theirs, ours in self._functions:
            # Somebody may have wrapped ours meanwhile; then it stays inside theirs.
            if getattr(owner, name, None) is ours:
                setattr(owner, name, theirs)
        if not self.on:
            self.end()

    def _count_steps(self, turn: Turn, iterations: Iterations, leader: Any, counts: dict[int, int], slow: Hook) -> Hook:
        """`counts` has the ids of the optimizers, with 1 for the leader."""
        end, count_of, leading = turn.end, counts.get, ref(leader)

        def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            try:
                count = count_of(id(optimizer))
                leads_on = leading() is not None and iterations.steps_of_others < LEADER_SILENT_STEPS - 1
                if count is not None and (count or leads_on) and end(count):
                    self._steps_taken += 1
                    iterations.steps_of_others = 0 if count else iterations.steps_of_others + 1
                    return
            except Exception as error:
                iterations.fail(error)
            slow(optimizer, args, kwargs)

        return after_step

    def end(self) -> None:
        """Also where it had not begun, or only in part."""
        self.on = False
        for owner, name, theirs, ours in self._functions:
            if getattr(owner, name, None) is theirs:
                setattr(owner, name, ours)
        for hook in (self._before_step, self._after_step):
            if hook is not None and hook.key in hook.hooks:
                hook.hooks[hook.key] = hook.ours

    def is_under_way(self) -> bool:
        """Is any thread inside a backward or a step? To be asked after `end`."""
        return any(self._is_inside(frame) for frame in _current_frames().values())

    def _is_inside(self, frame: Any) -> bool:
        while frame is not None:
            if frame.f_code in self._codes:
                return True
            frame = frame.f_back
        return False


def _before_step(slow: Hook, keep: set[int]) -> Hook:
    """`keep` has the ids of the optimizers that have a state."""
    if not keep:
        return _nothing

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if id(optimizer) in keep and _has_no_state(optimizer):
            slow(optimizer, args, kwargs)

    return before_step


def _has_no_state(optimizer: Any) -> bool:
    try:
        return not optimizer.state
    except Exception:
        return True


def _nothing(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    pass
