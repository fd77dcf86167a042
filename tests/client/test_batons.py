"""How a lease is taken that comes straight from another job, word by word."""

from __future__ import annotations

import os
from pathlib import Path

from salus.client.lease import Lease
from salus.protocol.page import BatonPage, Page, Word


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
