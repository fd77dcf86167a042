"""Calls of compiled code in a PyTorch script.

Hooks inside compiled code run only while torch compiles it. So what `torch.compile` returns is wrapped: a call of it is
a forward, or, if an optimizer's `step` was compiled, a step. Anything more that it contains is seen by what it leaves:

- **A compiled function may contain the step** (of a whole training step, or of the step and a scheduler). Then the call
  has changed the state of the optimizer, or, where there is none, what it trains, and no hook has seen a step. The
  return of that call is the end of the step. Torch counts changes in place (`_version`), in compiled code too.
- A compiled module is a module, and the hook before forwards sees it; but where there is a hook, torch takes a slower
  way and looks whether to warn of it. So their class is wrapped too, which sees usual calls first.

Must not know: what a lease does, memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, Protocol
from weakref import ReferenceType, ref

import torch
from torch.compiler import is_compiling

from salus.adaptors.iterations import Iterations
from salus.adaptors.torch_trained import Trained, stepped


class Watched(Protocol):
    """What this needs of the watch that owns it."""

    active: bool

    @property
    def iterations(self) -> Iterations: ...

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any], *, often: bool = False) -> None:
        """Puts a wrapper in the place of a function of torch's."""

    def stop_running_on(self) -> None:
        """Iterations no longer follow one another."""

    def usual_forward_began(self, module: Any) -> bool:
        """True: iterations are all alike, and this one has begun, if it is like them."""

    def compiled_forward_began(self, module: Any) -> bool:
        """True: `forward_ended` must be called."""

    def forward_ended(self) -> None: ...

    def compiled_step_began(self) -> None: ...

    def steps_taken(self) -> int:
        """That hooks have seen."""

    def step_of_no_hook_ended(self, *optimizers: Any) -> None:
        """Steps that no hook has seen are done."""


class CompiledCalls:
    def __init__(self, watch: Watched, trained: Trained) -> None:
        self._watch = watch
        self._trained = trained
        self._classes: set[type] = set()
        """Of compiled modules."""
        self.code: CodeType = self._call.__code__
        """Of every call of compiled code that is seen here."""

    def install(self) -> None:
        for known in self._classes:
            self._watch.wrap(known, "__call__", self._wrap_module, often=True)

    def wrap_compile(self, original: Any) -> Any:
        def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._watch.stop_running_on()
            compiled = original(model, *args, **kwargs)
            # Without a model it is a decorator, which comes back here with one.
            if model is None or not self._watch.active:
                return compiled
            if isinstance(compiled, torch.nn.Module):
                self._guarded(self._see_calls_of, type(compiled))
            return self._wrap(model, compiled) if isinstance(compiled, FunctionType) else compiled

        return compile

    def _see_calls_of(self, compiled: type) -> None:
        """Of compiled modules: in a usual iteration before torch asks whether there are hooks, which takes it long."""
        if "__call__" in vars(compiled) and compiled not in self._classes:
            self._classes.add(compiled)
            self._watch.wrap(compiled, "__call__", self._wrap_module, often=True)

    def _wrap_module(self, original: Any) -> Any:
        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._watch.active or self._guarded(self._watch.usual_forward_began, module):
                return original(module, *args, **kwargs)
            return self._call(functools.partial(original, module), args, kwargs)

        return __call__

    def _wrap(self, model: Any, compiled: Any) -> Any:
        owner = getattr(model, "__self__", None)
        if isinstance(owner, torch.optim.Optimizer):
            return self._wrap_step(ref(owner), compiled)
        module = ref(owner) if isinstance(owner, torch.nn.Module) else None

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Dynamo may look into a step in there, and our hooks are not all made for that.
            self._watch.stop_running_on()
            if is_compiling() or not self._watch.active:
                return compiled(*args, **kwargs)
            of = compiled if module is None else module()
            followed = self._guarded(self._watch.compiled_forward_began, of)
            try:
                return self._call(compiled, args, kwargs)
            finally:
                if followed:
                    self._guarded(self._watch.forward_ended)

        return call

    def _wrap_step(self, optimizer: ReferenceType[Any], compiled: Any) -> Any:
        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._watch.stop_running_on()
            if is_compiling() or not self._watch.active:
                return compiled(*args, **kwargs)
            taken = self._watch.steps_taken()
            self._guarded(self._watch.compiled_step_began)
            try:
                return compiled(*args, **kwargs)
            finally:
                stepped = optimizer()
                # (Where torch could not compile it, hooks have seen the step.)
                if stepped is not None and self._watch.steps_taken() == taken:
                    self._guarded(self._watch.step_of_no_hook_ended, stepped)

        return call

    def _call(self, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls it, and looks for a step that no hook has seen."""
        before, taken = self._guarded(self._trained.before_call), self._watch.steps_taken()
        result = compiled(*args, **kwargs)
        # (A compiled call within this one, or an eager step, has been reported already.)
        if before and self._watch.steps_taken() == taken:
            self._guarded(self._report, before)
        return result

    def _report(self, before: Any) -> None:
        optimizers = stepped(before)
        if optimizers:
            self._watch.step_of_no_hook_ended(*optimizers)

    def _guarded(self, report: Callable[..., Any], *args: Any) -> Any:
        try:
            return report(*args)
        except Exception as error:
            self._watch.iterations.fail(error)
            return None
