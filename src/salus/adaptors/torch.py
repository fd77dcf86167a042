"""Sees forwards, backwards and steps of an unmodified PyTorch script, and reports them to `iterations`.

How each is seen:
- a step: torch's global hooks before and after `Optimizer.step`; a step that `GradScaler.step` skipped: by wrapping it;
- a backward: by wrapping `torch.autograd.backward`, which `Tensor.backward` calls;
- a forward: by torch's global forward pre-hook. Such a hook makes every submodule slower and is seen by torch.compile,
  so it is in place only while it looks for a top-level call. When it fires it takes itself out, and inner modules run
  at full speed. The forward's return is seen by a hook on that one module, which is there only during the call;
- a call into compiled code, and a step inside it: `torch_compiled`;
- the replay of a captured CUDA graph: `torch_graphs`.

Most scripts do the same in every iteration: forwards of the same module, backwards, one step of the same optimizer; or
two of each in turns, or all of it inside the step; or they serve, forward after forward without gradients. Once they
have for a while, hooks do only what such an iteration needs (`Usual`, `Serving`), until something else happens or
somebody waits. And if they go on like that, iterations follow one another: each begins where the last one ended, so
that only its end is to be seen, and one hook does that (`following`). The helper of the lease says when none comes.

Rules: a hook returns at once while torch compiles (the quick ones that are left while iterations follow one another do
not look: they are taken out before a compiled function runs), changes no argument and no result, and never raises: on
an error in here everything is taken out again and `Iterations.fail` says so. A torch that lacks something is done
without; it is said once. A module that owns nothing (a loss, a transform of the data) is not a model: its call begins
no iteration. What happens while a CUDA graph is captured is told to the capture and is no part of an iteration: nothing
runs, and the GPU may not be waited for.
In the child of a fork everything begins anew: the lease is the parent's. A data loader's worker takes no part, whatever
modules its transforms are made of.

Must not know: what a lease does, sockets, memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from sys import _getframe
from threading import Lock, get_ident, local
from types import SimpleNamespace
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import is_grad_enabled
from torch.compiler import is_compiling, is_dynamo_compiling

from salus.adaptors import habits
from salus.adaptors.following import Following, InPlaceOf, InTorch
from salus.adaptors.habits import Habits, Serving, Usual, with_one_more
from salus.adaptors.iterations import (
    INFERENCE,
    LEADER_SILENT_STEPS,
    NONE,
    TRAINING,
    Iterations,
    is_running,
    set_installed,
)
from salus.adaptors.torch_compiled import CompiledCalls
from salus.adaptors.torch_graphs import Graphs, capturing, is_in_backward
from salus.adaptors.torch_memory import TorchMemory
from salus.adaptors.torch_scaler import Scalers
from salus.adaptors.torch_trained import Trained
from salus.client.say import say

_cuda: Any = torch.cuda
_modules: Any = torch.nn.modules.module
# What `is_compiling` looks at, for the hooks of every iteration: one call instead of two. (Dynamo knows the first one.)
_flags: Any = (
    torch.compiler if hasattr(torch.compiler, "_is_compiling_flag") else SimpleNamespace(_is_compiling_flag=False)
)
ALONE = 1000
"""So many iterations of one thread, and it is assumed that no other will have one."""
_CALL = getattr(getattr(torch.nn.Module, "_call_impl", None), "__code__", None)
_watch: Watch | None = None


def install(iterations: Iterations, memory: TorchMemory | None = None) -> None:
    """Watch this process. A second call changes nothing until `uninstall`."""
    global _watch
    if _watch is not None:
        return
    _watch = Watch(iterations, memory)
    set_installed(iterations)
    _watch.install()


def uninstall() -> None:
    """Take everything out again."""
    global _watch
    watch, _watch = _watch, None
    set_installed(None)
    if watch is not None:
        watch.uninstall()


def installed() -> Watch | None:
    """What watches this process, if anything does."""
    return _watch


class _Step(local):
    """What this thread knows of the step that it is in."""

    began = False
    """And has not ended, or it raised."""
    nests = False
    """Or has raised: only the stack tells which is outermost."""
    makes_state = False


class Watch:
    def __init__(self, iterations: Iterations, memory: TorchMemory | None = None) -> None:
        self._process = iterations.process
        self.memory = memory
        self.active = False
        self._undo: list[Callable[[], None]] = []
        self._step = _Step()
        self._step_code: Any = None  # of the function of torch's that calls the hooks around a step
        self._stateless: dict[int, ReferenceType[Any]] = {}  # optimizers that had none after a step
        self._looking: Any = None  # torch's dictionary of forward pre-hooks
        self._key = 0  # ours in that dictionary, and in a module's own while its call is followed
        self._calls: dict[int, Any] = {}  # by thread: the frame of the call that is followed, and its module
        self._calls_lock = Lock()
        self._usual: Usual | None = None
        self._usual_times = 0
        self._following = Following()
        self._several = False  # threads iterate, or did lately
        self._alone = 0  # so many iterations that were all alike, of one of them, since another one had one
        self._unseen = False  # a backward or a step is under way that began while iterations followed one another
        self._cut = 0  # the thread in which they did; they were let go of, perhaps in the middle of a forward
        self._serving: Serving | None = None
        self._forwarded: list[ReferenceType[Any]] = []  # in the iteration that is open, if it is a usual one
        self._habits = Habits()
        self._sees_captures = False
        self._trained = Trained()
        self._compiled = CompiledCalls(self, self._trained)
        self._graphs = Graphs(self)
        self._scalers = Scalers(self)
        self._graphs.codes.update(code for code in (_CALL, self._compiled.code) if code is not None)
        # One object for good: torch.compile guards on which hooks there are, and a new one would compile again.
        self._pre_hook = self._before_forward

    # In and out.

    def install(self) -> None:
        self.active = True
        parts: dict[str, Callable[[], None]] = {
            "steps": self._install_steps,
            "forwards": self._install_forwards,
            "new optimizers": lambda: self.wrap(torch.optim.Optimizer, "__init__", self._wrap_optimizer_init),
            "backwards": self._install_backward,
            "skipped steps": lambda: self._following.knows_code(self._scalers.install()),
            "modes": lambda: self.wrap(torch.nn.Module, "train", self._wrap_train),
            "new models": self._install_building,
            "data loader workers": lambda: self.wrap(
                torch.utils.data._utils.worker, "_worker_loop", self._wrap_worker_loop
            ),
            "captures": self._install_captures,
            "compiled calls": lambda: self.wrap(torch, "compile", self._compiled.wrap_compile),
            "compiled modules": self._compiled.install,
            "compile's warnings": lambda: self.wrap(_modules, "_has_any_global_hook", self._wrap_has_hooks, often=True),
        }
        missing: list[str] = []
        for part, put_in in parts.items():
            try:
                put_in()
            except Exception as error:
                missing.append(f"{part} ({error})")
        if missing:
            say(f"this torch ({torch.__version__}) does not show everything; doing without: {', '.join(missing)}")
        process = self._process
        process.on_boundary = self._look
        process.on_failure = uninstall
        process.on_mark = self._marked
        process.on_another_thread = self._another_thread_iterates
        process.graph_is_alive = self._trained.graph_is_alive
        process.is_in_backward = is_in_backward

    def uninstall(self) -> None:
        self.active = False
        self.guarded(self.leave_usual)
        self._ignore_forwards()
        process = self._process
        process.on_boundary = process.on_failure = process.on_mark = process.on_another_thread = None
        while self._undo:
            self._undo.pop()()
        self._following.forget()

    @property
    def iterations(self) -> Iterations:
        """Of this thread."""
        return self._process.machine()

    @property
    def follows(self) -> bool:
        """Whether iterations follow one another, so that only their ends are looked at."""
        return self._following.on

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any], *, often: bool = False) -> None:
        """`often`: it is called in every iteration, and does nothing where they follow one another."""
        original = getattr(owner, name)
        wrapped = functools.wraps(original)(wrapper(original))
        setattr(owner, name, wrapped)
        if often:
            self._following.knows(InPlaceOf(owner, name, original, wrapped))

        def undo() -> None:
            # Somebody may have wrapped ours meanwhile; then it stays inside theirs and only calls on.
            if getattr(owner, name, None) is wrapped:
                setattr(owner, name, original)

        self._undo.append(undo)

    # Forwards.

    def _install_forwards(self) -> None:
        probe = torch.nn.Module()
        if not isinstance(probe._forward_hooks, dict) or not isinstance(probe._forward_hooks_always_called, dict):
            raise TypeError("a module's hooks are not where they were")
        handle = _modules.register_module_forward_pre_hook(self._pre_hook)
        self._looking = handle.hooks_dict_ref()
        self._key = handle.id
        self._undo.append(handle.remove)

    def look_for_forwards(self) -> None:
        self._look()

    def look_as_before(self) -> None:
        """As it should be where this capture had not been."""
        if self.iterations.kind is not NONE:
            self._ignore_forwards()

    def _look(self) -> None:
        """Look for the next top-level forward."""
        if self.active and self._looking is not None:
            if self._several:
                self.iterations.looks = True
            self._looking[self._key] = self._pre_hook

    def _ignore_forwards(self) -> None:
        if self._several:
            # Another thread may be looking for its own.
            self.iterations.looks = False
        elif self._looking is not None:
            self._looking.pop(self._key, None)

    def _looks(self) -> bool:
        return self._key in self._looking and (not self._several or self.iterations.looks)

    def _another_thread_iterates(self) -> None:
        self._several = True
        self._look()

    def _before_forward(self, module: Any, args: Any) -> None:
        if is_dynamo_compiling() or _flags._is_compiling_flag or not self.active:
            return
        try:
            if self._several and not self.iterations.looks:
                return
            usual = self._usual
            if usual is not None and self._usual_forward_began(usual, module):
                return
            if not (module._modules or module._parameters or module._buffers):
                return
            if self._cut and self._cut == get_ident():
                if _is_inside_another(_getframe(1)):
                    return  # the rest of that forward
                self._cut = 0
            if self._serves(module) or self._forward_began(module, module.training):
                frame = _getframe(1)
                # As register_forward_hook does, for a seventh of its time. Torch looks at these after the forward ran.
                with self._calls_lock:
                    module._forward_hooks[self._key] = _after_forward
                    module._forward_hooks_always_called[self._key] = True
                    self._calls[get_ident()] = frame.f_back, module
        except Exception as error:
            self.iterations.fail(error)

    def _usual_forward_began(self, usual: Usual, module: Any) -> bool:
        known: Any = usual.modules.get(id(module))
        if known is None or known() is not module or usual.thread != get_ident():
            return False
        if not module.training or not is_grad_enabled():
            return False
        iterations = usual.iterations
        if iterations.kind is NONE:
            if not usual.begin():
                return False
            self._forwarded.clear()
        elif iterations.kind is not TRAINING:
            return False
        self._forwarded.append(known)
        iterations.kind = TRAINING
        iterations.wants_backward = True
        self._looking.pop(self._key, None)
        return True

    def after_forward(self, module: Any, frame: Any) -> None:
        try:
            # The call that was followed, and not one inside it or beside it of the same module: torch calls hooks from
            # a function inside the call, or after an exception from the call itself. (After an interrupt it calls none:
            # then the followed call is over, and the module's next one cleans up.)
            call, _ = self._calls.get(get_ident(), (None, None))
            if call is None or (frame is not call and frame.f_back is not call and is_running(call, frame)):
                return
            with self._calls_lock:
                del self._calls[get_ident()]
                # After an exception torch walks the live dictionary, which may lose its last entry and no other.
                # And another thread may be in a call of the same module.
                shared = any(other is module for _, other in self._calls.values())
                if not shared and (next(reversed(module._forward_hooks)) == self._key or frame is not call):
                    del module._forward_hooks[self._key]
                    del module._forward_hooks_always_called[self._key]
            self.forward_ended(module)
        except Exception as error:
            self.iterations.fail(error)

    def leave_usual(self, *, has_begun: bool = False) -> None:
        """`has_begun`: the iteration that is open has; of those that follow one another it is not known by itself."""
        # In this order: iterations that follow one another are usual ones.
        followed = self.follows
        self._following.end()
        usual, serving, self._usual, self._serving = self._usual, self._serving, None, None
        self._habits.are_over()
        quick = usual or serving
        iterations = self.iterations if quick is None else quick.iterations
        if usual is not None and iterations.kind is TRAINING:
            has_begun = (followed and self._is_under_way()) or has_begun or not followed
            # (Of iterations that follow one another, forwards were not looked at.)
            modules = usual.modules.values() if followed else self._forwarded
            iterations.goes_on(list(modules), has_begun=has_begun)
        elif iterations.kind is NONE and self.memory is not None and self.active:
            self.memory.rest()
        if quick is not None and quick.thread != get_ident():
            iterations.tell_others()
            self._another_thread_iterates()

    def something_else_happens(self) -> None:
        """The iteration that is open, or is about to begin, is not like the others."""
        if self._usual is not None or self._serving is not None:
            self.leave_usual()
        self._habits.saw_something_else()

    def _are_alike(self, alike: bool) -> bool:
        """Whether the next iteration may begin in a quick way: the last ones were `alike`."""
        self._alone = self._alone + 1 if alike else 0
        # (In a quick way, forwards of other threads are overlooked.)
        enough = not self._several or self._alone >= ALONE
        return alike and enough and self._looking is not None and self._sees_captures

    def _wrap_worker_loop(self, original: Any) -> Any:
        def worker_loop(*args: Any, **kwargs: Any) -> Any:
            uninstall()
            return original(*args, **kwargs)

        return worker_loop

    # Iterations that follow one another.

    def _run_on(self, usual: Usual) -> None:
        """The last iterations were all alike and nobody waits: from now on only their ends are looked at."""
        self._usual_times = 0
        iterations = usual.iterations
        leader = None if iterations.leading is None else iterations.leading()
        optimizers = [known.optimizer() for known in usual.optimizers.values()]
        if leader is None or not self._following.can_begin or all(known is not leader for known in optimizers):
            return
        turn, self._following.on = None, True
        try:
            turn = iterations.run_on(functools.partial(self._sits, iterations))
        finally:
            # (Also where the handler of a signal raised. Else it may be over already, by another thread.)
            if turn is None:
                self._following.on = False
        if turn is None:
            return
        iterations.wants_backward = False
        self._ignore_forwards()
        sorts = self.memory is not None and self.memory.active
        self._following.begin(turn, iterations, leader, [known for known in optimizers if known is not None], sorts)

    def _sits(self, iterations: Iterations) -> None:
        """From another thread: no iteration has ended for long, and somebody waits."""
        # (If it fails, the hooks see to it when the script goes on.)
        with contextlib.suppress(Exception):
            iterations.let_go(functools.partial(self._cut_off, iterations), self._is_under_way)

    def _cut_off(self, iterations: Iterations) -> None:
        self._look_closely()
        self._cut = iterations.thread

    def _is_under_way(self) -> bool:
        """Whether a backward or a step is that was not seen to begin. To be asked once there are hooks again."""
        self._unseen = self._following.is_under_way()
        return self._unseen

    def _look_closely(self) -> None:
        self._following.end()
        self._usual = None
        self._habits.are_over()

    def _marked(self) -> None:
        """The script says itself where an iteration is."""
        quick = self._usual or self._serving
        if quick is not None and quick.thread != get_ident():
            self.leave_usual()
        elif self.follows:
            self._look_closely()

    def begin_anew(self) -> None:
        """For the child of a fork: the iterations and the memory that are open are the parent's, as is the lease."""
        self._process.first.begin_anew()
        if self.memory is not None:
            self.memory.begin_anew()
        self._look_closely()
        self._serving = None
        self._calls, self._calls_lock, self._step = {}, Lock(), _Step()
        self._several = self._unseen = False
        self._cut = 0
        self._look()

    def _serves(self, module: Any) -> bool:
        """The forward is like all those before it, and has begun."""
        serving = self._serving
        if serving is None or serving.module() is not module or serving.thread != get_ident() or is_grad_enabled():
            return False
        iterations = serving.iterations
        if iterations.kind is not NONE or not serving.begin():
            return False
        iterations.kind, iterations.thread = INFERENCE, serving.thread
        self._looking.pop(self._key, None)
        return True

    def _forward_began(self, module: Any, training: bool) -> bool:
        iterations, capture = self.iterations, self._graphs.noting()
        if capture is not None:
            capture.saw_forward(trains=training and is_grad_enabled())
            return False
        if self._usual is not None or self._serving is not None:
            self.leave_usual()
        self._habits.saw_forward(module, trains=training and is_grad_enabled())
        stepping = (self._step.began and self._steps_on(_getframe(1)) > 0) or (self._unseen and self._is_under_way())
        followed = iterations.forward(module, training, is_grad_enabled(), stepping)
        self._ignore_forwards()
        if iterations.kind is NONE:
            self._look()  # another thread ended it meanwhile
        return followed

    def forward_ended(self, module: Any = None) -> None:
        """`module`: of which all forwards are seen; those of a compiled function are not."""
        iterations, serving = self.iterations, self._serving
        mine = iterations.kind is INFERENCE and iterations.thread == get_ident()
        if serving is not None:
            if mine and serving.iterations is iterations:
                # In this order: whoever is interrupted on the way out begins again, with a lease.
                self._looking[self._key] = self._pre_hook
                iterations.kind = NONE
                if serving.end(1):
                    return
                iterations.kind = INFERENCE
            self.leave_usual()
        iterations.returned()
        if iterations.kind is TRAINING:
            self._look()
        elif mine and self._are_alike(self._habits.saw_inference(None if is_grad_enabled() else module)):
            quick = iterations.usual()
            if quick is not None:
                self._serving, self._several = Serving(get_ident(), iterations, ref(module), *quick), False

    def _wrap_train(self, original: Any) -> Any:
        def train(module: Any, mode: bool = True) -> Any:
            # After a forward nothing is looked for until its backward, but an evaluation may come instead.
            if not mode and not is_compiling():
                known = self._process.known()
                if known is not None and known.kind is TRAINING:
                    if self._usual is not None and self._usual.iterations is known:
                        self.guarded(self.leave_usual)
                    self._look()
            return original(module, mode)

        return train

    def usual_forward_began(self, module: Any) -> bool:
        usual = self._usual
        if usual is not None and self._looks():
            self._usual_forward_began(usual, module)
        return usual is not None

    def compiled_forward_began(self, module: Any) -> bool:
        self._habits.saw_something_else()
        if self._looking is not None and not self._looks():
            return False
        return self._forward_began(module, getattr(module, "training", True))

    def compiled_step_began(self) -> None:
        if self._graphs.noting() is None:
            self.iterations.step_began()

    def step_of_no_hook_ended(self, *optimizers: Any) -> None:
        self.iterations.steps += 1
        capture = self._graphs.noting()
        if capture is not None:
            for optimizer in optimizers:
                capture.saw_step(optimizer)
        elif not self._step.began and not capturing():
            self.iterations.step_ended(*optimizers)

    def stop_running_on(self, *, has_begun: bool = False) -> None:
        if self.follows:
            self.guarded(functools.partial(self.leave_usual, has_begun=has_begun))

    def _install_captures(self) -> None:
        self.wrap(_cuda.CUDAGraph, "capture_begin", self._graphs.wrap_begin)
        self.wrap(_cuda.CUDAGraph, "capture_end", self._graphs.wrap_end)
        self._sees_captures = True

    def _wrap_unusual(self, original: Any) -> Any:
        """After this iterations may be others, and what is allocated is not like what was."""

        def unusual(*args: Any, **kwargs: Any) -> Any:
            if self._usual is not None or self._serving is not None:
                self.guarded(self.leave_usual)
            return original(*args, **kwargs)

        return unusual

    def _install_building(self) -> None:
        # What a model is made of stays: it does not belong in the lane, where who is usual stays between iterations.
        for name in ("register_parameter", "_apply"):
            self.wrap(torch.nn.Module, name, self._wrap_unusual)
        # And a step may be made in such a hook, within a backward.
        self.wrap(torch.Tensor, "register_post_accumulate_grad_hook", self._wrap_unusual)

    def _wrap_has_hooks(self, original: Any) -> Any:
        def has_any_global_hook() -> bool:
            """As torch's own, but for ours: torch.compile would warn that it fires twice, which it does not."""
            if self._looking is None or self._key not in self._looking or is_dynamo_compiling():
                return bool(original())
            self._ignore_forwards()
            try:
                return bool(original())
            finally:
                self._look()

        return has_any_global_hook

    # Backwards.

    def _install_backward(self) -> None:
        # Torch's own call of its engine, where that is: nobody else looks it up, or keeps it.
        name = "_engine_run_backward" if hasattr(torch.autograd, "_engine_run_backward") else "backward"
        self._following.knows_code(torch.autograd.backward.__code__)
        self.wrap(torch.autograd, name, self._wrap_backward, often=True)

    def _wrap_backward(self, original: Any) -> Any:
        engine = getattr(original, "__name__", "") == "_engine_run_backward"

        def backward(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or _flags._is_compiling_flag or not self.active or self.follows:
                return original(*args, **kwargs)
            if engine and not kwargs.get("accumulate_grad"):
                return original(*args, **kwargs)  # of torch.autograd.grad
            iterations, capture = self.iterations, self._graphs.noting()
            if capture is not None:
                capture.saw_backward()
                return original(*args, **kwargs)
            # (tensors, grad_tensors, retain_graph, create_graph): a graph that is kept may be run through again.
            keeps = any(args[2:4]) or bool(kwargs.get("retain_graph") or kwargs.get("create_graph"))
            usual = self._usual
            if usual is not None:
                mine = usual.iterations is iterations
                if mine and iterations.kind is TRAINING and not keeps and not iterations.backwards:
                    return self._usual_backward(iterations, original, args, kwargs)
                self.guarded(self.leave_usual)
            graph_is_gone = False
            try:
                try:
                    iterations.backward_began()
                except Exception as error:
                    iterations.fail(error)
                result = original(*args, **kwargs)
                graph_is_gone = not keeps
                return result
            finally:
                if not graph_is_gone:
                    self._habits.saw_something_else()
                try:
                    iterations.backward_ended(graph_is_gone)
                    if iterations.kind is TRAINING:
                        self._look()
                except Exception as error:
                    iterations.fail(error)

        return backward

    def _usual_backward(self, iterations: Iterations, original: Any, args: Any, kwargs: Any) -> Any:
        running = iterations.backwards
        running.append(None)
        try:
            result = original(*args, **kwargs)
            iterations.wants_backward = False
            return result
        finally:
            if iterations.stepped_in_backward:
                self.guarded(iterations.backward_ended, True)
            elif running:
                running.pop()
            self._look()  # what comes may be an evaluation, instead of the step

    # Steps.

    def _install_steps(self) -> None:
        from torch.optim import optimizer as hooks

        handles = (
            hooks.register_optimizer_step_pre_hook(self._before_step),
            hooks.register_optimizer_step_post_hook(self._after_step),
        )
        before, after = (
            InTorch(handle.hooks_dict_ref() or {}, handle.id, ours)
            for handle, ours in zip(handles, (self._before_step, self._after_step), strict=True)
        )
        self._following.knows_steps(before, after)
        for handle in handles:
            self._undo.append(functools.partial(self._remove_step_hook, handle))

    def _remove_step_hook(self, handle: Any) -> None:
        # Torch walks the live dictionary. If we failed in a step, only the last entry may go; another stays, inactive.
        if not self.iterations.failed or next(reversed(handle.hooks_dict_ref()), None) == handle.id:
            handle.remove()

    def _wrap_optimizer_init(self, original: Any) -> Any:
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._process.optimizer_made(optimizer)
            self._trained.add(optimizer)
            if self._usual is not None:
                # Who leads depends on when it was made.
                self.guarded(self.leave_usual)
            original(optimizer, *args, **kwargs)

        return __init__

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_dynamo_compiling() or _flags._is_compiling_flag or not self.active:
            return
        try:
            if self._graphs.noting() is not None:
                return
            usual = self._usual
            if usual is not None:
                if not self.follows and self._usual_step_began(usual, optimizer, args, kwargs):
                    return
                self.leave_usual()
            step, iterations = self._step, self._process.machine(optimizer)
            if step.began:
                step.nests = True
            elif self._step_code is None:
                self._step_code = _getframe(1).f_code
                self._following.knows_code(self._step_code)
            step.began = True
            # With a closure the forward runs inside the step, and that is no state of the optimizer's.
            closure = _has_closure(args, kwargs)
            if closure:
                self._habits.saw_closure(begins=iterations.kind is NONE)
            iterations.step_began()
            memory = self.memory
            if memory is not None and memory.active and not closure and self._will_make_state(optimizer):
                memory.first_step_began()
                step.makes_state = True
        except Exception as error:
            self.iterations.fail(error)

    def _will_make_state(self, optimizer: Any) -> bool:
        if optimizer.state:
            return False
        known = self._stateless.get(id(optimizer))
        return known is None or known() is not optimizer

    def _usual_step_began(self, usual: Usual, optimizer: Any, args: Any, kwargs: Any) -> bool:
        known: Any = usual.optimizers.get(id(optimizer))
        iterations, step = usual.iterations, self._step
        if known is None or known.optimizer() is not optimizer or step.began or iterations.backwards:
            return False
        if usual.thread != get_ident():
            return False
        memory = self.memory
        if memory is not None and memory.active and self._will_make_state(optimizer):
            return False
        if known.closure != ((len(args) > 1 or bool(kwargs)) and _has_closure(args, kwargs)):
            return False
        if known.closure:
            if iterations.kind is not NONE or not usual.begin():
                return False
            self._forwarded.clear()
            iterations.kind = TRAINING
        elif iterations.kind is not TRAINING:
            return False
        step.began = True
        return True

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_dynamo_compiling() or _flags._is_compiling_flag or not self.active:
            return
        try:
            capture = self._graphs.noting()
            if capture is not None:
                self.iterations.steps += 1
                capture.saw_step(optimizer)
                return
            usual = self._usual
            if usual is not None:
                if not self.follows and self._usual_step_ended(usual, optimizer):
                    return
                self._leave_usual_after_step(usual)
            step, iterations = self._step, self._process.machine(optimizer)
            if step.nests and self._steps_on(_getframe(1)) > 1:
                return  # of a subclass that calls super().step(), or of an optimizer around this one
            step.began = False
            iterations.steps += 1
            memory = self.memory
            if step.makes_state:
                step.makes_state = False
                if not optimizer.state:
                    self._stateless = with_one_more(self._stateless, id(optimizer), ref(optimizer))
                if memory is not None and iterations.kind is not NONE:
                    memory.first_step_ended()
            if (memory is not None and not memory.gpu_is_used) or not capturing():
                iterations.step_ended(optimizer)
                if self._are_alike(self._habits.saw_step(optimizer)):
                    usual = self._habits.usual(iterations)
                    if usual is not None:
                        self._several, self._usual_times, self._usual = False, 0, usual
        except Exception as error:
            self.iterations.fail(error)

    def _leave_usual_after_step(self, usual: Usual) -> None:
        mine = usual.thread == get_ident()
        followed = self.follows
        self.leave_usual(has_begun=mine)
        if followed and not mine:
            # What led to this step was not looked for.
            self.iterations.step_began()

    def _usual_step_ended(self, usual: Usual, optimizer: Any) -> bool:
        iterations, known = usual.iterations, usual.optimizers.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer or usual.thread != get_ident():
            return False
        if iterations.kind is not TRAINING or iterations.backwards:
            return False
        leader = None if iterations.leading is None else iterations.leading()
        counted = leader is optimizer
        if not counted and (leader is None or iterations.steps_of_others >= LEADER_SILENT_STEPS - 1):
            return False
        # In this order: whoever is interrupted on the way out begins again, with a lease.
        self._looking[self._key] = self._pre_hook
        iterations.kind = NONE
        if not usual.end(counted):
            iterations.kind = TRAINING
            return False
        iterations.wants_backward = self._step.began = False
        iterations.steps += 1
        iterations.steps_of_others = 0 if counted else iterations.steps_of_others + 1
        self._usual_times += 1
        if self._usual_times >= habits.AFTER:
            self._run_on(usual)
        return True

    def steps_taken(self) -> int:
        return self.iterations.steps + self._following.steps_taken

    def _steps_on(self, frame: Any) -> int:
        """Of how many steps of optimizers does this frame lie within?"""
        steps = 0
        while frame is not None:
            steps += frame.f_code is self._step_code
            frame = frame.f_back
        return steps

    def guarded(self, report: Callable[..., Any], *args: Any) -> Any:
        try:
            return report(*args)
        except Exception as error:
            self.iterations.fail(error)
            return None


def _after_forward(module: Any, _args: Any, _result: Any) -> None:
    """The hook on one module during one call. A plain function, so that the module can still be copied and pickled."""
    if _watch is not None and not is_compiling():
        _watch.after_forward(module, _getframe(1))


def _is_inside_another(frame: Any) -> bool:
    """Whether the call of a module that this frame belongs to is made within another one's."""
    calls = 0
    while frame is not None and calls < 2:
        calls += frame.f_code is _CALL
        frame = frame.f_back
    return calls == 2


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Of a step; the first of its arguments is the optimizer."""
    return any(arg is not None for arg in args[1:]) or kwargs.get("closure") is not None


def _after_fork() -> None:
    if _watch is not None:
        _watch.begin_anew()


os.register_at_fork(after_in_child=_after_fork)
