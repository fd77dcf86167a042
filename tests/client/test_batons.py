"""How a lease is taken that comes straight from another job, word by word."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from salus.client.lease import Lease
from salus.protocol.descriptors import Event
from salus.protocol.page import BatonPage, Page, Word

MS = 1_000_000


class Counting(list):
    """Words of a page; the service counts the very lease that is taken, as soon as the job has looked once."""

    def __getitem__(self, index):
        value = super().__getitem__(index)
        if index == Word.GRANTS:
            super().__setitem__(Word.GRANTS, 4)
            super().__setitem__(Word.BATON, 0)
        return value


def a_lease() -> tuple[Lease, BatonPage]:
    lease = Lease(Path("/nowhere"), "1", "token")
    _, descriptor = Page.create()
    batons = BatonPage(descriptor, os.eventfd(0, os.EFD_NONBLOCK))
    os.close(descriptor)
    lease._batons = batons
    return lease, batons


def passed(batons: BatonPage, ticket: int) -> None:
    batons._page.words[ticket % 512] = 2 * ticket + 1


def test_a_lease_that_the_service_counts_meanwhile_is_counted_once():
    lease, batons = a_lease()
    words = Counting([0] * 64)
    list.__setitem__(words, Word.GRANTS, 3)
    list.__setitem__(words, Word.BATON, 9)
    lease._words, lease._taken = words, 3  # type: ignore[assignment]
    passed(batons, 9)
    assert lease._accept_grant() and lease._taken == 4
    assert not lease._accept_grant(), "there was one lease"


def test_a_ticket_is_good_for_one_lease_and_a_grant_uses_it_up():
    lease, batons = a_lease()
    words = lease._words
    words[Word.BATON] = 9
    assert not lease._accept_grant()
    batons.comes(9)
    assert batons.is_coming(9) and not lease._accept_grant()
    passed(batons, 9)
    assert lease._accept_grant() and lease._taken == 1
    assert not lease._accept_grant() and lease._ticket() == 0
    words[Word.BATON], words[Word.GRANTS] = 10, 2
    assert lease._accept_grant() and lease._taken == 2
    passed(batons, 10)
    assert not lease._accept_grant(), "the service gave it already"


def test_what_is_left_of_an_old_ticket_is_nobodys():
    lease, batons = a_lease()
    passed(batons, 9)
    lease._words[Word.BATON] = 9 + 512
    assert not batons.is_coming(9 + 512) and not lease._accept_grant()


def test_the_next_one_is_woken_at_the_end_of_the_iteration_and_not_only_when_the_script_goes_on():
    lease, batons = a_lease()
    lease._memory, lease._holding = SimpleNamespace(will_yield=lambda: None), True  # type: ignore[assignment]
    lease._words[Word.REVOKE], lease._words[Word.PASS] = 1, 9
    lease.end()
    assert batons.is_coming(9) and not batons.is_passed(9)
    assert os.eventfd_read(batons.bell) == 1


class Resuming:
    times = 0

    def will_resume(self) -> None:
        self.times += 1


class Clock:
    """Time that goes on while the job looks or sleeps. What is to happen at a time happens then, and ends its sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 0
        self.happens: list[tuple[int, Callable[[], None]]] = []
        self.looked_ns = 0
        monkeypatch.setattr("salus.client.lease._now_ns", lambda: self.now_ns)
        monkeypatch.setattr("os.sched_yield", self.look)

    def look(self) -> None:
        self.looked_ns += 10_000
        self._go_on(10_000)

    def poll(self, at_most_ms: int | None) -> None:
        until_next = self.happens[0][0] - self.now_ns
        self._go_on(until_next if at_most_ms is None else min(until_next, at_most_ms * MS))

    def _go_on(self, ns: int) -> None:
        self.now_ns += ns
        while self.happens and self.happens[0][0] <= self.now_ns:
            self.happens.pop(0)[1]()


@pytest.mark.parametrize(("boundary_ms", "device_ms"), [(12, 0.1), (0.2, 15), (5, 5)])
def test_who_has_a_ticket_is_awake_when_its_lease_comes_and_asleep_before_that(monkeypatch, boundary_ms, device_ms):
    lease, batons = a_lease()
    clock = Clock(monkeypatch)
    lease._memory, lease._grant_event = Resuming(), Event(os.eventfd(0, os.EFD_NONBLOCK))  # type: ignore[assignment]
    lease._bell_poll = clock  # type: ignore[assignment]
    asleep = 0
    for ticket in range(9, 59):
        lease._words[Word.BATON] = ticket
        began, clock.looked_ns = clock.now_ns, 0
        at_boundary = began + int(boundary_ms * MS)
        clock.happens = [
            (at_boundary, functools.partial(batons.comes, ticket)),
            (at_boundary + int(device_ms * MS), functools.partial(passed, batons, ticket)),
            (began + 100 * MS, lambda: None),
        ]
        looked = lease._look_for_grant()
        while not lease._accept_grant():
            lease._sleep(looked)
            asleep += ticket > 12 and batons.is_passed(ticket)
            looked = lease._look_for_grant()
        assert ticket < 13 or clock.looked_ns < 3 * MS
        lease._holding = False
    assert asleep == 0 and lease._memory.times == 50, "and has taken in what the service sent"


def test_a_lease_that_comes_in_a_moment_is_not_napped_for(monkeypatch):
    lease, batons = a_lease()
    clock = Clock(monkeypatch)
    lease._memory, lease._grant_event = Resuming(), Event(os.eventfd(0, os.EFD_NONBLOCK))  # type: ignore[assignment]
    naps = []

    def poll(at_most_ms: int | None) -> None:
        naps.append(batons.is_coming(lease._words[Word.BATON]))
        Clock.poll(clock, at_most_ms)

    lease._bell_poll = SimpleNamespace(poll=poll)  # type: ignore[assignment]
    for ticket in range(9, 39):
        lease._words[Word.BATON] = ticket
        at_boundary = clock.now_ns + 12 * MS
        clock.happens = [
            (at_boundary, functools.partial(batons.comes, ticket)),
            (at_boundary + int(2.5 * MS), functools.partial(passed, batons, ticket)),
            (at_boundary + 100 * MS, lambda: None),
        ]
        if ticket == 12:
            naps.clear()
        looked = lease._look_for_grant()
        while not lease._accept_grant():
            lease._sleep(looked)
            looked = lease._look_for_grant()
        lease._holding = False
    assert naps and not any(naps), "before it was known to come, and not after"
