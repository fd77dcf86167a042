"""Batons: a lease goes from one job to the next without us, and we hear of it afterwards.

A decision of ours takes longer than everything else in a hand-over. So it is made beforehand: a job that is about to
yield says so, the core names an heir, and both are told the same ticket on their pages. When the device is idle the
giver writes on its own page that it passed its lease on; then to the word that the heir looks at (`BatonPage`). The
heir runs. The giver's message, as ever, makes us see to the rest.

What keeps it safe:
- From the promise on the core treats the heir as one that runs: it keeps its lane and its memory.
- The heir has been sent everything about the lane before it is promised, and nothing more until the lease is over. The
  giver passes on only if it has told us nothing since; else the lane is not what the heir knows, and the lease goes the
  long way.
- Before anything is decided, the pages of all givers are looked at (`passed`): what was passed on is known here no
  later than any message of whoever runs because of it, or than the death of either.
- A promise is withdrawn only when the heir is dead, when the giver waits for memory (then its arena does not pass on),
  or when its lease has ended in another way.
- It is for jobs of one user in one lane. Nobody else can write to the page they share.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from salus.protocol.page import JobState, Page, Word
from salus.service.job import LiveJob


@dataclass(frozen=True)
class Offer:
    ticket: int
    giver: LiveJob
    heir: LiveJob


class Batons:
    def __init__(self) -> None:
        self._shared: dict[int, tuple[Page, int, int]] = {}
        """By user: the page, its descriptor and the bell."""
        self._offers: dict[str, Offer] = {}
        """By giver."""
        self._tickets = 0

    def shared_by(self, uid: int) -> tuple[int, int]:
        """The descriptors of what all jobs of the user share: page and bell."""
        if uid not in self._shared:
            bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            try:
                self._shared[uid] = (*Page.create(), bell)
            except OSError:
                os.close(bell)
                raise
        return self._shared[uid][1:]

    def offer(self, giver: LiveJob, heir: LiveJob) -> bool:
        """Tells both, if both can do it. False: the lease goes the long way."""
        if giver.link is None or giver.page is None or heir.link is None or heir.page is None:
            return False
        if giver.uid != heir.uid or heir.worker is None or heir.page.words[Word.STATE] != JobState.WAITING:
            return False
        if not giver.link.catch_up():
            return False
        heir.link.bring_up_to_date()
        heir.link.holds = True
        self._tickets += 1
        words = heir.page.words
        heir.cleared = bool(words[Word.SCRUB])
        words[Word.REVOKE] = words[Word.CONTENDED] = 0
        words[Word.BATON] = self._tickets
        giver.page.words[Word.PASS_SENT] = giver.page.words[Word.JOB_PACKETS]
        giver.page.words[Word.PASS] = self._tickets
        self._offers[giver.job_id] = Offer(self._tickets, giver, heir)
        return True

    def withdraw(self, heir: LiveJob) -> None:
        for offer in [offer for offer in self._offers.values() if offer.heir is heir]:
            self._forget(offer)
            if heir.link is not None:
                heir.link.holds = False

    def passed(self) -> list[tuple[Offer, bool]]:
        """Those that were taken up since the last time, and whether the giver wants another lease."""
        found = []
        for offer in list(self._offers.values()):
            said = offer.giver.page.words[Word.PASSED] if offer.giver.page is not None else 0
            if said >> 1 == offer.ticket:
                self._forget(offer)
                found.append((offer, bool(said & 1)))
        return found

    def over(self, giver: LiveJob) -> None:
        """Its lease ended otherwise: what it was offered is void."""
        offer = self._offers.get(giver.job_id)
        if offer is not None:
            self.withdraw(offer.heir)

    def _forget(self, offer: Offer) -> None:
        del self._offers[offer.giver.job_id]
        if offer.giver.page is not None:
            offer.giver.page.words[Word.PASS] = 0
        if offer.heir.page is not None:
            offer.heir.page.words[Word.BATON] = 0

    def forget_user(self, uid: int) -> None:
        """The last of its jobs is gone."""
        if uid in self._shared:
            page, descriptor, bell = self._shared.pop(uid)
            page.close()
            os.close(descriptor)
            os.close(bell)
