"""Batons: a lease goes from one job to the next without us, and we hear of it afterwards.

A decision of ours takes longer than everything else in a hand-over. So it is made beforehand. A job that is about to
yield says so; on the host device, where it yields at the end of the iteration in which it is revoked, that is known
anyway. The core names an heir, and both are told the same ticket on their pages. When the device is idle the giver
writes on its own page that it passed its lease on; then to the word that the heir looks at (`BatonPage`). The heir
runs. The giver's message, as ever, makes us see to the rest.

What keeps it safe:
- From the promise on the core treats the heir as one that runs: it keeps its lane and its memory.
- The heir has been sent everything about the lane that we have heard before it is promised, and nothing more until the
  lease is over. The giver passes on only if it has told us nothing beyond that; else the lane is not what the heir
  knows, and the lease goes the long way.
- Before anything is decided, the pages of all givers are looked at (`passed`): what was passed on is known here no
  later than any message of whoever runs because of it, or than the death of either.
- A promise is withdrawn when the heir is dead, or has said that it did not take the lease and cannot any more
  (`Recalled`); when the giver waits for memory, and so its arena does not pass on; or when the giver's lease has ended
  in another way. The giver may have passed on just before it could see that. So its ticket stays known, as one that is
  nobody's, and it gets no other one in that lease.
- It is for jobs of one user in one lane. Nobody else can write to the page they share.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from salus.protocol import messages as msg
from salus.protocol.page import JobState, Page, Word
from salus.service.job import LiveJob


@dataclass(frozen=True)
class Offer:
    ticket: int
    giver: LiveJob
    heir: LiveJob | None
    """None: it is nobody's any more."""


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
        if giver.page is None or heir.page is None or giver.job_id in self._offers:
            return False
        if giver.uid != heir.uid or heir.worker is None or heir.report is None:
            return False
        # One with an arena is told of the lane while it stands at the door. Another may still be on its way there.
        if heir.link is not None and heir.report.state is not JobState.WAITING:
            return False
        if not self._share_lane(giver, heir, giver.page):
            return False
        self._tickets += 1
        words = heir.page.words
        heir.cleared = heir.clears
        words[Word.REVOKE] = words[Word.CONTENDED] = 0
        words[Word.BATON] = self._tickets
        giver.page.words[Word.PASS] = self._tickets
        self._offers[giver.job_id] = Offer(self._tickets, giver, heir)
        return True

    def _share_lane(self, giver: LiveJob, heir: LiveJob, page: Page) -> bool:
        """The heir is told all that is known of the lane. On the host device, without arenas, that is nothing."""
        if giver.link is None or heir.link is None:
            return giver.link is heir.link
        if not giver.link.catch_up():
            return False
        # What has been taken in by now is what the heir is told. The giver may be saying more at this very moment.
        page.words[Word.PASS_SENT] = giver.link.received
        heir.link.bring_up_to_date()
        heir.link.holds = True
        return True

    def recall(self, job: LiveJob) -> None:
        """The giver, or the heir, cannot be counted on: the ticket is hidden, and the heir asked whether it has it."""
        for offer in list(self._offers.values()):
            if offer.heir is not None and (job is offer.giver or job is offer.heir):
                self._hide(offer)
                if offer.heir.worker is not None:
                    offer.heir.worker.send(msg.Recall(offer.ticket))

    def is_promised(self, heir: LiveJob, ticket: int) -> bool:
        return any(offer.heir is heir and offer.ticket == ticket for offer in self._offers.values())

    def heir_of(self, giver: LiveJob) -> LiveJob | None:
        offer = self._offers.get(giver.job_id)
        return None if offer is None else offer.heir

    def withdraw(self, heir: LiveJob) -> None:
        for offer in [offer for offer in self._offers.values() if offer.heir is heir]:
            self._hide(offer)
            self._offers[offer.giver.job_id] = replace(offer, heir=None)
            if heir.link is not None:
                heir.link.holds = False

    def passed(self) -> list[tuple[Offer, bool]]:
        """Those that were taken up since the last time, and whether the giver wants another lease."""
        found = []
        for offer in list(self._offers.values()):
            ticket, wants_more = offer.giver.report.passed if offer.giver.report is not None else (0, False)
            if ticket == offer.ticket:
                del self._offers[offer.giver.job_id]
                self._hide(offer)
                found.append((offer, wants_more))
        return found

    def over(self, giver: LiveJob) -> LiveJob | None:
        """Its lease ended otherwise: what it was offered is void. The heir, if that is alive and cannot be asked."""
        offer = self._offers.pop(giver.job_id, None)
        if offer is None or offer.heir is None:
            return None
        self._hide(offer)
        if offer.heir.link is not None:
            offer.heir.link.holds = False
        return offer.heir if offer.heir.worker is None else None

    def _hide(self, offer: Offer) -> None:
        if offer.giver.page is not None:
            offer.giver.page.words[Word.PASS] = 0
        if offer.heir is not None and offer.heir.page is not None:
            offer.heir.page.words[Word.BATON] = 0

    def forget_user(self, uid: int) -> None:
        """The last of its jobs is gone."""
        if uid in self._shared:
            page, descriptor, bell = self._shared.pop(uid)
            page.close()
            os.close(descriptor)
            os.close(bell)
