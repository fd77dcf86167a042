"""Turns Salus on in a process of a job: when its framework is there (bootstrap/sitecustomize.py), or at its first mark.

There is one `Iterations` in a process. A mark that comes before the framework makes it with the bare lease: the job
takes turns. When torch is imported later, its hooks and its memory join the same one, so nothing counts twice.

In the child of a fork everything begins anew: the lease stayed with the parent. A child that uses the device attaches
by itself (`Lease`). Where the device is a GPU, iterations of a child count as use of it only once it uses the GPU.
"""

from __future__ import annotations

import os
import sys
from threading import RLock
from typing import TYPE_CHECKING

from salus.adaptors.iterations import Iterations, set_installed
from salus.client import lease

if TYPE_CHECKING:
    from salus.adaptors.torch_memory import TorchMemory

_lock = RLock()
_iterations: Iterations | None = None
"""Of this process, once it is a job's and has a framework or a mark."""
_memory: TorchMemory | None = None


def counter_for_marks() -> Iterations | None:
    """What marks speak to; None where this process belongs to no job. The copies of `salus.marks` count on it."""
    with _lock:
        if _memory is None and "torch" in sys.modules:
            torch_imported()
        return _of_this_process()


def torch_imported() -> None:
    global _memory
    with _lock:
        ours, iterations = lease.of_this_process(), _of_this_process()
        if ours is None or iterations is None or _memory is not None:
            return
        from salus.adaptors import torch as adaptor
        from salus.adaptors.torch_memory import RoutedLease, TorchMemory

        _memory = TorchMemory(ours)
        iterations.take_lease(RoutedLease(ours, _memory))
        adaptor.install(iterations, _memory)
        _memory.install()
        # After the adaptor has registered its own.
        os.register_at_fork(after_in_child=_after_fork_with_torch)


def _of_this_process() -> Iterations | None:
    global _iterations
    ours = lease.of_this_process()
    if _iterations is None and ours is not None:
        _iterations = Iterations(ours)
        set_installed(_iterations)
        os.register_at_fork(after_in_child=_after_fork)
    return _iterations


def _after_fork() -> None:
    global _lock
    _lock = RLock()
    if _iterations is not None:
        _iterations.begin_anew()


def _after_fork_with_torch() -> None:
    from salus.adaptors import torch as adaptor

    watch, memory = adaptor.installed(), _memory
    if watch is None or memory is None or not os.environ.get("SALUS_GPU"):
        return
    # It may compute on the processor alone: data that is prepared by a model, say. Then it takes no part.
    watch.uninstall()
    memory.on_first_use = watch.install
