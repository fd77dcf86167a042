"""What the optimizers of a PyTorch script train: whether a backward may still reach it, and whether a step changed it.

Must not know: iterations, leases, memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any
from weakref import ReferenceType, ref

import torch

LOOKED_AT = 8
"""Of the tensors that an optimizer changes in a step, so many are looked at; of the others it is assumed."""


class Trained:
    def __init__(self) -> None:
        self._optimizers: list[ReferenceType[Any]] = []

    def add(self, optimizer: Any) -> None:
        self._optimizers = [known for known in self._optimizers if known() is not None]
        self._optimizers.append(ref(optimizer))

    def optimizers(self) -> list[Any]:
        return [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    def graph_is_alive(self) -> bool:
        """May a backward still come that reaches a parameter? True where that cannot be told."""
        try:
            with torch.inference_mode(False), torch.enable_grad():
                optimizers = self.optimizers()
                return not optimizers or any(
                    parameter.requires_grad and _reached_by_graph(parameter)
                    for optimizer in optimizers
                    for group in optimizer.param_groups
                    for parameter in group["params"]
                )
        except Exception:
            return True  # a parameter of a kind that we do not know

    def before_call(self) -> Versions:
        """What the optimizers would change, as it is before the call of something that may contain their step."""
        return [(optimizer, _versions(optimizer)) for optimizer in self.optimizers()]


Versions = list[tuple[Any, list[tuple[Any, int]]]]
"""Optimizers, and the tensors of each, with their versions."""


def stepped(before: Versions) -> list[Any]:
    """The optimizers that have taken a step since."""
    return [
        optimizer for optimizer, versions in before if any(_version(tensor) != version for tensor, version in versions)
    ]


def _versions(optimizer: Any) -> list[tuple[Any, int]]:
    try:
        return [(tensor, version) for tensor in _changed_by_step(optimizer) if (version := _version(tensor)) >= 0]
    except Exception:
        return []  # an optimizer of a kind that we do not know


def _changed_by_step(optimizer: Any) -> Iterator[Any]:
    """Its state, since scripts change parameters too (they clip them, say); where there is none, its parameters."""
    # (A parameter that gets no gradient has no state.)
    state = (
        value
        for of_one in islice(optimizer.state.values(), LOOKED_AT)
        for value in (of_one.values() if isinstance(of_one, dict) else ())
        if isinstance(value, torch.Tensor)
    )
    parameters = (
        parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
    )
    first = next(state, None)
    return iter((first, *state)) if first is not None else islice(parameters, 4 * LOOKED_AT)


def _version(tensor: Any) -> int:
    """Torch counts it up whenever the tensor is changed in place, in compiled code too; -1: it is not counted."""
    try:
        return int(tensor._version)
    except RuntimeError:
        return -1


class _Token:
    __slots__ = ("__weakref__",)


def _reached_by_graph(parameter: Any) -> bool:
    """Is a graph alive through which a backward would reach this parameter?

    All such graphs share one node, which lives as long as the last of them. What we hang on it (on its metadata, where
    anomaly detection keeps notes) dies at once if there is none.
    """
    node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
    token = _Token()
    node.metadata["salus"] = token
    alive = ref(token)
    del node, token
    return alive() is not None
