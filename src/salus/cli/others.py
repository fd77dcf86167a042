"""The jobs of others in `ps` and `top`: how many, and what they use together."""

from __future__ import annotations

from typing import Any

from salus.units import format_bytes


def others_line(status: dict[str, Any]) -> str | None:
    """None: there are none, or all of them may be seen."""
    others = status.get("others")
    if not others or not others["jobs"]:
        return None
    jobs = f"{others['jobs']} {'job' if others['jobs'] == 1 else 'jobs'}"
    return f"others: {jobs}, {format_bytes(others['memory_bytes'])}, {others['share']:.0%} of the device's time"
