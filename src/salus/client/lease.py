"""The lease of a job, inside its process.

`begin` and `end` stand around every iteration. While nobody else wants the device they are a few loads and stores on
the shared page: no message, no system call. When the service sets the revoke flag, the job yields at its next boundary
and blocks at its next iteration until a lease comes, which an eventfd announces.

A job that sits between iterations gives its lease up without the main thread's help: a helper thread, which sleeps in a
receive, is told when somebody else waits, and yields for the main thread if that does not come along within a moment.

With an arena (`Memory`), a lease is given up only when nothing of the job lives in the lane any more; that is settled
when it yields, and undone when it is granted the next one. Such a job yields at the beginning of its next iteration
rather than at the end of the last: by then most scripts have dropped their gradients, and less is promoted.

A service that is killed may be started again. Meanwhile whoever holds a lease goes on, and everyone else waits; then
each tells the new one where it is (`_come_back`).

The lease goes straight from job to job (`BatonPage`): on a GPU a job whose lease is revoked says at the end of its
iteration that it will yield, the service names the next one to both, and that one watches for it. On the host device
the service names it with the revocation. If any of this comes too late, the service grants the lease as it would have.

It never exits the process, never prints to stdout, never raises into the user's code. If the service is gone for good
or never was, it says so once on stderr and the job runs unmanaged.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from salus.client import turns
from salus.client.again import connect_again, patience_s
from salus.client.arena import LEFT, PASSED, STAYS
from salus.client.connection import ServiceConnection
from salus.client.counts import SHOW_COUNTS_S, publish
from salus.client.foresight import Foresight
from salus.client.say import say
from salus.client.turns import LONGEST_TURN_NS, Turn
from salus.errors import NoService, SalusError, ServiceUnavailable
from salus.protocol import messages as msg
from salus.protocol.descriptors import Event
from salus.protocol.errors import AnotherProcessAgain
from salus.protocol.page import MAGIC, PAUSE_NS, BatonPage, JobState, Page, Word

MOMENT_S = 0.003
"""How long a job may sit between iterations while somebody else waits, before the helper yields for it."""

RETRY_S = 0.1
DETACH_RETRY_S = 0.5
PAGE_AGAIN_S = 0.001
"""When memory could not be paged because another thread of the script was at work."""
NOTABLE_NS = 200_000
"""A wait for the device that is shorter found it idle."""
NAP_NS, COMING_NAP_NS = 1_000_000, 3_000_000
"""No shorter naps while a lease is waited for: one may last a millisecond longer than it should. Where the lease may be
there after that, it is not worth it."""
AWAKE_NS = 2_000_000
"""How long a job looks for a lease that was announced before it sleeps again."""
ANSWER_NS = 300_000
"""Within this time of saying that we will yield, the service has named the next job, or there is none."""
SITS_NS = 50_000_000
"""A script that has sat between two iterations for longer may do so again, and must be seen to."""

_REVOKE, _CONTENDED, _GRANTS, _SOON, _STATE = (
    int(word) for word in (Word.REVOKE, Word.CONTENDED, Word.GRANTS, Word.SOON, Word.STATE)
)
_ITERATIONS, _BUSY, _BEGAN, _BOUNDARIES = (
    int(Word.ITERATIONS),
    int(Word.BUSY_NS),
    int(Word.BEGAN_NS),
    int(Word.BOUNDARIES),
)
_PASS, _PASSED, _BATON, _YIELDED = int(Word.PASS), int(Word.PASSED), int(Word.BATON), int(Word.YIELDED)
_BETWEEN, _ITERATING, _WAITING, _RUNNING_ON = (
    int(state) for state in (JobState.BETWEEN, JobState.ITERATING, JobState.WAITING, JobState.RUNNING_ON)
)
_now_ns = time.monotonic_ns
_HAS_GIL: bool = getattr(sys, "_is_gil_enabled", lambda: True)()


Usual = tuple[Callable[[], bool], Callable[[int], bool]]

WHERE_IT_WAITS: str = (lambda: 0).__code__.co_filename
"""This file, as it stands in the frames of those who wait here for a lease."""


class Memory(Protocol):
    """What a framework's adaptor does with memory around a lease."""

    stays: bool
    """Allocations are made in the lane; between iterations too, since `stay`."""

    def stay(self) -> bool:
        """The job holds its lease, and stays in its lane between iterations until `leave`. False: it cannot."""

    def open(self, page_address: int, channel: int) -> None:
        """The service is there: opens the arena. Raises `SalusError` where that cannot be."""

    def will_yield(self) -> None:
        """The lease is given up at the next boundary. For what makes that quick, while the device still works."""

    def will_resume(self) -> None:
        """The lease comes in a moment. For what makes `after_grant` quick, and can be done without it."""

    def leave(self, word: int, ticket: int, wants_more: bool) -> tuple[int, int]:
        """Makes what lives in the lane private and waits for the device; with a ticket, passes the lease on as well.

        `STAYS` if the lane cannot be left now, `LEFT`, or `PASSED` (`Arena.leave`); and since when the device is idle.
        """

    def after_grant(self) -> bool:
        """Brings the lane up to date. False: it cannot be had, and the job must not run."""

    def wait(self) -> None:
        """Until the device has done everything that this process began."""

    def pass_on(self, word: int, ticket: int, wants_more: bool) -> bool:
        """Passes the lease of a lane that was left straight on to the next job (`Arena.pass_on`)."""

    def detach(self) -> bool:
        """The service is gone, and others may run in the lane: takes memory of its own. False: there is none yet."""

    def where(self) -> tuple[bool, bool]:
        """Whether everything is paged out, and whether that was in mid-iteration."""

    def reopen(self, page_address: int, channel: int, holds: bool) -> None:
        """The service was started again. Without a lease, nothing of the lane is kept."""

    def go_alone(self) -> None:
        """The service does not come back."""

    def listen(self) -> bool:
        """The service sent something that cannot wait for the next grant. True: call it again in a moment."""


