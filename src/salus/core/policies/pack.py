"""As many lanes as fit, all in parallel; arrival order inside a lane. For throughput: many small jobs at once."""

from __future__ import annotations

from salus.core.policies.base import Policy


class Pack(Policy):
    """As many jobs at once as fit, in the order of arrival; no fairness."""

    name = "pack"
