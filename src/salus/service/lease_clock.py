"""What a lease costs its holder: what the job says it used, and no less than the time for which it kept others waiting.

A job counts its time on the device itself, since only it knows when its work was done. One that counts nothing would
look as if it had never had the device, and would have it for ever. So while another job waits in the lane, the wall
time of the lease is looked at too. An honest job uses nearly all of that time; between two iterations it is busy with
itself, and waking up takes it a moment, so a little less is believed.
"""

from __future__ import annotations

BELIEVED_PART = 0.9
BELIEVED_S = 0.005
"""A job is believed that says it used at least this part of the time for which others waited, less this much."""


class LeaseClock:
    """The time of one lease, from its grant on."""

    def __init__(self, granted_s: float) -> None:
        self._since_s = granted_s
        """Since when others wait."""
        self._said_s = self._charged_s = 0.0

    def charge(self, said_s: float, now_s: float, *, others_wait: bool) -> float:
        """How much more is to be charged, now that the job says it used so much more."""
        if not others_wait:
            self._since_s, self._said_s, self._charged_s = now_s, 0.0, 0.0
            return said_s
        self._said_s += said_s
        waited_s = now_s - self._since_s
        believed = self._said_s >= BELIEVED_PART * waited_s - BELIEVED_S
        total_s = self._said_s if believed else waited_s
        more_s = max(0.0, total_s - self._charged_s)
        self._charged_s += more_s
        return more_s
