"""A service that was killed and is started again: how its jobs find it.

A service that ends takes its socket away; one that is killed leaves it behind. So it is known whether to wait.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from salus.client.connection import ServiceConnection
from salus.errors import SalusError, ServiceUnavailable

RETRY_S = 0.05
GONE_S = 0.5
"""A socket that is not there for this long was taken away for good."""


def patience_s() -> float:
    """How long a job waits for a service that was killed, before it goes on without."""
    try:
        return float(os.environ.get("SALUS_RECONNECT_S", "30"))
    except ValueError:
        return 30.0


def connect_again(path: Path) -> ServiceConnection | None:
    """A connection to the service that took the place of a killed one; None if there is none to be had."""
    deadline = time.monotonic() + patience_s()
    seen = time.monotonic()
    while time.monotonic() < deadline:
        try:
            return ServiceConnection(path)
        except ServiceUnavailable:
            if path.exists():
                seen = time.monotonic()
            elif time.monotonic() > seen + GONE_S:
                return None
            time.sleep(RETRY_S)
        except SalusError:
            return None
    return None
