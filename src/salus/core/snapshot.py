"""The whole state of a scheduler as plain values, and a scheduler made from them that goes on in exactly the same way.

A journal that is cut into segments begins each of them with a snapshot, so that each can be replayed by itself.
Everything is taken as it is, attribute by attribute, so a new attribute needs no line here. Only a job's story is left
out: it explains a broken invariant and decides nothing.

Plain values are what JSON has. An object is written once, in a table; elsewhere stands its number there.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from salus.core.lanes import Lane, LaneTable
from salus.core.model import STORY_LENGTH, Footprint, GpuConfig, Job, JobSpec, Lease, Phase, Stuck
from salus.core.order import Group, OrderedJobs
from salus.core.policies.base import Policy
from salus.core.state import LaneLeases, State
from salus.errors import SalusError

_CLASSES: tuple[type, ...] = (
    State, LaneTable, Lane, LaneLeases, OrderedJobs, Group, Job, JobSpec, Footprint, GpuConfig, Phase, Lease,
    Stuck,
)  # fmt: skip
_FACTORIES: dict[str, Any] = {factory.__name__: factory for factory in (int, float, list, set, dict)}
_LEFT_OUT = ((Job, "story"),)


class SnapshotFailed(SalusError):
    """The state holds something that has no plain form, or the snapshot was taken by another version of Salus."""


def take(state: State) -> dict[str, Any]:
    return _Writer(state.policy).write(state)


def restore(plain: dict[str, Any], policy: Policy) -> State:
    """The state as it was. `policy` is a new one of the same kind and with the same parameters."""
    try:
        state = _Reader(plain, policy).read()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise SnapshotFailed(f"the snapshot cannot be read ({type(error).__name__}: {error})") from None
    fresh = State(state.config, policy)
    for ours, expected in ((state, fresh), (state.lanes, fresh.lanes)):
        if vars(ours).keys() != vars(expected).keys():
            raise SnapshotFailed("the snapshot was taken by another version of Salus")
    return state


def _attributes(kind: type) -> list[str] | None:
    """None: they are in the object's own dictionary."""
    if is_dataclass(kind):
        return [one.name for one in fields(kind) if (kind, one.name) not in _LEFT_OUT]
    slots = getattr(kind, "__slots__", None)
    return None if slots is None else list(slots)


class _Writer:
    def __init__(self, policy: Policy) -> None:
        self._classes = {*_CLASSES, *policy.note_classes, type(policy)}
        self._numbers: dict[int, int] = {}
        self._objects: list[list[Any]] = []
        self._names: dict[str, list[str]] = {}
        """The attributes of each class, in the order in which its objects have them."""
        self._pending: list[Any] = []

    def write(self, root: object) -> dict[str, Any]:
        self._plain(root)
        # A queue rather than recursion: jobs refer to one another.
        for value in self._pending:
            names, row = self._names[type(value).__name__], self._objects[self._numbers[id(value)]]
            row += [self._plain(getattr(value, name)) for name in names]
        return {"classes": self._names, "objects": self._objects}

    def _plain(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self._plain(one) for one in value]
        if kind is tuple:
            return {"tuple": [self._plain(one) for one in value]}
        if kind in (set, frozenset):
            # The order of a set is an accident.
            return {kind.__name__: sorted((self._plain(one) for one in value), key=repr)}
        if kind is dict:
            return {"dict": [[self._plain(key), self._plain(one)] for key, one in value.items()]}
        if kind is defaultdict and value.default_factory in _FACTORIES.values():
            items = [[self._plain(key), self._plain(one)] for key, one in value.items()]
            return {"defaultdict": items, "of": value.default_factory.__name__}
        if kind is deque:
            return {"deque": [self._plain(one) for one in value], "most": value.maxlen}
        if kind not in self._classes:
            raise SnapshotFailed(f"a {kind.__name__} has no plain form")
        if isinstance(value, Enum):
            return {kind.__name__: self._plain(value.value)}
        return self._number(value, kind)

    def _number(self, value: Any, kind: type) -> dict[str, int]:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            names = _attributes(kind)
            self._names.setdefault(kind.__name__, list(vars(value)) if names is None else names)
            self._objects.append([kind.__name__])
            # It also keeps the value, and so its id, until the end.
            self._pending.append(value)
        return {"#": number}


class _Reader:
    def __init__(self, plain: dict[str, Any], policy: Policy) -> None:
        self._classes = {kind.__name__: kind for kind in (*_CLASSES, *policy.note_classes, type(policy))}
        self._plain, self._policy = plain, policy
        for name, names in plain["classes"].items():
            if (expected := _attributes(self._classes[name])) is not None and expected != names:
                raise SnapshotFailed(f"the snapshot was taken by another version of Salus: it knows another {name}")
        self._objects = [self._empty(row[0]) for row in plain["objects"]]

    def read(self) -> State:
        for made, (name, *values) in zip(self._objects, self._plain["objects"], strict=True):
            for attribute, value in zip(self._plain["classes"][name], values, strict=True):
                # Also of a frozen class.
                object.__setattr__(made, attribute, self._value(value))
        root = self._objects[0]
        if not isinstance(root, State):
            raise SnapshotFailed("the snapshot is not that of a scheduler")
        return root

    def _empty(self, name: str) -> Any:
        kind = self._classes[name]
        if kind is type(self._policy):
            return self._policy
        made: Any = object.__new__(kind)
        if kind is Job:
            made.story = deque(maxlen=STORY_LENGTH)
        return made

    def _value(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return [self._value(one) for one in plain]
        if not isinstance(plain, dict):
            return plain
        if "#" in plain:
            return self._objects[plain["#"]]
        kind, parts = next(iter(plain.items()))
        if kind in ("dict", "defaultdict"):
            items = {self._value(key): self._value(value) for key, value in parts}
            return items if kind == "dict" else defaultdict(_FACTORIES[plain["of"]], items)
        if kind == "deque":
            return deque(map(self._value, parts), maxlen=plain["most"])
        if kind in ("tuple", "set", "frozenset"):
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(self._value, parts))
        return self._classes[kind](self._value(parts))
