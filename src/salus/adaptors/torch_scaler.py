"""Steps that a `GradScaler` skips, because the gradients were no numbers: they end their iteration like any other.

Must not know: what a lease does, memory.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, Protocol

from torch.compiler import is_compiling

from salus.adaptors.iterations import Iterations
from salus.adaptors.torch_graphs import capturing


class Watched(Protocol):
    """What this needs of the watch that owns it."""

    active: bool

    @property
    def follows(self) -> bool: ...

    @property
    def iterations(self) -> Iterations: ...

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any], *, often: bool = False) -> None:
        """Puts a wrapper in the place of a function of torch's."""

    def stop_running_on(self, *, has_begun: bool = False) -> None:
        """Iterations no longer follow one another."""

    def steps_taken(self) -> int:
        """That hooks have seen."""

    def guarded(self, report: Callable[..., Any], *args: Any) -> Any:
        """Whatever it raises is not raised into the script."""


class Scalers:
    def __init__(self, watch: Watched) -> None:
        self._watch = watch
        self._scaled = -1
        """So many steps had been taken when a loss was scaled last."""

    def install(self) -> CodeType:
        """The code of `step`: it encloses a step."""
        from torch.amp.grad_scaler import GradScaler

        code: CodeType = GradScaler.step.__code__
        self._watch.wrap(GradScaler, "scale", self._wrap_scale)
        self._watch.wrap(GradScaler, "step", self._wrap_step)
        self._watch.wrap(GradScaler, "update", self._wrap_update)
        return code

    def _wrap_scale(self, original: Any) -> Any:
        def scale(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            self._scaled = self._watch.steps_taken()
            return original(scaler, *args, **kwargs)

        return scale

    def _wrap_step(self, original: Any) -> Any:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            watch = self._watch
            before = watch.steps_taken()
            result = original(scaler, optimizer, *args, **kwargs)
            self._scaled = -1
            if watch.active and watch.steps_taken() == before and not is_compiling():
                watch.stop_running_on(has_begun=True)
                watch.guarded(watch.iterations.step_ended, optimizer)
            return result

        return step

    def _wrap_update(self, original: Any) -> Any:
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            watch = self._watch
            result = original(scaler, *args, **kwargs)
            # (Of iterations that follow one another, the one that is open may not have begun.)
            open_one = not watch.follows or self._scaled == watch.steps_taken()
            if watch.active and open_one and not is_compiling() and not capturing():
                self._scaled = -1
                watch.stop_running_on(has_begun=True)
                watch.guarded(watch.iterations.scaler_updated)
            return result

        return update