class Lease:
    """The lease of this process. It attaches to the service when the first iteration begins, not before."""

    def __init__(self, socket_path: Path, job_id: str, token: str) -> None:
        self._socket_path, self._job_id, self._token = socket_path, job_id, token
        self._lock = threading.Lock()
        """Guards everything below, between the thread that iterates and the helper."""
        self._attached = False
        self._managed = True
        self._holding = False
        self._asked = False
        """The service knows that we want a lease."""
        self._taken = 0
        """Grants that were used up."""
        self._begins = False
        """An iteration is about to, without the lock."""
        self._ended_ns = 0
        """When the last iteration did."""
        self._paused = False
        """Between two iterations, lately, or in one that was so long that it may have been a pause."""
        self._sits: Callable[[], None] = lambda: None
        """Told, while iterations follow one another, when none seems to any more."""
        self._rested_ns, self._rested_after = 0, -1
        """Since when the device rests for all the helper knows, and after which boundary."""
        self._memory: Memory | None = None
        self._batons: BatonPage | None = None
        self._announced_ns = 0
        """When the service was told that we will yield; 0: it was not."""
        self._until_coming, self._until_passed = Foresight(0), Foresight(AWAKE_NS)
        """From our ticket to the boundary of the one before us, and from there to the lease."""
        self._arrived: tuple[int, int] | None = None
        """The ticket of the last lease that came straight from another job, and when."""
        self.woke_ns = 0
        """When it last did while it waited for a lease."""
        self._spent = 0
        """The last ticket that a lease came with, or could have."""
        self._must_detach = False
        self._pages: list[Page] = []
        """Kept for good: an arena writes to its page as long as the process lives."""
        self._words = memoryview(bytearray(4096)).cast("Q")
        os.register_at_fork(after_in_child=self._after_fork)
        self._shown: memoryview[int] | None = None
        """Of an unmanaged job: the page on which its launcher sees its counts."""
        atexit.register(self._before_exit)

    def attach(self, memory: Memory) -> bool:
        """Attaches now, with an arena, because the device is used from now on. False: there will be none."""
        with self._lock:
            if self._managed and self._attached:
                say("an iteration ran before the GPU was first used; this job shares the GPU by turns, not its memory")
            if not self._managed or self._attached:
                return False
            self._memory = memory
            attached = False
            try:
                attached = self._attach()
            finally:
                if not attached:
                    self._memory = None
            return self._memory is not None

    # Around every iteration.

    def begin(self) -> None:
        """An iteration starts: returns when the job may run."""
        with self._lock:
            words = self._words
            if self._holding and not words[_REVOKE]:
                # As `_run` does, without its calls: at a boundary everything is cold, and each costs microseconds.
                now, paused_at = _now_ns(), words[_BEGAN]
                words[_BEGAN] = now
                if paused_at:
                    words[_BUSY] += min(now - paused_at, PAUSE_NS)
                words[_STATE] = _ITERATING
                return
        if self._managed:
            self._take()
        elif self._must_detach:
            self._detach()

    def end(self, iterations: int = 1) -> None:
        """A boundary: nothing of this job is alive in its lane."""
        with self._lock:
            words = self._words
            began = words[_BEGAN]
            self._ended_ns = _now_ns()
            # In this order; `Page.used` counts on it. A GPU may work on, so that its time goes on.
            words[_BEGAN] = 0 if self._memory is None else self._ended_ns
            if began:
                took = self._ended_ns - began
                # Of one that ran on it is not known when it stopped.
                words[_BUSY] += took if words[_STATE] != _RUNNING_ON else min(took, PAUSE_NS)
            words[_ITERATIONS] += iterations
            words[_BOUNDARIES] += 1
            words[_STATE] = _BETWEEN
            if self._holding and words[_REVOKE]:
                if self._memory is None:
                    self._yield(wants_more=True)
                elif not self._announced_ns:
                    # Whoever gets the lease may sleep: it has time to wake up, while the device is at work.
                    if not self._ring():
                        # It was not foreseen, and nobody knows yet whom the lease goes to.
                        self._send(msg.Yielding(now=False))
                    self._announced_ns = _now_ns()
                    self._memory.will_yield()

    def count(self, iterations: int) -> None:
        """These ended while another thread of the script was inside an iteration: no boundary."""
        with self._lock:
            words, now = self._words, _now_ns()
            began = words[_BEGAN]
            if words[_STATE] == _ITERATING and began:
                # In this order; `Page.used` counts on it.
                words[_BEGAN] = now
                words[_BUSY] += now - began
            words[_ITERATIONS] += iterations

    def is_wanted(self) -> bool:
        """Somebody waits: it is given up at the next boundary."""
        return self._holding and bool(self._words[_REVOKE])

    # The same for a job that holds its lease and that nobody waits for, without the lock and in one call each. What is
    # cold costs: at a boundary the caches are full of the script's numbers.

    def usual(self) -> Usual | None:
        """Quick ones for iterations that are all alike, which do all or nothing (False). None: not here.

        With memory, the job stays in its lane between iterations too, until it leaves it.
        """
        if not _HAS_GIL:
            return None
        with self._lock:
            if self._iterates() or (self._memory is not None and not (self._holding and self._memory.stay())):
                return None
            self._paused = False
        return self._begin_usual, self._end_usual

    def _begin_usual(self) -> bool:
        words, memory, now = self._words, self._memory, _now_ns()
        # In this order: whoever gives our lease up, or takes us to another page, takes the lock and then looks whether
        # we begin. (Python's own lock keeps the order.)
        self._begins = True
        try:
            if words[_REVOKE] or not self._holding or self._lock.locked() or words is not self._words:
                return False
            if memory is not None:
                if not memory.stays:
                    return False
                paused_at = words[_BEGAN]
                words[_BEGAN] = now
                if paused_at:
                    words[_BUSY] += min(now - paused_at, PAUSE_NS)
            else:
                words[_BEGAN] = now
            words[_STATE] = _ITERATING
            if now - self._ended_ns > SITS_NS:
                self._paused = True
            if words is not self._words or self._lock.locked():
                self._bring_along(words)
            return True
        finally:
            # Also where the handler of a signal raised.
            self._begins = False

    def _end_usual(self, iterations: int) -> bool:
        words = self._words
        if words[_REVOKE] or self._lock.locked():
            return False
        began = words[_BEGAN]
        self._ended_ns = now = _now_ns()
        words[_BEGAN] = 0 if self._memory is None else now
        if began:
            words[_BUSY] += now - began
            if now - began > LONGEST_TURN_NS:
                self._paused = True
        words[_ITERATIONS] += iterations
        words[_BOUNDARIES] += 1
        words[_STATE] = _BETWEEN
        if words is not self._words or self._lock.locked():
            self._bring_along(words)
        return True

    def run_on(self, sits: Callable[[], None]) -> Turn | None:
        """From now on an iteration begins where the last one ended: one call ends the one and begins the next.

        That call does all or nothing (False), and then the iteration that is open ends as any other does. Nobody sees
        any more whether the script sits between two of them. So where somebody waits and no boundary comes for long,
        `sits` is called, by another thread: it has to `end` the iteration, unless it knows better. None: not here.
        """
        with self._lock:
            words, paused, self._paused = self._words, self._paused, False
            if paused or not self._holding or words[_STATE] != _BETWEEN or words[_REVOKE] or words[_CONTENDED]:
                return None
            if self._memory is not None and not self._memory.stays:
                return None
            self._sits = sits
            words[_BEGAN] = words[_BEGAN] or self._ended_ns
            words[_STATE] = _RUNNING_ON
            address = self._pages[-1].address() if self._pages and self._pages[-1].words is words else 0
        return turns.on_page(words, address)

    def goes_on(self) -> None:
        """The iteration that is open is one like any other from here on; before that it may have been a pause."""
        with self._lock:
            if self._words[_STATE] == _RUNNING_ON:
                self._run()

    def between_iterations(self, do: Callable[[], None]) -> None:
        """Unless one is open: then nothing is done."""
        with self._lock:
            if not self._iterates():
                do()

    def is_iterating(self) -> bool:
        """An iteration is open, so the lease is kept."""
        with self._lock:
            return self._iterates()

    def _iterates(self) -> bool:
        """For whoever has the lock: an iteration is open. In this order, which is the other way round in there."""
        return self._begins or self._words[_STATE] in (_ITERATING, _RUNNING_ON)

    def _bring_along(self, before: memoryview[int]) -> None:
        """We may have been taken to another page in the middle of that."""
        with self._lock:
            if before is not self._words and self._managed:
                for word in (_BEGAN, _BUSY, _ITERATIONS, _BOUNDARIES, _STATE):
                    self._words[word] = before[word]

    # Taking and giving up; with the lock held, but for `_take`.

    def _run(self) -> None:
        """An iteration starts. What has passed since the last one is the job's time too."""
        now = _now_ns()
        self._count_pause(now, now)
        self._words[_STATE] = _ITERATING

    def _count_pause(self, until: int, began: int) -> None:
        """Adds what has passed since the last iteration; from now on time counts from `began`, 0: not at all."""
        words = self._words
        paused_at = words[_BEGAN]
        # In this order; `Page.used` counts on it.
        words[_BEGAN] = began
        if paused_at:
            words[_BUSY] += min(until - paused_at, PAUSE_NS)

    def _take(self) -> None:
        """Blocks until there is a lease, or no service."""
        with self._lock:
            if not self._attached and not self._attach():
                return
            # Revoked since the last boundary: this is one too, unless another thread is about to begin an iteration.
            if self._holding and (self._begins or not self._yield(wants_more=True)):
                self._run()
                return
            self._words[_STATE] = _WAITING
            if self._managed and not self._asked:
                self._asked = True
                self._send(msg.Ready())
        looked = False
        while self._managed:
            # Announces a lease, or that the service is lost, or nothing new: the helper took that lease already.
            self._sleep(looked)
            looked = self._look_for_grant()
            with self._lock:
                if self._accept_grant() and self._bring_memory():
                    self._run()
                    return
        if self._must_detach:
            self._detach()

    def _detach(self) -> None:
        """The service died while somebody else may have held the lease of our lane. It is theirs now."""
        said = False
        while True:
            with self._lock:
                assert self._memory is not None
                if not self._must_detach or self._memory.detach():
                    self._must_detach, self._holding = False, True
                    return
            if not said:
                said = True
                say(f"job {self._job_id} waits for memory of its own")
            time.sleep(DETACH_RETRY_S)

    def _sleep(self, looked: bool) -> None:
        """Until the service, or the one before us, has something to say. Who `looked` in vain does not look again."""
        batons, ticket = self._batons, self._ticket()
        if looked or not ticket or batons is None or not batons.is_coming(ticket):
            self._poll(ticket, None)

    def _poll(self, ticket: int, at_most_ms: int | None) -> None:
        (self._bell_poll if ticket else self._grant_poll).poll(at_most_ms)
        self.woke_ns = _now_ns()
        if not self._grant_event.is_ours:
            with self._lock:
                self._go_unmanaged("the script has closed what it did not open")
            return
        self._grant_event.hush()
        batons = self._batons
        if ticket and batons is not None:
            batons.hush()

    def _look_for_grant(self) -> bool:
        """A lease that is a moment away is not slept for. True: in vain.

        It comes from another job in two steps: that job will stop at its next boundary (we have a ticket), and then it
        has got there and only waits for the device (the lease is coming).
        """
        known, opens, closes = None, 0, 0
        if self._arrived is not None:
            # Of the last one: now there is time for it.
            self._until_coming.came(*self._arrived)
            self._until_passed.came(*self._arrived)
            self._arrived = None
        while self._words[_GRANTS] <= self._taken:
            # Each is read anew: while it naps, the service may be started again.
            batons, ticket, soon, now = self._batons, self._ticket(), self._words[_SOON], _now_ns()
            coming = ticket and batons is not None and batons.is_coming(ticket)
            if coming and batons is not None and batons.is_passed(ticket):
                self._arrived = ticket, now
                return False
            if known != (ticket, coming, soon):
                known = ticket, coming, soon
                if coming or soon:
                    self._until_coming.came(ticket, now)
                    # Without a ticket the service has told us; leases are told apart by their number then.
                    opens, closes = self._until_passed.window(ticket or -1 - self._taken, now)
                    if self._memory is not None:
                        self._memory.will_resume()
                elif ticket and self._memory is not None:
                    opens, closes = self._until_coming.window(ticket, now)
                else:
                    return False
            if now > closes:
                return True
            if opens - now >= (COMING_NAP_NS if coming or soon else NAP_NS):
                self._poll(ticket, (opens - now) // 1_000_000)
            else:
                if coming and batons is not None:
                    batons.look(ticket)
                # The one that it waits for may be waiting for this core.
                os.sched_yield()
        return False

    def _ticket(self) -> int:
        """With which a lease may come from the job before us; 0: it comes from the service alone."""
        ticket = self._words[_BATON]
        return ticket if ticket > self._spent and self._batons is not None else 0

    def _accept_grant(self) -> bool:
        batons = self._batons
        # Each is read once: the service may be about to count the very lease that is taken here.
        ticket, granted = self._ticket(), self._words[_GRANTS]
        if granted > self._taken:
            self._taken = granted
        elif ticket and batons is not None and batons.is_passed(ticket):
            # The service will count this one too.
            self._taken = granted + 1
        else:
            return False
        self._spent = max(self._spent, ticket)
        self._holding, self._asked, self._announced_ns = True, False, 0
        return True

    def _bring_memory(self) -> bool:
        if self._memory is None:
            return True
        brought = False
        try:
            brought = self._memory.after_grant()
        finally:
            if not brought:
                # Also where the handler of a signal raised meanwhile: without it the job must not run.
                self._lease_is_over(wants_more=True, left_ns=0, passed=False)
        if not brought:
            say(f"job {self._job_id} cannot map the memory of its lane; it tries again")
            time.sleep(RETRY_S)
        return brought or not self._managed

    def _yield(self, *, wants_more: bool) -> bool:
        """False: something lives in the lane and cannot be made private, so the lease is kept."""
        ticket = 0
        if self._memory is not None:
            ticket = self._ring()
            if not ticket and not self._is_being_answered():
                self._send(msg.Yielding(now=True))
            word = self._batons.address(ticket) if ticket and self._batons is not None else 0
            left, left_ns = STAYS, 0
            self._take_those_by_arena()
            try:
                left, left_ns = self._memory.leave(word, ticket, wants_more)
            finally:
                # Also where the handler of a signal raised meanwhile: a lease that was passed on is another's.
                if self._was_passed(ticket):
                    left = PASSED
                    self._ring_again()
                    self._lease_is_over(wants_more, left_ns, passed=True)
            if left != LEFT:
                return left == PASSED
            # Also while it made private what lives.
            self._take_those_by_arena()
            if not self._managed:
                # The service went meanwhile, and we held the lease: the lane is ours. What was let go of comes back.
                self._memory.after_grant()
                return False
            # The device worked on after the last boundary, and has been waited for.
            self._count_pause(left_ns, 0)
        # Whatever raises in here, the service must hear of it: others wait.
        try:
            while not self._words[_PASS] and self._memory is not None and self._is_being_answered():
                os.sched_yield()
            ticket = self._words[_PASS]
            self._pass_on(ticket, wants_more)
        finally:
            self._lease_is_over(wants_more, 0, passed=self._was_passed(ticket))
        return True

    def _take_those_by_arena(self) -> None:
        """One that was paged out in mid-iteration got its next lease by its arena, and goes on as if it were the same.

        Only while we hold one, and have not passed it on: then no other is counted yet.
        """
        self._taken = max(self._taken, self._words[_GRANTS])

    def _lease_is_over(self, wants_more: bool, left_ns: int, *, passed: bool) -> None:
        """`left_ns`: until then the device worked for us; 0: that was not told."""
        self._holding, self._asked = False, wants_more
        if self._memory is not None:
            # (The second time this adds nothing.)
            self._count_pause(left_ns or _now_ns(), 0)
        self._words[_YIELDED] = self._taken
        self._send(msg.Yielded(wants_more, passed))

    def _was_passed(self, ticket: int) -> bool:
        return bool(ticket and self._words[_PASSED] >> 1 == ticket)

    def _is_being_answered(self) -> bool:
        """Whom the lease goes to will be known in a moment; sooner than the service could do it."""
        return _now_ns() - self._announced_ns < ANSWER_NS

    def _ring(self) -> int:
        """Wakes the job that the lease goes to: its ticket. 0: it is not known yet."""
        ticket = self._words[_PASS]
        if not ticket or self._batons is None:
            return 0
        self._batons.comes(ticket)
        return ticket

    def _ring_again(self) -> None:
        """It may have gone back to sleep."""
        if self._batons is not None:
            self._batons.ring()

    def _pass_on(self, ticket: int, wants_more: bool) -> bool:
        batons = self._batons
        if not ticket or batons is None:
            return False
        if self._memory is not None:
            if self._memory.pass_on(batons.address(ticket), ticket, wants_more):
                self._ring_again()
            return self._was_passed(ticket)
        try:
            # In this order: whoever sees the other job run can see here why.
            self._words[_PASSED] = 2 * ticket + wants_more
        finally:
            if self._was_passed(ticket):
                batons.pass_on(ticket)
        return True

    # The service.

    def _attach(self) -> bool:
        try:
            connection, (descriptor, grant_event, *more) = self._ask_to_attach()
            if len(more) != (2 if self._memory is None else 3):
                for one in (descriptor, grant_event, *more):
                    os.close(one)
                raise SalusError("the service sent less than it should; this process has too many files open")
            page = Page(descriptor)
            self._pages.append(page)
            self._words = page.words
            os.close(descriptor)
            if self._words[Word.MAGIC] != MAGIC:
                raise SalusError(
                    "the service has another layout of the shared page; install the same version on both sides"
                )
        except (SalusError, OSError, ValueError) as error:
            self._go_unmanaged(str(error), was_said=isinstance(error, AnotherProcessAgain))
            return False
        straight = True
        if self._memory is not None:
            try:
                self._memory.open(page.address(), more.pop(0))
            except SalusError as error:
                say(f"{error}; job {self._job_id} shares the device by turns, in a lane of its own")
                self._memory, straight = None, False
        connection.wait_for_ever()
        self._connection = connection
        self._listen_for_grants(grant_event, more, straight=straight)
        self._attached = True
        threading.Thread(target=self._listen, args=(connection,), name="salus", daemon=True).start()
        return True

    def _listen_for_grants(self, grant_event: int, batons: list[int], *, straight: bool) -> None:
        """From the service and, where leases can come and go `straight`, from the job before us."""
        grant_poll, bell_poll = select.poll(), select.poll()
        for poll in (grant_poll, bell_poll):
            poll.register(grant_event, select.POLLIN)
        descriptor, bell = batons
        page = BatonPage(descriptor, bell) if straight else None
        os.close(descriptor)
        if page is not None:
            bell_poll.register(bell, select.POLLIN)
        else:
            os.close(bell)
        # Whole, or not at all: the main thread may be about to sleep by them.
        self._grant_event, self._grant_poll, self._bell_poll = Event(grant_event), grant_poll, bell_poll
        self._batons, self._spent, self._announced_ns = page, 0, 0
        # Tickets are counted from the beginning again.
        self._arrived = None
        self._until_coming, self._until_passed = Foresight(0), Foresight(AWAKE_NS)

    def _ask_to_attach(self) -> tuple[ServiceConnection, list[int]]:
        asked = msg.Attach(self._job_id, self._token, arena=self._memory is not None)
        connection: ServiceConnection | None = None
        while True:
            try:
                connection = connection or ServiceConnection(self._socket_path)
                connection.send(asked)
                if asked.arena:
                    # Before it makes its context on a GPU: that may have to wait for others to end.
                    connection.wait_for_ever()
                answer, descriptors = connection.receive()
                if isinstance(answer, msg.Farewell):
                    raise NoService("the service has ended")
                return connection, descriptors
            except ServiceUnavailable:
                # It may have been killed a moment ago, or just now.
                connection = connect_again(self._socket_path) if self._socket_path.exists() else None
                if connection is None:
                    raise
            except BaseException:
                # Ctrl-C, say. Somebody may try again, in a notebook, and this one must not be in the way.
                if connection is not None:
                    connection.close()
                raise

    def _listen(self, connection: ServiceConnection | None) -> None:
        """The helper thread."""
        while connection is not None:
            why = self._listen_to(connection)
            if connection is not self._connection:
                return  # after a fork
            connection = None
            if why is None:
                connection, why = self._come_back_in_time()
            if connection is None:
                if self._memory is not None:
                    self._memory.go_alone()
                with self._lock:
                    self._go_unmanaged(why)
                self._show_counts()

    def _show_counts(self) -> None:
        """To the launcher, which tells them when the job ends. (Words of the service stay on the page: nobody reads
        them.)"""
        while self._shown is not None:
            with contextlib.suppress(ValueError):  # after a fork
                publish(self._words, self._shown)
            time.sleep(SHOW_COUNTS_S)

    def _come_back_in_time(self) -> tuple[ServiceConnection | None, str]:
        """The new connection; or None, and why there is none."""
        deadline = time.monotonic() + patience_s()
        while True:
            try:
                return self._come_back(), "the service is gone"
            except (ServiceUnavailable, OSError) as error:
                # It was killed again, before all were back.
                if time.monotonic() > deadline:
                    return None, str(error)
            except (SalusError, ValueError) as error:
                return None, str(error)
            except Exception as error:  # as below
                return None, f"{type(error).__name__}: {error}"

    def _come_back(self) -> ServiceConnection | None:
        """Whoever holds the lease of a lane goes on meanwhile; nobody else will run there. Everyone else waits."""
        with self._lock:
            if self._holding:
                self._words[_REVOKE] = self._words[_CONTENDED] = 0
        connection = connect_again(self._socket_path)
        if connection is None:
            return None
        memory = self._memory
        with self._lock:
            on_host, suspended = memory.where() if memory is not None else (False, False)
            old = self._words
            attained_ns = old[Word.ATTAINED_NS] + max(0, old[_BUSY] - old[Word.NOTED_NS])
            # A lease that was granted and not taken is void: the new service does not know of it.
            self._taken = old[_GRANTS]
            holds = self._holding and not suspended
            waits = old[_STATE] == _WAITING or suspended
            connection.send(
                msg.Reattach(
                    self._job_id, self._token, memory is not None, holds, waits, old[Word.LANE] or None,
                    old[Word.RESERVED_PERSISTENT], old[Word.RESERVED_EPHEMERAL], old[Word.RESERVED_INTERNAL],
                    on_host, suspended, old[_ITERATIONS], old[_BUSY], attained_ns,
                )
            )  # fmt: skip
            _, (descriptor, grant_event, *more) = connection.receive()
            page = Page(descriptor)
            os.close(descriptor)
            if memory is not None:
                memory.reopen(page.address(), more.pop(0), holds)
            turns.move(old, page.words)
            self._pages.append(page)
            self._words, self._taken, self._asked = page.words, 0, waits
            connection.wait_for_ever()
            self._connection.close()
            self._connection = connection
            before = self._grant_event
            self._listen_for_grants(grant_event, more, straight=self._batons is not None)
            # Whoever waits at the old one comes over. It is not closed, nor the old bell: somebody may be on the way.
            before.ring()
        return connection

    def _listen_to(self, connection: ServiceConnection) -> str | None:
        """Until the service says farewell, or something is wrong: why. None: it is lost."""
        try:
            self._page(connection)
            while True:
                message, _ = connection.receive()
                if isinstance(message, msg.Farewell):
                    return "the service has ended"
                if isinstance(message, msg.Recall):
                    self._answer_recall(message.ticket)
                    self._page(connection)
                    continue
                self._page(connection)
                if self._words[_CONTENDED] and self._seems_to_sit():
                    self._sits()
                passed = self._words[_BOUNDARIES]
                self._wait_for_device()
                while self._managed and self._words[_CONTENDED]:
                    if connection.something_comes_within(MOMENT_S):
                        break
                    self._wait_for_device()
                    with self._lock:
                        if self._give_up_if_idle():
                            break
                        if self._iterates() or self._words[_BOUNDARIES] != passed:
                            # On its way again. If it comes to sit once more, the service sees that.
                            self._words[_CONTENDED] = 0
        except (ServiceUnavailable, OSError):
            return None
        except SalusError as error:
            return str(error)
        except Exception as error:  # whatever it is, it must not end up in the user's output as a traceback
            return f"{type(error).__name__}: {error}"

    def _seems_to_sit(self) -> bool:
        """One that runs on. A boundary may have passed since the service looked."""
        return self._words[_STATE] == _RUNNING_ON and _now_ns() - self._words[_BEGAN] > SITS_NS

    def _answer_recall(self, ticket: int) -> None:
        """A lease is taken with the lock held: if there is none now, none comes by that ticket any more."""
        with self._lock:
            if not self._holding:
                self._spent = max(self._spent, ticket)
                self._send(msg.Recalled(ticket))

    def _page(self, connection: ServiceConnection) -> None:
        while self._memory is not None and self._memory.listen():
            if connection.something_comes_within(PAGE_AGAIN_S):
                return

    def _wait_for_device(self) -> None:
        """A script that looks at its loss waits for the device too, and comes along a moment after that.

        Given up before, the lease would cost it its gradients: they are still alive, and would be promoted.
        """
        if self._memory is not None and self._holding and self._words[_STATE] == _BETWEEN:
            began, boundary = _now_ns(), self._words[_BOUNDARIES]
            self._memory.wait()
            now = _now_ns()
            # At the first look it may have finished just now, and the script be on its way.
            if now - began > NOTABLE_NS or boundary != self._rested_after:
                self._rested_ns, self._rested_after = now, boundary

    def _give_up_if_idle(self) -> bool:
        """True when there is no lease to give up, now or any more."""
        words = self._words
        if words[_STATE] == _WAITING:
            return True
        if self._iterates() or _now_ns() - max(self._ended_ns, self._rested_ns) < MOMENT_S * 1e9:
            return False
        if self._holding:
            return self._yield(wants_more=False)
        if self._accept_grant():
            # It had been asked for in advance, and nobody came to fetch it. The lane was not entered, and so is not
            # left either: whatever keeps us from that, we would hold the lease of a lane that we have not looked at.
            self._lease_is_over(wants_more=False, left_ns=0, passed=False)
        return True

    def _send(self, message: msg.Message) -> None:
        # If it is lost, the helper sees to that.
        with contextlib.suppress(SalusError):
            self._connection.send(message)

    def _go_unmanaged(self, why: str, *, was_said: bool = False) -> None:
        if not self._managed:
            return
        self._managed = False
        # Whoever held the lease of a lane when the service went keeps it, and nobody else runs in that lane again.
        # (Where it could not attach, it has no memory of ours.)
        self._must_detach = self._attached and self._memory is not None and not self._holding
        self._holding = not self._must_detach
        """For good: `begin` takes its short way from now on."""
        nowhere = memoryview(bytearray(4096)).cast("Q")
        self._shown = self._words
        turns.move(self._words, nowhere)
        self._words = nowhere
        if not was_said:
            say(f"{why}; this process of job {self._job_id} goes on unmanaged")
        if self._attached:
            self._grant_event.ring()

    def _before_exit(self) -> None:
        """The script is done. Taking the framework down can last half a second, without the helper thread."""
        # Not for long: a thread of the script may hold the lock and never come back.
        if self._lock.acquire(timeout=0.1):
            try:
                if self._words[_STATE] == _RUNNING_ON:
                    self._words[_STATE] = _BETWEEN
                if self._attached and self._managed and self._holding and not self._iterates():
                    self._yield(wants_more=False)
                if self._shown is not None:
                    publish(self._words, self._shown)
            finally:
                self._lock.release()

    def _after_fork(self) -> None:
        """In a child: helper thread and lease stayed with the parent. It attaches if it uses the device itself.

        If the parent is unmanaged, so is the child: that was said.
        """
        self._lock = threading.Lock()
        if self._attached:
            self._connection.close_in_child()
            self._grant_event.close()
            if self._batons is not None:
                self._batons.close_bell()
        self._batons = self._shown = None
        self._attached = self._asked = self._begins = self._paused = self._must_detach = False
        self._holding = not self._managed
        self._memory = None
        self._taken = self._spent = self._announced_ns = self._ended_ns = 0
        self._rested_ns, self._rested_after = 0, -1
        self._arrived = None
        self._words = memoryview(bytearray(4096)).cast("Q")


_of_this_process: Lease | None = None


def of_this_process() -> Lease | None:
    """The lease of the job this process belongs to, by its environment; None outside of Salus."""
    global _of_this_process
    job_id, token, path = (os.environ.get(name) for name in ("SALUS_JOB", "SALUS_TOKEN", "SALUS_SOCKET"))
    if _of_this_process is None and job_id and token and path:
        _of_this_process = Lease(Path(path), job_id, token)
    return _of_this_process
