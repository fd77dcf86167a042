"""The states that `salus ps` shows, in the order in which a job may go through them."""

from __future__ import annotations

STATES = (
    "returning",
    "waiting",
    "starting",
    "ready",
    "running",
    "idle",
    "stuck",
    "parked",
    "paging-out",
    "paged-out",
    "paging-in",
    "pausing",
    "paused",
    "unmanaged",
    "done",
    "failed",
    "cancelled",
    "lost",
)
