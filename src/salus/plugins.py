"""Finds policies: those shipped, and those that other installed packages add.

A package adds one in its own pyproject.toml:

    [project.entry-points."salus.policies"]
    mine = "my_package.my_module:MyPolicy"

This sits outside of `core` because it looks at what is installed.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from salus.core.policies import SHIPPED, Policy, build
from salus.errors import RequestRejected

GROUP = "salus.policies"


def policy_classes() -> dict[str, type[Policy]]:
    """Every policy that can be loaded, by name."""
    return _find()[0]


def load_policy(spec: str) -> Policy:
    """A policy as a user writes it: `fair`, `fair:by=memory`, `srtf:fill=off`."""
    name = spec.strip().partition(":")[0]
    shipped = {policy.name: policy for policy in SHIPPED}
    if name in shipped:
        return build(spec, shipped)  # without a look at what else is installed, which takes its time
    classes, broken = _find()
    if name in broken:
        raise RequestRejected(f"policy {name!r} cannot be loaded: {broken[name]}")
    return build(spec, classes)


def _find() -> tuple[dict[str, type[Policy]], dict[str, str]]:
    """Policies by name, and what is wrong with those that cannot be loaded.

    One broken package must not take away the policies of the others, and none can replace a shipped one.
    """
    classes = {policy.name: policy for policy in SHIPPED}
    broken: dict[str, str] = {}
    for point in entry_points(group=GROUP):
        if point.name in classes:
            continue
        try:
            loaded = point.load()
        except Exception as error:
            broken[point.name] = f"{point.value}: {type(error).__name__}: {error}"
            continue
        if isinstance(loaded, type) and issubclass(loaded, Policy):
            classes[point.name] = loaded
        else:
            broken[point.name] = f"{point.value} is not a subclass of salus.core.policies.Policy"
    return classes, broken
