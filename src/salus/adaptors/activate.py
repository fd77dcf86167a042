"""Turns Salus on in a job's process, once its framework is there. Called by bootstrap/sitecustomize.py."""

from __future__ import annotations

from salus.client import lease


def torch_imported() -> None:
    ours = lease.of_this_process()
    if ours is not None:
        from salus.adaptors import torch as adaptor
        from salus.adaptors.iterations import Iterations
        from salus.adaptors.torch_memory import RoutedLease, TorchMemory

        memory = TorchMemory(ours)
        adaptor.install(Iterations(RoutedLease(ours, memory)), memory)
        memory.install()
