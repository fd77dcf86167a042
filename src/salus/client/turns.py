"""The one call that ends an iteration and begins the next, for a job that runs on (`Lease.run_on`).

It takes no lock. In Python there is no call in it after the clock was read, and no jump that is taken (Python 3.10 lets
others in there too); in C (csrc/steps.c) Python's lock is held throughout. So no other thread of Python's comes in
between. Whoever wants to end the iteration, or takes the job to another page, changes the state on the page first, and
the next turn does nothing.

In C it is the hook after a step itself, which the framework calls as it calls a built-in function. At a boundary the
caches are full of the script's numbers: two microseconds there, where the same in Python takes ten.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from salus.client.arena import LIBRARY
from salus.protocol.page import JobState, Word

LONGEST_TURN_NS = 1_000_000_000
"""An iteration that took longer than this may have been a pause."""

_REVOKE, _STATE, _ITERATIONS, _BUSY, _BEGAN, _BOUNDARIES = (
    int(word) for word in (Word.REVOKE, Word.STATE, Word.ITERATIONS, Word.BUSY_NS, Word.BEGAN_NS, Word.BOUNDARIES)
)
_ITERATING, _RUNNING_ON = int(JobState.ITERATING), int(JobState.RUNNING_ON)
_now_ns = time.monotonic_ns

Hook = Callable[[Any, Any, Any], None]
"""Around a step: the optimizer, and what it was called with."""


class Turn(NamedTuple):
    end: Callable[[int], bool]
    """Counts that many and begins the next one. False: nothing was done."""
    page: int
    """The address of the page that it does so on, for the same in C; 0: there is none."""


def on_page(words: memoryview[int], address: int) -> Turn:
    def end(iterations: int) -> bool:
        now = _now_ns()
        began = words[_BEGAN]
        if words[_STATE] == _RUNNING_ON and not words[_REVOKE] and now - began <= LONGEST_TURN_NS:
            # In this order; `Page.used` counts on it.
            words[_BEGAN] = now
            words[_BUSY] += now - began
            words[_ITERATIONS] += iterations
            words[_BOUNDARIES] += 1
            return True
        return False

    return Turn(end, address)


def move(before: memoryview[int], after: memoryview[int]) -> None:
    """Takes the job to another page. On the old one it does not run on any more: that is how its turns see it."""
    state = before[_STATE]
    before[_STATE] = _ITERATING if state == _RUNNING_ON else state
    for word in (_ITERATIONS, _BUSY, _BEGAN, _BOUNDARIES):
        after[word] = before[word]
    after[_STATE] = state


_NOTHING, _HAS_STATE, _AFTER = range(3)
_library: Any = None
_kept: dict[tuple[int, int], tuple[Hook, Hook]] = {}
"""The hooks in Python that those in C call: for as long as the process lives."""


def hooks_in_c(turn: Turn, leader: Any, before: Hook, after: Hook, *, keeps_state: bool) -> tuple[Hook, Hook] | None:
    """For before and after a step: of this optimizer each ends an iteration. All else is left to the two in Python.

    `keeps_state`: a step of one that has no state is left to them, too. None: they cannot be had here. There is one
    such pair in a process; the next one takes its place.
    """
    if not turn.page or not _is_loaded():
        return None
    _kept[id(before), id(after)] = before, after
    if _library.salus_steps_follow(turn.page, id(leader), before, after, LONGEST_TURN_NS):
        return None
    return _library.salus_steps_hook(_HAS_STATE if keeps_state else _NOTHING), _library.salus_steps_hook(_AFTER)


def counted_in_c() -> int:
    """Steps so far that ended an iteration in there."""
    return 0 if _library is None else int(_library.salus_steps_turns().contents.value)


def _is_loaded() -> bool:
    global _library
    if _library is None:
        try:
            # Called with Python's lock held, as any of its own functions.
            found = ctypes.PyDLL(str(LIBRARY))
            found.salus_steps_follow.argtypes = [
                ctypes.c_void_p, ctypes.c_void_p, ctypes.py_object, ctypes.py_object, ctypes.c_uint64,
            ]  # fmt: skip
            found.salus_steps_hook.restype = ctypes.py_object
            found.salus_steps_turns.restype = ctypes.POINTER(ctypes.c_uint64)
        except (OSError, AttributeError):
            return False
        _library = found
    return True
