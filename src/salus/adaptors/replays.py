"""What the replay of a captured graph is: the rules, without a framework.

Replaying a captured graph runs no forward, backward or step that a hook could see. But hooks saw all of them while the
graph was captured, when nothing ran. So a capture is no part of any iteration, and **a replay is whatever was captured,
once more**:

| the capture saw       | a replay                                                                                    |
|-----------------------|---------------------------------------------------------------------------------------------|
| a step (`STEP`)       | is that step: it begins an iteration if none is open, ends it, and counts as the step would  |
| a backward (`BACKWARD`) | is that backward: it begins an iteration if none is open; the step that follows ends it    |
| a training forward (`FORWARD`) | is that forward, and waits for its backward                                        |
| anything else (`OTHER`) | is a forward of inference: an iteration of its own, or a part of the one that is open      |

Where an iteration is open, and a graph without a step is replayed within the call of a module or of compiled code, or
within a backward, nothing changes: the replay is a part of that. Nor does a replay change a mark. (The graphs that
torch.compile captures itself are not reported here. They are always parts of a compiled call.)

A backward or forward that no step ever follows must not keep its iteration open for ever:
- A process that built no optimizer updates by hand: each replay of a captured backward is an iteration.
- The eighth replay in a row with nothing else between them is a boundary that does not count, and so are those after it
  (the rest of a long accumulation, or an update that no hook knows).
- A graph that was replayed 100 times since the last step of any optimizer, and never had one after its first replay, is
  the script's own iteration from then on, and counts.

Must not know: the framework, or what a lease does.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any
from weakref import ReferenceType, ref

from salus.adaptors.iterations import NONE, Iterations

IN_A_ROW = 8
"""So many replays with nothing else between them, and each is a boundary."""
WITHOUT_A_STEP = 100
"""So many replays of a graph that no step ever followed, and each counts."""


class Content(Enum):
    STEP = "step"
    BACKWARD = "backward"
    FORWARD = "forward"
    OTHER = "other"


class Captured:
    """What the hooks saw while a graph was captured, and what has become of its replays."""

    def __init__(self, *, gradients: bool) -> None:
        """`gradients`: they were enabled when the capture began."""
        self._gradients = gradients
        self._forward: bool | None = None
        self._backward = False
        self._optimizers: list[ReferenceType[Any]] = []
        self.replays = 0
        self.first_after = 0
        """So many steps had been taken at its first replay."""

    def saw_forward(self, *, trains: bool) -> None:
        self._forward = trains or bool(self._forward)

    def saw_backward(self) -> None:
        self._backward = True

    def saw_step(self, optimizer: Any) -> None:
        if all(known() is not optimizer for known in self._optimizers):
            self._optimizers.append(ref(optimizer))

    @property
    def content(self) -> Content:
        if self._optimizers:
            return Content.STEP
        if self._backward:
            return Content.BACKWARD
        trains = self._gradients if self._forward is None else self._forward
        return Content.FORWARD if trains else Content.OTHER

    @property
    def optimizers(self) -> list[Any]:
        """Those whose step was captured. If the script dropped them all, the capture stands for them."""
        return [one for known in self._optimizers if (one := known()) is not None] or [self]


def replay_began(iterations: Iterations, captured: Captured, *, inside: bool) -> Callable[[], None] | None:
    """Before a replay. What must be called after it; None: nothing.

    `inside`: it is made within the call of a module or of compiled code, or within a backward.
    """
    content = captured.content
    if not captured.replays:
        captured.first_after = iterations.steps
    captured.replays += 1
    if content is not Content.STEP and iterations.kind is not NONE and (inside or iterations.backwards):
        return None
    return _BEGAN[content](iterations, captured)


def _step_began(iterations: Iterations, captured: Captured) -> Callable[[], None] | None:
    iterations.step_began()

    def ended() -> None:
        iterations.steps += 1
        iterations.step_ended(*captured.optimizers)

    return ended


def _backward_began(iterations: Iterations, captured: Captured) -> Callable[[], None] | None:
    in_a_row = iterations.replays_in_a_row + 1
    # It raises if the user interrupts the wait for a lease. Then no replay runs.
    try:
        iterations.backward_began()
    except BaseException:
        iterations.backward_ended(graph_is_gone=False)
        raise

    def ended() -> None:
        iterations.backward_ended(graph_is_gone=True)
        _part_ended(iterations, captured, in_a_row)

    return ended


def _forward_began(iterations: Iterations, captured: Captured) -> Callable[[], None] | None:
    in_a_row = iterations.replays_in_a_row + 1
    if iterations.forward(captured, True, True, False):
        return iterations.returned
    return lambda: _part_ended(iterations, captured, in_a_row)


def _other_began(iterations: Iterations, captured: Captured) -> Callable[[], None] | None:
    return iterations.returned if iterations.forward(captured, False, False, False) else None


_BEGAN = {
    Content.STEP: _step_began,
    Content.BACKWARD: _backward_began,
    Content.FORWARD: _forward_began,
    Content.OTHER: _other_began,
}


def _part_ended(iterations: Iterations, captured: Captured, in_a_row: int) -> None:
    """A replay was a part of an iteration, of which it is not known when it ends."""
    iterations.replays_in_a_row = in_a_row
    by_hand = captured.content is Content.BACKWARD and not iterations.process.has_optimizer
    never_a_step = captured.replays >= WITHOUT_A_STEP and iterations.steps == captured.first_after
    if by_hand or never_a_step:
        iterations.over(counted=True)
    elif in_a_row >= IN_A_ROW:
        iterations.over(counted=False)
