"""Events and actions as lines of the journal, and back.

A line is a list: how many nanoseconds after the line before, the event, then the actions. An event or an action is a
list as well: its name and its fields in order, without the last ones that have their default values. Times within are
whole nanoseconds, that of an order counted from now. What is not whole nanoseconds is written as it is, so that an
event is read exactly as it was; an order to within a nanosecond.

Journals of format 1 had an object for each, with the names of the fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args

from salus.core import actions as act
from salus.core import events as ev
from salus.core.model import Footprint, GpuConfig, JobSpec
from salus.core.policies import Policy

NS = 1e9
_CLASSES: dict[str, type] = {
    kind.__name__: kind for kind in (*get_args(ev.Event), *get_args(act.Action), Footprint, JobSpec, GpuConfig)
}
_DURATIONS = {("IterationFinished", "gpu_time_s")}
_MOMENTS = {("SetTimer", "at_s")}
_NOTHING = object()
"""The default of a field that has none."""


def _field(kind: type, name: str, default: Any) -> tuple[str, Any, bool, bool]:
    key = kind.__name__, name
    return name, _NOTHING if default is MISSING else default, key in _DURATIONS, key in _MOMENTS


_FIELDS = {kind: tuple(_field(kind, one.name, one.default) for one in fields(kind)) for kind in _CLASSES.values()}


def pack(value: Any, now: float) -> Any:
    """An event, an action or a part of one."""
    shape = _FIELDS.get(type(value))
    if shape is None:
        return {"policy": str(value)} if isinstance(value, Policy) else value
    packed: list[Any] = [type(value).__name__]
    length = 1
    for name, default, is_duration, is_moment in shape:
        part = getattr(value, name)
        if is_duration:
            packed.append(whole_ns(part))
        elif is_moment:
            packed.append(round((part - now) * NS))
        else:
            packed.append(part if type(part) in (str, int, float, bool) else pack(part, now))
        # (True is 1, and 1.0 is 1 as well.)
        if part is not default and (part != default or type(part) is not type(default)):
            length = len(packed)
    return packed[:length]


def unpack(packed: Any, now: float, load_policy: Callable[[str], Policy]) -> Any:
    if isinstance(packed, dict):
        return load_policy(packed["policy"])
    if not isinstance(packed, list):
        return packed
    kind = _CLASSES[packed[0]]
    given: dict[str, Any] = {}
    for (name, _, is_duration, is_moment), part in zip(_FIELDS[kind], packed[1:], strict=False):
        if is_duration and isinstance(part, int):
            given[name] = part / NS
        elif is_moment:
            given[name] = now + part / NS
        else:
            given[name] = unpack(part, now, load_policy)
    return kind(**given)


def whole_ns(seconds: float) -> float | int:
    """The number of nanoseconds, if it says exactly the same."""
    ns = round(seconds * NS)
    return ns if ns / NS == seconds else float(seconds)


def to_plain(value: Any) -> Any:
    """With the names of the fields, as people and format 1 have it."""
    if isinstance(value, Policy):
        return {"kind": "Policy", "spec": str(value)}
    if is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__, **{f.name: to_plain(getattr(value, f.name)) for f in fields(value)}}
    return value


def from_plain(value: Any, load_policy: Callable[[str], Policy]) -> Any:
    if not isinstance(value, dict):
        return value
    parts = {key: from_plain(part, load_policy) for key, part in value.items() if key != "kind"}
    return load_policy(parts["spec"]) if value["kind"] == "Policy" else _CLASSES[value["kind"]](**parts)
