"""Events and actions as plain JSON and back, for the journal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_args

from salus.core import actions as act
from salus.core import events as ev
from salus.core.model import Footprint, GpuConfig, JobSpec
from salus.core.policies import Policy

_CLASSES: dict[str, type] = {
    kind.__name__: kind for kind in (*get_args(ev.Event), *get_args(act.Action), Footprint, JobSpec, GpuConfig)
}


def to_plain(value: Any) -> Any:
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
