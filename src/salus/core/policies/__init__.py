"""The policies that come with Salus. Each is one small file; `base` says what a policy is.

Adding one here means its file and a line of this table. Another package adds one through the entry point group
`salus.policies` and touches nothing here (see `salus.plugins`).
"""

from __future__ import annotations

from salus.core.policies.base import Moment, Option, Policy, Rotation, build, fill
from salus.core.policies.fair import Fair
from salus.core.policies.fifo import Fifo
from salus.core.policies.las import Las
from salus.core.policies.pack import Pack
from salus.core.policies.priority import Priority
from salus.core.policies.rr import RoundRobin
from salus.core.policies.srtf import Srtf

SHIPPED: tuple[type[Policy], ...] = (Fair, Fifo, Las, Pack, Priority, RoundRobin, Srtf)

DEFAULT_POLICY = "fair"
DEFAULT_SYSTEM_POLICY = "fair:by=user"
"""Of the machine-wide service: each user gets the same, however many jobs and whatever weights they have."""

__all__ = [
    "DEFAULT_POLICY",
    "DEFAULT_SYSTEM_POLICY",
    "SHIPPED",
    "Moment",
    "Option",
    "Policy",
    "Rotation",
    "build",
    "fill",
]
