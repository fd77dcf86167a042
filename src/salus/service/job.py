"""A job as the service knows it, and the descriptors that hang on it."""

from __future__ import annotations

import os
import select
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from salus.protocol import messages as msg
from salus.protocol.page import Page
from salus.service.connection import Connection
from salus.service.lease_clock import LeaseClock
from salus.service.memory import Link
from salus.service.report import Report
from salus.service.utilization import Measured

if TYPE_CHECKING:
    from salus.service.live import Live


@dataclass(eq=False)
class LiveJob:
    """A job as the service knows it, from its registration to after its end."""

    job_id: str
    token: str
    uid: int
    asked: msg.Register
    key: str
    submitted_at: float
    launcher: Connection | None
    live: Live
    """The device it runs on."""
    worker: Connection | None = None
    """The process that uses the device."""
    at_the_door: tuple[Connection, msg.Attach] | None = None
    """The process that is to use the device, and waits until there is room for its context."""
    last_pid: int = 0
    """Of the process that uses the device, or did."""
    fault: str | None = None
    """Why it ended, where that was not its own doing."""
    page: Page | None = None
    report: Report | None = None
    """What it says on that page."""
    page_descriptor: int = -1
    grant_event: int = -1
    link: Link | None = None
    """The channel to its arena, if it has one."""
    pidfd: int = -1
    """The process with the arena."""
    watched: bool = False
    ends_with: tuple[int | None] | None = None
    """The job has ended, with this status, but its process has not."""
    measured: bool = False
    """Its size was declared, is known from an earlier run, or has been seen."""
    growing_since: float = 0.0
    used: dict[str, int] | None = None
    """What its process used, once that is gone."""
    returning: bool = False
    """It was here before a restart of the service, and has not come back yet."""
    came: bool = False
    """A process of it wanted to use the device, at some time."""
    told_of_another: bool = False
    """A process of it was told that another one uses the device; once is enough, however many there are."""
    waited_for: int = 0
    """The process by which it would come back."""
    launched_by: int = 0
    had_worker: bool = False
    recorded_lane: int | None = None
    """The lane it is in by our own records, which outlive us."""
    may_return: bool = False
    """Its launcher came back and the process that used the device did not, or not yet."""
    grants: int = 0
    runs_already: bool = False
    """The lease that it is granted now came to it straight from the job before it."""
    page_orders: int = 0
    clears: bool = False
    """It is told to clear what it leaves in the lane."""
    cleared: bool = False
    """It was told, when its lease began, to clear what it leaves in the lane."""
    prepared_bytes: int = 0
    """It was told that so much of it may be paged out."""
    yields_late: bool | None = None
    """It gave its lease up while one of its threads waits for memory; and whether it wants more."""
    sm_share: int | None = None
    """Under MPS, of the GPU's multiprocessors, in percent; None: all."""
    activity: Measured | None = field(default_factory=Measured)
    """How busy it keeps the GPU; None: it is not looked at."""
    internal_seen: int = -1
    """What the last look found that its arena does not know of."""
    stopped_looks: int = 0
    """How often in a row its process was found stopped (`stopped`)."""
    lost_lease: bool = False
    """Its lease was taken from it while it was stopped, and it has yet to find out."""
    passed: int = -1
    """Boundaries, at the last look for jobs that sit between two."""
    boundaries: int = 0
    boundary_at: float = 0.0
    """When it was last seen to have passed one."""
    revoked_at: float | None = None
    """When it was asked to give up the lease that it has; None: it was not."""
    lease_clock: LeaseClock | None = None
    """Of the lease that it holds."""
    reported_iterations: int = 0
    reported_ns: int = 0
    started_at: float | None = None
    finished_at: float | None = None
    exit_code: int | None = None
    cancelled: bool = False
    paused_by: int | None = None
    """The user who paused it; None: it is not paused."""
    last_queued: msg.Queued | None = None
    final: dict[str, Any] = field(default_factory=dict)
    counted: dict[str, float] = field(default_factory=dict)
    """What it did by its launcher's word, where only the service before us could see it."""
    waiters: list[Connection] = field(default_factory=list)

    @property
    def process(self) -> Connection | None:
        """The process that uses the device, or waits to."""
        return self.worker or (None if self.at_the_door is None else self.at_the_door[0])

    def has_again(self, internal_bytes: int, about_bytes: int) -> bool:
        """Whether two looks in a row found about the same of what its arena does not know of."""
        before, self.internal_seen = self.internal_seen, internal_bytes
        return before >= 0 and abs(internal_bytes - before) < about_bytes

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        if self.page is not None:
            self.page.close()
            os.close(self.page_descriptor)
            if self.grant_event >= 0:
                os.close(self.grant_event)
            self.page, self.report, self.grant_event = None, None, -1


def is_alive(pid: int) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    alive = not is_dead(pidfd)
    os.close(pidfd)
    return alive


def is_dead(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def has_page(pid: int) -> bool:
    """Whether the process has mapped a page of ours, and so may have a lane as well. One that cannot be seen may."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            return b"/memfd:salus-page" in file.read()
    except OSError:
        return True
