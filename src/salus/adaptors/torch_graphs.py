"""Captures and replays of CUDA graphs in a PyTorch script, for `replays`, which has the rules.

- A capture is seen by wrapping `CUDAGraph.capture_begin` and `capture_end`. While one is under way in this thread, the
  hooks of forwards, backwards and steps tell it to the capture (`noting`) and not to the iterations: nothing runs.
- A replay is seen by a `replay` of our own on that graph object, not on the class: `torch.compile` in its
  `reduce-overhead` mode replays graphs in every forward and backward, and must not pay for a wrapper. Its graphs are
  told by the file that captures them.

Must not know: what a lease does, memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from sys import _getframe
from threading import get_ident
from types import CodeType
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch

from salus.adaptors.iterations import NONE, Iterations
from salus.adaptors.replays import Captured, Content, replay_began

_cuda: Any = torch.cuda
_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
_OF_TORCH_COMPILE = "cudagraph_trees.py"


class Watched(Protocol):
    """What this needs of the watch that owns it."""

    active: bool

    @property
    def iterations(self) -> Iterations: ...

    def look_for_forwards(self) -> None:
        """The next top-level forward is reported."""

    def look_as_before(self) -> None:
        """Whether it is depends again on whether an iteration is open."""

    def something_else_happens(self) -> None:
        """The iteration that is open, or is about to begin, is not like the others."""


class Graphs:
    def __init__(self, watch: Watched) -> None:
        self._watch = watch
        self._capture: Captured | None = None
        """The one that is under way. CUDA allows one at a time in a process, as torch captures."""
        self._thread = 0
        self.codes: set[CodeType] = set()
        """Of functions that call the script's modules and compiled code: a replay within one is a part of that call."""

    def noting(self) -> Captured | None:
        """The capture that what this thread does now belongs to."""
        capture = self._capture
        if capture is None:
            return None
        if not capturing():
            if get_ident() == self._thread:
                self._capture = None  # it failed, and was never ended
            return None
        return capture

    def wrap_begin(self, original: Any) -> Any:
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._watch.active:
                return original(graph, *args, **kwargs)
            self._guarded(self._watch.something_else_happens)
            result = original(graph, *args, **kwargs)
            self._guarded(self._began)
            return result

        return capture_begin

    def wrap_end(self, original: Any) -> Any:
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            capture, self._capture = self._capture, None
            result = original(graph, *args, **kwargs)
            if capture is not None and self._watch.active:
                self._guarded(self._ended, graph, capture)
            return result

        return capture_end

    def _began(self) -> None:
        if any(frame.f_code.co_filename.endswith(_OF_TORCH_COMPILE) for frame in _frames(_getframe(2))):
            return
        self._capture, self._thread = Captured(gradients=torch.is_grad_enabled()), get_ident()
        self._watch.look_for_forwards()

    def _ended(self, graph: Any, capture: Captured) -> None:
        self._watch.look_as_before()
        # (A reference to the graph in here would keep it for ever.)
        graph.replay = functools.partial(self._replay, ref(graph), capture)

    def _replay(self, known: ReferenceType[Any], captured: Captured, *args: Any, **kwargs: Any) -> Any:
        graph: Any = known()
        ended = self._guarded(self._replay_began, captured) if self._watch.active else None
        try:
            return type(graph).replay(graph, *args, **kwargs)
        finally:
            if ended is not None:
                self._guarded(ended)

    def _replay_began(self, captured: Captured) -> Callable[[], None] | None:
        inside = captured.content is not Content.STEP and (is_in_backward() or self._is_inside_a_call())
        iterations = self._watch.iterations
        if not inside or iterations.kind is NONE:
            self._watch.something_else_happens()
        return replay_began(iterations, captured, inside=inside)

    def _is_inside_a_call(self) -> bool:
        return any(frame.f_code in self.codes for frame in _frames(_getframe(3)))

    def _guarded(self, report: Callable[..., Any], *args: Any) -> Any:
        try:
            return report(*args)
        except Exception as error:
            self._watch.iterations.fail(error)
            return None


def is_in_backward() -> bool:
    """Whether this thread is at work for a backward: the one that called for it, or one of torch's own."""
    return _graph_task() != -1


def capturing() -> bool:
    """Whether the current stream of this thread captures."""
    return bool(_cuda.is_initialized() and _cuda.is_current_stream_capturing())


def _frames(frame: Any) -> Iterator[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back
