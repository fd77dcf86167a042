"""Live jobs, and the hands of the core: facts from connections in, the core's actions carried out.

Every event goes through `handle`: what the lease holders used since their last report is read off their pages first,
then the core decides, then the actions are obeyed in their order and recorded. There is no CUDA context here. Of jobs
with an arena, `memory` carries out what concerns their lanes; for others a lane is a number only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sqlite3
import time
from collections.abc import Callable
from typing import Any

from salus.core import actions as act
from salus.core import events as ev
from salus.core.model import Lease, Phase
from salus.core.placement import Room
from salus.core.policies import Policy
from salus.core.scheduler import Scheduler
from salus.errors import NoService, RequestRejected
from salus.protocol import messages as msg
from salus.protocol.errors import NoSuchJob, to_message
from salus.protocol.page import JobState, Page, Word
from salus.protocol.slots import Kind
from salus.registry import Record, Registry
from salus.service.batons import Batons
from salus.service.connection import Connection
from salus.service.devices import Device
from salus.service.history import History, command_key
from salus.service.job import LiveJob, is_alive, is_dead
from salus.service.journal import Journal
from salus.service.memory import Lanes, Link
from salus.service.mps import Mps
from salus.service.paging import Pager
from salus.service.sizes import Sizes
from salus.service.view import MOST_LANES, describe, footprint_of
from salus.service.watch import Watch

log = logging.getLogger(__name__)

TRIM_EVERY = 100
KEPT_ENDED = 100
"""Ended jobs that are not looked up in the registry."""
QUEUE_NEWS_S = 0.2
"""How often launchers of waiting jobs hear of their place in the queue, at the most."""
HOLES_S = 0.1
"""So soon after a job took something of its lane for itself, others of the lane unmap it."""
FORESEEN_S = 0.05
"""Of a job whose iterations are no longer than this it is known when it will yield."""
AHEAD_S = 0.002
"""So long before a boundary is expected, the next job is told of it."""
AWAKE_S = 0.002
"""How long the service stays awake for a yield that was announced."""


class Live:
    def __init__(
        self,
        device: Device,
        policy: Policy,
        journal: Journal | None,
        history: History,
        registry: Registry,
        on_empty: Callable[[], None],
        *,
        scrub: bool = False,
    ) -> None:
        self.device = device
        self.scheduler = Scheduler(device.config, policy)
        self.lanes = Lanes(self._lane_released, self._lane_has_holes)
        self._with_holes: set[int] = set()
        """Lanes whose jobs will be told of them."""
        self.pager = Pager(self)
        self.batons = Batons()
        self.watch = Watch(self)
        self.sizes = Sizes(self, history)
        self.jobs: dict[str, LiveJob] = {}
        self.ended: dict[str, LiveJob] = {}
        self._journal, self.registry, self.on_empty = journal, registry, on_empty
        self._scrub = scrub
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._news: asyncio.TimerHandle | None = None
        self._awake_until = 0.0
        self.holders: dict[str, LiveJob] = {}
        self.mps: Mps | None = None
        """The daemon that its jobs join; None: they join none."""

    # Facts from connections

    def register(self, connection: Connection, asked: msg.Register) -> LiveJob:
        key = command_key(asked.command, asked.directory)
        token, now = secrets.token_hex(16), time.time()
        job_id = self.registry.add(token, connection.uid, asked, now, connection.pid, self.device.key)
        job = LiveJob(job_id, token, connection.uid, asked, key, now, connection, self)
        self.jobs[job.job_id] = job
        try:
            actions = self.handle(ev.JobArrived(self.sizes.spec(job)))
        except (RequestRejected, ValueError) as error:
            self._forget(job)
            raise RequestRejected(str(error)) from None
        refusal = next((action for action in actions if isinstance(action, act.RefuseJob)), None)
        if refusal is not None:
            self._forget(job)
            where = "this device" if self.device.gpu is None else f"GPU {self.device.gpu.index}"
            raise RequestRejected(f"job {job.asked.name} cannot run on {where}: {refusal.reason}")
        self.registry.describe(self.describe(job))
        log.info("job %s (%s) was registered by process %d", job.job_id, asked.name, connection.pid)
        return job

    def _forget(self, job: LiveJob) -> None:
        del self.jobs[job.job_id]
        self.registry.remove(job.job_id)

    def _file(self, job: LiveJob) -> None:
        """It has ended."""
        del self.jobs[job.job_id]
        self.ended[job.job_id] = job
        while len(self.ended) > KEPT_ENDED:
            del self.ended[next(iter(self.ended))]
        self.registry.describe(self.describe(job))
        if int(job.job_id) % TRIM_EVERY == 0:
            self.registry.trim()

    def job_of(self, connection: Connection, job_id: str, token: str) -> LiveJob:
        job = self.jobs.get(job_id)
        if job is None or not secrets.compare_digest(job.token, token) or connection.uid != job.uid:
            # One answer for all of these: who has no token learns nothing about whose job it is.
            raise NoSuchJob(f"there is no job {job_id:.40} that this process belongs to")
        return job

    def attach(self, connection: Connection, asked: msg.Attach) -> LiveJob:
        job = self.job_of(connection, asked.job_id, asked.token)
        if (job.returning or job.may_return) and job.had_worker and is_alive(job.waited_for):
            raise RequestRejected(f"job {job.job_id} uses the device from another process")
        job.may_return = False
        if job.returning:
            # It was registered before the restart, and begins to use the device now.
            self.arrive_again(job)
        self.open(connection, job, asked.arena)
        if job.link is not None:
            self.admit(job)
        return job

    def open(self, connection: Connection, job: LiveJob, arena: bool) -> None:
        """The page, the event and the channel of a process that uses the device."""
        if job.worker is not None or self._still_uses_memory(job):
            raise RequestRejected(f"job {job.job_id} uses the device from another process already")
        self._stop_watching(job)
        job.close()
        job.used = None
        job.grants = 0
        try:
            job.page, job.page_descriptor = Page.create()
            job.grant_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            shared = self.batons.shared_by(job.uid)
            if arena:
                job.pidfd = os.pidfd_open(connection.pid)
                job.link = self._link(job, job.page)
        except OSError as error:
            job.close()
            raise RequestRejected(f"job {job.job_id} cannot be attached ({error.strerror})") from None
        job.worker = connection
        job.last_pid = connection.pid
        job.reported_iterations = job.reported_ns = 0
        channel = [] if job.link is None else [job.link.theirs.fileno()]
        connection.send(msg.Attached(job.job_id), (job.page_descriptor, job.grant_event, *channel, *shared))
        if job.link is not None:
            job.link.close_theirs()
        self.registry.attached(job.job_id, connection.pid)
        self._note_place(job)

    def _note_place(self, job: LiveJob) -> None:
        """On the job's page: what it tells a service that is started again."""
        core = self.scheduler.jobs.get(job.job_id)
        if core is None or job.page is None:
            return
        words = job.page.words
        words[Word.LANE] = core.lane or 0
        words[Word.RESERVED_PERSISTENT] = core.footprint.persistent_bytes
        words[Word.RESERVED_EPHEMERAL] = core.footprint.ephemeral_bytes
        words[Word.RESERVED_INTERNAL] = core.footprint.internal_bytes

    def _note_time(self, job: LiveJob) -> None:
        """The same for how much of the device's time was its own."""
        core = self.scheduler.jobs.get(job.job_id)
        if core is not None and job.page is not None:
            job.page.words[Word.ATTAINED_NS] = int(core.attained_s * 1e9)

    def arrive_again(self, job: LiveJob) -> None:
        """It has nothing on the device, as far as is known."""
        job.returning = False
        actions = self.decide(ev.JobArrived(self.sizes.spec(job)))
        if any(isinstance(action, act.RefuseJob) for action in actions):
            # The service was started again for less than it needs.
            log.warning("job %s (%s) does not fit any more", job.job_id, job.asked.name)
            self.let_go(job)

    def let_go(self, job: LiveJob) -> None:
        """It has not come back. If it is there all the same, it goes on without a service."""
        record = self._record_of(job)
        if record is None or not record.goes_on:
            self.end_unseen(job)
            return
        del self.jobs[job.job_id]
        self.registry.release(job.job_id)
        for waiter in job.waiters:
            waiter.send(to_message(NoService(f"job {job.job_id} goes on without a service")))

    def _record_of(self, job: LiveJob) -> Record | None:
        """None also where it cannot be read: that is no reason to keep the others waiting."""
        try:
            return self.registry.find(job.job_id)
        except sqlite3.Error as error:
            log.warning("the list of jobs cannot be read (%s)", error)
            return None

    def end_unseen(self, job: LiveJob) -> None:
        job.returning = False
        job.finished_at = time.time()
        # Its launcher may have written meanwhile how it ended.
        record = self._record_of(job)
        if record is not None and record.row["finished_at"] is not None:
            job.finished_at, job.exit_code = record.row["finished_at"], record.row["exit_code"]
        self._file(job)
        for waiter in job.waiters:
            waiter.send(msg.Ended(job.job_id, job.exit_code))

    def _link(self, job: LiveJob, page: Page) -> Link:
        def want() -> None:
            # Not from inside another decision: a record may be read in the middle of one.
            self._loop.call_soon(self.sizes.wanted, job)

        def broken() -> None:
            if job.worker is not None:
                self._loop.call_soon(job.worker.close)

        def paged(kind: Kind, done: bool) -> None:
            self._loop.call_soon(self.pager.paged, job, kind, done)

        return Link(job.job_id, page, self.lanes, want, broken, paged)

    def ready(self, job: LiveJob) -> None:
        if job.yields_late is not None:
            job.yields_late = True
            return
        self.handle(ev.JobReady(job.job_id))

    def yielding(self, job: LiveJob, now: bool) -> None:
        """The job is about to yield. The next one is told, so that the lease can go straight to it.

        `now`: it did not know of a next one, and only waits for the device. So that one wakes up, and we stay awake.
        """
        self.settle_batons()
        if job.job_id not in self.holders or self.scheduler.jobs[job.job_id].stalled:
            return
        self.handle(ev.JobYielding(job.job_id))
        following = self.jobs.get(self.scheduler.next_in_lane(job.job_id) or "")
        if now and following is not None and following.page is not None:
            following.page.words[Word.SOON] = 1
            _wake(following.grant_event)
            self._awake_until = self._loop.time() + AWAKE_S
            self._stay_awake()

    def _foresee_boundary(self, job: LiveJob, page: Page) -> None:
        """Its lease was revoked. Shortly before it gets to a boundary the next one is told, so as to be awake then."""
        iteration_s = self.scheduler.jobs[job.job_id].iteration_s
        if job.link is None:
            # On the host device it yields at the end of its iteration and does not say so beforehand. If that is far
            # off, better not to be bound until then.
            if self.device.gpu is None and iteration_s <= FORESEEN_S:
                self._loop.call_soon(self._will_yield, job, job.grants)
            return
        state, left_s = page.words[Word.STATE], iteration_s
        if state == JobState.BETWEEN:
            left_s = 0.0
        elif not iteration_s:
            return  # it says so itself, when it is there
        elif state == JobState.ITERATING:
            # (What the page says is the job's own, and bounded by what is possible.)
            left_s -= max(0, time.monotonic_ns() - page.words[Word.BEGAN_NS]) / 1e9
        self._loop.call_later(max(0.0, left_s - AHEAD_S), self._will_yield, job, job.grants)

    def _will_yield(self, job: LiveJob, grants: int) -> None:
        # Not if that lease is over: the next one was not revoked.
        if self.jobs.get(job.job_id) is job and job.grants == grants:
            self.yielding(job, now=False)

    def _stay_awake(self) -> None:
        """Going to sleep and waking up again takes longer than what is to be done then."""
        if self._loop.time() < self._awake_until:
            self._loop.call_soon(self._stay_awake)

    def yielded(self, job: LiveJob, wants_more: bool, passed: bool = False) -> None:
        self.settle_batons()
        if passed:
            return
        if job.link is not None and not job.link.catch_up():
            # It may have taken something for itself that we did not hear of. Its lane is its own until it is dead.
            raise RequestRejected(f"the arena of job {job.job_id} cannot be followed any more")
        if self.scheduler.jobs[job.job_id].stalled:
            # Another of its threads waits for memory. The lease is over when that has been settled.
            job.yields_late = wants_more
            return
        if not self.scheduler.jobs[job.job_id].holds:
            raise RequestRejected(f"job {job.job_id} gives up a lease that it does not have")
        self._end_offer(job)
        self._gave_up(job, wants_more)

    def settle_batons(self) -> None:
        """Leases that went straight from one job to the next."""
        for offer, wants_more in self.batons.passed():
            if offer.heir is None:
                self._gave_up(offer.giver, wants_more)
                continue
            offer.heir.runs_already = True
            try:
                self._gave_up(offer.giver, wants_more)
            finally:
                offer.heir.runs_already = False

    def _end_offer(self, giver: LiveJob) -> None:
        """Its lease is over, and was not passed on. An heir that went on by itself must not get it."""
        gone = self.batons.over(giver)
        if gone is not None and gone.job_id in self.scheduler.jobs:
            self.decide(ev.JobIdled(gone.job_id))

    def recalled(self, heir: LiveJob, ticket: int) -> None:
        """It does not hold the lease that it was promised, and cannot take it any more."""
        self.settle_batons()
        if self.batons.is_promised(heir, ticket):
            # It waits like any other again.
            self.decide(ev.JobIdled(heir.job_id))
            self.decide(ev.JobReady(heir.job_id))

    def _gave_up(self, job: LiveJob, wants_more: bool) -> None:
        self._report_others(job)
        iterations, used_s = self._used(job)
        self.holders.pop(job.job_id, None)
        self._lease_is_over(job)
        self.decide(ev.IterationFinished(job.job_id, used_s, iterations, yielded=wants_more))
        self._note_time(job)
        if not wants_more:
            # Idle ends the lease too. Yielded first, the job might be granted the next one before it is idle.
            self.decide(ev.JobIdled(job.job_id))

    def _lease_is_over(self, job: LiveJob) -> None:
        if job.link is None:
            return
        job.link.holds = False
        core = self.scheduler.jobs[job.job_id]
        if core.lane is not None and len(self.lanes.get(core.lane).users) > 1 and not job.cleared:
            # Another user came while it ran; it did not know that it had to clear what it leaves.
            self.lanes.get(core.lane).drop_all()
            self._tell_of_holes(core.lane)

    def lease_went_with(self, job: LiveJob) -> None:
        """It was paged out in mid-iteration, and so its lease is over."""
        self._end_offer(job)
        self._report_others(None)
        self.holders.pop(job.job_id, None)
        if job.link is not None:
            job.link.holds = False

    def _lane_has_holes(self, lane_id: int) -> None:
        """A job took something for itself. Others are told soon, and once of all that it takes meanwhile."""
        if lane_id not in self._with_holes:
            self._with_holes.add(lane_id)
            self._loop.call_later(HOLES_S, self._tell_of_holes, lane_id)

    def _tell_of_holes(self, lane_id: int) -> None:
        """Whoever is not at work in the lane lets go of what is not there any more, so that its memory can be free."""
        self._with_holes.discard(lane_id)
        for other in self.jobs.values():
            link, worker = other.link, other.worker
            if link is not None and link.lane_id == lane_id and link.let_go_of_holes() and worker is not None:
                worker.send(msg.Look())

    def _yield_late(self, job: LiveJob) -> None:
        wants_more, job.yields_late = job.yields_late, None
        if wants_more is not None and job.job_id in self.jobs and job.job_id in self.holders:
            self.yielded(job, wants_more)

    def worker_lost(self, job: LiveJob) -> None:
        """The connection of the process that used the device has ended; its process, as a rule, with it."""
        self.settle_batons()
        if self._still_uses_memory(job):
            job.worker = None
            core = self.scheduler.jobs[job.job_id]
            if core.lease is Lease.NONE and not core.stalled:
                # It goes on by itself, outside the lane. A lease would be lost on it.
                self.decide(ev.JobIdled(job.job_id))
            elif core.lease is Lease.PROMISED:
                self.batons.recall(job)
            return
        # It is dead: whatever it passed on, it had passed on before.
        self.settle_batons()
        self._report_others(None)
        self._end_offer(job)
        self._drop_what_it_left(job)
        job.worker = None
        self.holders.pop(job.job_id, None)
        job.used = footprint_of(self.scheduler, job)
        if job.link is not None:
            job.link.close()
            job.link = None
        phase = self.scheduler.jobs[job.job_id].phase
        if phase is Phase.PAGING_OUT:
            self.decide(ev.PageOutFinished(job.job_id))
        elif phase is Phase.PAGING_IN:
            self.decide(ev.PageInFinished(job.job_id))
        if job.launcher is None:
            self.end(job, None)
        elif not self.scheduler.jobs[job.job_id].stalled:
            # One that was stalled in an allocation is in the middle of an iteration to the core, until it leaves.
            self.decide(ev.JobIdled(job.job_id))

    def _still_uses_memory(self, job: LiveJob) -> bool:
        """A process with an arena may work in its lane until it is dead, connection or not: nobody else may, before.

        Its sockets close before the GPU lets go of it. When it is dead, what was put off is done.
        """
        if job.pidfd < 0 or is_dead(job.pidfd):
            return False
        if not job.watched:
            job.watched = True
            self._loop.add_reader(job.pidfd, self._worker_died, job)
        return True

    def _worker_died(self, job: LiveJob) -> None:
        if job.pidfd < 0:
            return
        self._stop_watching(job)
        if job.ends_with is not None:
            self.end(job, job.ends_with[0])
        elif job.job_id in self.jobs:
            self.worker_lost(job)

    def _stop_watching(self, job: LiveJob) -> None:
        """Before the descriptor is closed: the event loop would take the next one of that number for it."""
        if job.watched:
            self._loop.remove_reader(job.pidfd)
            job.watched = False

    def launcher_lost(self, job: LiveJob) -> None:
        job.launcher = None
        if job.worker is None and not job.returning:
            self.end(job, None)

    def end(self, job: LiveJob, exit_code: int | None) -> None:
        if self.jobs.get(job.job_id) is not job:
            return
        if job.returning:
            job.exit_code = exit_code
            self.end_unseen(job)
            return
        if job.job_id not in self.scheduler.jobs:
            self.end_unseen(job)
            return
        if self._still_uses_memory(job):
            # What was started is done, and something it started in turn is not.
            job.ends_with = job.ends_with or (exit_code,)
            return
        self.settle_batons()
        self._end_offer(job)
        self._report_others(None)
        self._drop_what_it_left(job)
        core = self.scheduler.jobs[job.job_id]
        job.final = {
            "iterations": core.iterations_done,
            "gpu_time_s": core.attained_s,
            "ran_s": core.ran_s,
            **footprint_of(self.scheduler, job),
        }
        job.finished_at, job.exit_code = time.time(), exit_code
        self.holders.pop(job.job_id, None)
        self.decide(ev.JobLeft(job.job_id))
        self._file(job)
        if all(other.uid != job.uid for other in self.jobs.values()):
            self.batons.forget_user(job.uid)
        self.sizes.remember(job, core, exit_code)
        for waiter in job.waiters:
            waiter.send(msg.Ended(job.job_id, exit_code))
        if job.worker is not None:
            job.worker.close()
        self._stop_watching(job)
        job.close()
        log.info("job %s ended with status %s", job.job_id, exit_code)
        if not self.jobs:
            self.on_empty()

    def cancel(self, job: LiveJob, force: bool) -> None:
        job.cancelled = True
        if job.launcher is not None:
            job.launcher.send(msg.Terminate(force))
        elif job.worker is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(job.worker.pid, signal.SIGKILL if force else signal.SIGTERM)
        elif job.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(job.pidfd, signal.SIGKILL if force else signal.SIGTERM)

    def set_policy(self, policy: Policy) -> None:
        self.handle(ev.PolicyChanged(policy))

    # The core

    def handle(self, event: ev.Event) -> list[act.Action]:
        self.settle_batons()
        self._report_others(None)
        return self.decide(event)

    def decide(self, event: ev.Event) -> list[act.Action]:
        self.settle_batons()
        now = self._loop.time()
        actions = self.scheduler.handle(event, now)
        answers: list[ev.Event] = []
        for action in actions:
            try:
                self._obey(action, answers)
            except OSError as error:
                # One job's trouble must not keep the others from what was decided for them.
                self._cut_off(action, error)
        if self._journal is not None:
            self._journal.record(event, now, actions)
        for answer in answers:
            self.decide(answer)
        self.watch.look_soon()
        if self.scheduler.queue_length:
            if self._news is None:
                self._news = self._loop.call_later(QUEUE_NEWS_S, self._tell_queue)
            self.pager.prepare_soon()
        return actions

    def _cut_off(self, action: act.Action, error: OSError) -> None:
        log.error("%s could not be carried out (%s)", action, error)
        job = self.jobs.get(getattr(action, "job_id", ""))
        if job is not None and job.worker is not None:
            self._loop.call_soon(job.worker.close)

    def _report_others(self, besides: LiveJob | None) -> None:
        """What the lease holders used since the last time, off their pages."""
        for job in list(self.holders.values()):
            if job is not besides:
                iterations, used_s = self._used(job)
                if used_s > 0 or iterations:
                    self.decide(ev.IterationFinished(job.job_id, used_s, iterations))
                    self._note_time(job)

    def _used(self, job: LiveJob) -> tuple[int, float]:
        if job.page is None:
            return 0, 0.0
        # The page is the job's to write, so what it says is bounded by what is possible.
        iterations, used_ns = job.page.used(time.monotonic_ns())
        more = max(0, iterations - job.reported_iterations)
        more_ns = max(0, used_ns - job.reported_ns)
        job.reported_iterations += more
        job.reported_ns += more_ns
        return more, more_ns / 1e9

    def _obey(self, action: act.Action, answers: list[ev.Event]) -> None:
        match action:
            case act.GrantLease(job_id):
                self._grant(self.jobs[job_id])
            case act.RevokeLease(job_id):
                job = self.jobs[job_id]
                if job.page is not None:
                    job.page.words[Word.REVOKE] = 1
                    self._foresee_boundary(job, job.page)
            case act.PromiseLease(job_id, _, after):
                heir = self.jobs[job_id]
                if self.batons.offer(self.jobs[after], heir):
                    # It sleeps by the bell from now on.
                    _wake(heir.grant_event)
                else:
                    answers.append(ev.PromiseRefused(job_id))
            case act.WithdrawPromise(job_id):
                if job_id in self.jobs:
                    self.batons.withdraw(self.jobs[job_id])
            case act.AdmitJob(job_id):
                job = self.jobs[job_id]
                self.admit(job)
                self._note_place(job)
                if job.launcher is not None and job.last_queued is not None:
                    job.launcher.send(msg.Admitted())
                    job.last_queued = None
            case act.AllowGrowth(job_id):
                self.admit(self.jobs[job_id])
                self._note_place(self.jobs[job_id])
                self._loop.call_soon(self._yield_late, self.jobs[job_id])
            case act.RefuseGrowth(job_id):
                link = self.jobs[job_id].link
                if link is not None:
                    link.refuse()
                self._loop.call_soon(self._yield_late, self.jobs[job_id])
            case act.LeaveLane(job_id):
                job = self.jobs[job_id]
                self._note_place(job)
                if job.link is not None:
                    job.link.enter_lane(None)
                    if job.worker is not None:
                        job.worker.send(msg.Look())
            case act.OpenLane(lane_id, size_bytes) | act.ResizeLane(lane_id, size_bytes):
                self.lanes.resize(lane_id, size_bytes)
            case act.CloseLane(lane_id):
                self.lanes.close(lane_id)
            case act.PageOut(job_id, with_lane):
                answer = self.pager.page_out(self.jobs[job_id], with_lane)
                if answer is not None:
                    answers.append(answer)
            case act.PageIn(job_id):
                if not self.pager.page_in(self.jobs[job_id]):
                    answers.append(ev.PageInFinished(job_id))
            case act.SetTimer(at_s):
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._loop.call_at(at_s, self._timer_fired)

    def _grant(self, job: LiveJob) -> None:
        if job.page is None:
            return
        if job.started_at is None:
            job.started_at = time.time()
        self.holders[job.job_id] = job
        words = job.page.words
        if not job.runs_already:
            if job.link is not None:
                job.link.holds = False
                job.link.bring_up_to_date()
                job.link.holds = True
            job.cleared = bool(words[Word.SCRUB])
        words[Word.REVOKE] = words[Word.CONTENDED] = words[Word.SOON] = 0
        if job.link is not None and job.link.suspended:
            # It waits in the middle of an iteration, and goes on with that one.
            job.link.resume()
            return
        job.grants += 1
        words[Word.GRANTS] = job.grants
        self._awake_until = 0.0
        _wake(job.grant_event)

    # Memory

    def admit(self, job: LiveJob) -> None:
        """Tells the job's arena what it may use, and in which lane; and asks for what it waits for beyond that."""
        core = self.scheduler.jobs.get(job.job_id)
        if job.link is None or core is None or core.lane is None:
            return
        job.link.enter_lane(core.lane)
        self._isolate(job, core.lane)
        job.link.set_quota(core.footprint.persistent_bytes, core.footprint.ephemeral_bytes)
        if job.link.wanted is not None:
            self._loop.call_soon(self.sizes.wanted, job)

    def _isolate(self, job: LiveJob, lane_id: int) -> None:
        """In a lane of several users, each clears what it leaves; and nobody finds what was there before that began."""
        lane = self.lanes.get(lane_id)
        if job.uid not in lane.users:
            if lane.users:
                lane.drop_all()
                self._tell_of_holes(lane_id)
            lane.users.add(job.uid)
        for other in self.jobs.values():
            core = self.scheduler.jobs.get(other.job_id)
            if core is not None and core.lane == lane_id and other.page is not None:
                other.page.words[Word.SCRUB] = int(self._scrub or len(lane.users) > 1)

    def _drop_what_it_left(self, job: LiveJob) -> None:
        """A process that died in the middle of an iteration has cleared nothing."""
        core = self.scheduler.jobs.get(job.job_id)
        if core is not None and core.lane is not None and job.link is not None:
            lane = self.lanes.get(core.lane)
            if self._scrub or len(lane.users) > 1:
                lane.drop_all()
                self._tell_of_holes(core.lane)

    def room(self) -> Room:
        """For the placement of new jobs."""
        scheduler = self.scheduler
        left = [job.spec.length_s - job.attained_s for job in scheduler.jobs.values() if job.spec.length_s is not None]
        # One of unknown length counts as the others do on average.
        work_s = sum(max(0.0, seconds) for seconds in left) * len(self.jobs) / max(1, len(left))
        capacity_bytes = scheduler.config.capacity_bytes
        return Room(capacity_bytes, scheduler.free_bytes, scheduler.queue_length, work_s, len(self.jobs))

    def lost_together(self, pids: set[int]) -> None:
        """A fatal fault of one job under MPS ended these. Nobody knows for certain which of them it was."""
        lost = [job for job in (*self.jobs.values(), *self.ended.values()) if job.last_pid in pids]
        for job in lost:
            others = ", ".join(other.job_id for other in lost if other is not job)
            if others:
                job.fault = (
                    f"a fatal fault on the GPU ended it together with job {others}, under MPS; one of them made it"
                )
            else:
                job.fault = "it made a fatal fault on the GPU"
            log.warning("job %s (%s): %s", job.job_id, job.asked.name, job.fault)
            if job.job_id in self.ended:
                self.registry.describe(self.describe(job))
            if job.launcher is not None:
                job.launcher.send(msg.Told(f"job {job.job_id}: {job.fault}"))

    def _lane_released(self, lane_id: int, size_bytes: int) -> None:
        # Not from inside the decision that it is the answer to.
        self._loop.call_soon(self.handle, ev.LaneReleased(lane_id, size_bytes))

    def _timer_fired(self) -> None:
        self._timer = None
        self.handle(ev.TimerFired())

    def _tell_queue(self) -> None:
        """Tells the launchers of waiting jobs why they wait, where that or their place has changed."""
        self._news = None
        for core in self.scheduler.queue:
            job = self.jobs[core.job_id]
            why = self.scheduler.explain(core.job_id)
            if job.launcher is None or why is None or why.position is None or why.queue_length is None:
                continue
            news = msg.Queued(why.reason.value, why.text, why.position, why.queue_length)
            before = job.last_queued
            # The free bytes and the length of the queue change with every job that comes or goes.
            if before is None or (news.reason, news.position) != (before.reason, before.position):
                job.last_queued = news
                job.launcher.send(news)

    # What people see

    def describe(self, job: LiveJob) -> dict[str, Any]:
        return describe(self.scheduler, job)

    def refresh(self) -> None:
        """Brings the counters of running jobs up to date, for somebody who looks."""
        self._report_others(None)

    def status(self) -> dict[str, Any]:
        scheduler = self.scheduler
        return {
            "gpu": self.device.index,
            "device": self.device.key,
            "title": self.device.title,
            "policy": str(scheduler.policy),
            "quantum_s": scheduler.config.quantum_s,
            "capacity_bytes": scheduler.config.capacity_bytes,
            "free_bytes": max(0, scheduler.free_bytes),
            "jobs": len(self.jobs),
            "queue_length": scheduler.queue_length,
            "outside_bytes": self.sizes.outside_bytes,
            "host_bytes": scheduler.config.host_bytes,
            "paged_out_bytes": sum(job.host_bytes for job in scheduler.jobs.values()),
            "lane_chunks": self.lanes.descriptors(),
            "lane_chunk_bytes": self.lanes.held_bytes(),
            "journal": str(self._journal.path) if self._journal is not None else None,
            "journal_broken": self._journal.broken if self._journal is not None else None,
            "lanes": [
                {
                    "lane": lane.lane_id,
                    "size_bytes": lane.size_bytes,
                    "jobs": sorted(lane.needs),
                    "holder": next((j for j in lane.needs if scheduler.jobs[j].holds), None),
                }
                for lane in scheduler.lanes.values()
            ][:MOST_LANES],
        }


def _wake(event: int) -> None:
    # A job can fill its own event up to the brim; then it is awake.
    with contextlib.suppress(BlockingIOError):
        os.eventfd_write(event, 1)
