"""Live jobs, and the hands of the core: facts from connections in, the core's actions carried out.

Every event goes through `handle`: what the lease holders used since their last report is read off their pages first,
then the core decides, then the actions are obeyed in their order and recorded. There is no CUDA context here. Of jobs
with an arena, `memory` carries out what concerns their lanes; for others a lane is a number only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
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
from salus.protocol.errors import AnotherProcess, AnotherProcessAgain, NoSuchJob, to_message
from salus.protocol.page import Page, Word
from salus.protocol.slots import Kind
from salus.registry import Record, Registry
from salus.service.cancel import LAUNCHER_KILLED, Cancelling
from salus.service.connection import Connection
from salus.service.devices import Device
from salus.service.history import History, command_key
from salus.service.job import LiveJob, has_page, is_alive, is_dead
from salus.service.journal import Journal
from salus.service.leases import Leases
from salus.service.memory import Lanes, Link
from salus.service.mps import Mps
from salus.service.others import Shares, totals
from salus.service.paging import Pager
from salus.service.recovery import note_place
from salus.service.report import Report
from salus.service.sizes import Sizes
from salus.service.stopped import Stopped
from salus.service.usage import Account
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
        share_of: Callable[[int], float] = lambda _uid: 1.0,
        may_not_grow: Callable[[int, int], str | None] = lambda _uid, _more_bytes: None,
        account: Account | None = None,
    ) -> None:
        """`share_of`: what a user gets beside others. `may_not_grow`: why a user's jobs may not have so much more."""
        self.device = device
        self.scheduler = Scheduler(device.config, policy)
        self.lanes = Lanes(
            self._lane_released, self._lane_has_holes, device.config.capacity_bytes, on_gpu=device.gpu is not None
        )
        self._with_holes: set[int] = set()
        """Lanes whose jobs will be told of them."""
        self.pager = Pager(self)
        self.leases = Leases(self)
        self.watch = Watch(self)
        self.cancelling = Cancelling()
        self.stopped = Stopped(self)
        self.sizes = Sizes(self, history)
        self.shares = Shares()
        self.jobs: dict[str, LiveJob] = {}
        self.ended: dict[str, LiveJob] = {}
        self._journal, self.registry, self.on_empty = journal, registry, on_empty
        self._scrub = scrub
        self.share_of, self.may_not_grow, self._account = share_of, may_not_grow, account
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._news: asyncio.TimerHandle | None = None
        self.mps: Mps | None = None
        """The daemon that its jobs join; None: they join none."""

    # Facts from connections

    def register(self, connection: Connection, asked: msg.Register) -> LiveJob:
        key = command_key(connection.uid, asked.command, asked.directory)
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
        self.count_usage()
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
        job.came = True
        if job.worker is None and job.pidfd >= 0 and connection.pid == job.last_pid and not has_page(connection.pid):
            self._worker_replaced_itself(job)
        # (One that asks again has not heard that a service before us let it.)
        another = job.had_worker and job.waited_for != connection.pid and is_alive(job.waited_for)
        if (job.returning or job.may_return) and another:
            raise _used_by(job, job.waited_for)
        job.may_return = False
        if job.returning:
            # It was registered before the restart, and begins to use the device now.
            self.arrive_again(job)
        core = self.scheduler.jobs.get(job.job_id)
        waits = core is not None and core.phase is Phase.WAITING and not core.context_bytes
        if asked.arena and self.sizes.has_contexts and waits:
            self._keep_at_the_door(job, connection, asked)
        else:
            self._let_in(job, connection, asked)
        return job

    def _let_in(self, job: LiveJob, connection: Connection, asked: msg.Attach) -> None:
        self.open(connection, job, asked.arena)
        note_place(self.scheduler, job)
        self.leases.share_counts(job)
        if job.link is not None:
            self.admit(job)

    def _keep_at_the_door(self, job: LiveJob, connection: Connection, asked: msg.Attach) -> None:
        """Its context might take what was given to others. It is answered when there is room for that."""
        if job.process is not None:
            raise _used_by(job, job.process.pid)
        job.at_the_door = connection, asked
        self.handle(ev.ContextWanted(job.job_id))
        core = self.scheduler.jobs[job.job_id]
        if core.phase is Phase.WAITING and not core.context_bytes and not core.asks:
            # There is no room for that yet. Others may have to make some.
            self.handle(ev.JobReady(job.job_id))

    def _open_the_door_soon(self, job: LiveJob, answers: list[ev.Event]) -> None:
        if job.at_the_door is None:
            return
        if self.scheduler.jobs[job.job_id].asks:
            # It wanted memory. A lease it will ask for when it has loaded its model.
            answers.append(ev.JobIdled(job.job_id))
        self._loop.call_soon(self._open_the_door, job)

    def _open_the_door(self, job: LiveJob) -> None:
        if job.at_the_door is None or self.jobs.get(job.job_id) is not job:
            return
        connection, asked = job.at_the_door
        job.at_the_door = None
        try:
            self._let_in(job, connection, asked)
        except RequestRejected as error:
            connection.send(to_message(error))

    def left_the_door(self, job: LiveJob) -> None:
        """The process that waited there is gone."""
        job.at_the_door = None
        if job.launcher is None:
            self.end(job, None)
            return
        self.handle(ev.ContextWanted(job.job_id, False))
        if self.scheduler.jobs[job.job_id].asks:
            self.handle(ev.JobIdled(job.job_id))

    def open(
        self,
        connection: Connection,
        job: LiveJob,
        arena: bool,
        had: dict[Word, int] | None = None,
        brought: tuple[int, int] = (0, 0),
    ) -> None:
        """The page, the event and the channel of a process that uses the device.

        `had`: what it told us that it has. It is on the new page before the job is: we may be killed at any moment.
        `brought`: iterations, and nanoseconds of device time, from before a restart of the service.
        """
        if job.worker is not None or self._still_uses_memory(job):
            raise _used_by(job, job.last_pid)
        self._stop_watching(job)
        job.close()
        job.used = None
        job.grants = 0
        try:
            job.page, job.page_descriptor = Page.create()
            for word, value in (had or {}).items():
                job.page.words[word] = value
            job.report = self._report(job, job.page, brought)
            job.grant_event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            shared = self.leases.batons.shared_by(job.uid)
            if arena:
                job.pidfd = os.pidfd_open(connection.pid)
                job.link = self._link(job, job.page, job.report)
        except OSError as error:
            job.close()
            raise RequestRejected(f"job {job.job_id} cannot be attached ({error.strerror})") from None
        job.worker = connection
        job.last_pid = connection.pid
        job.reported_iterations, job.reported_ns = brought
        channel = [] if job.link is None else [job.link.theirs.fileno()]
        connection.send(msg.Attached(job.job_id), (job.page_descriptor, job.grant_event, *channel, *shared))
        if job.link is not None:
            job.link.close_theirs()
        self.registry.attached(job.job_id, connection.pid)

    def arrive_again(self, job: LiveJob) -> None:
        """It has nothing on the device, as far as is known."""
        job.returning = False
        actions = self.decide(ev.JobArrived(self.sizes.spec(job), paused=job.paused_by is not None))
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
        job.final = job.final or dict(job.counted)
        self._file(job)
        for waiter in job.waiters:
            waiter.send(msg.Ended(job.job_id, job.exit_code))

    def _report(self, job: LiveJob, page: Page, brought: tuple[int, int]) -> Report:
        def impossible(what: str) -> None:
            log.warning("job %s (%s) reports what cannot be: %s; it is cut off", job.job_id, job.asked.name, what)
            if job.worker is not None:
                # Not from inside the decision in which it was read.
                self._loop.call_soon(job.worker.close)

        iterations, used_ns = brought
        return Report(page, impossible, iterations=iterations, used_ns=used_ns)

    def _link(self, job: LiveJob, page: Page, report: Report) -> Link:
        def want() -> None:
            # Not from inside another decision: a record may be read in the middle of one.
            self._loop.call_soon(self.sizes.wanted, job)

        def broken() -> None:
            if job.worker is not None:
                self._loop.call_soon(job.worker.close)

        def paged(kind: Kind, done: bool) -> None:
            self._loop.call_soon(self.pager.paged, job, kind, done)

        return Link(job.job_id, page, report, self.lanes, want, broken, paged)

    def lease_is_over(self, job: LiveJob) -> None:
        if job.link is None:
            return
        job.link.holds = False
        core = self.scheduler.jobs[job.job_id]
        if core.lane is not None and len(self.lanes.get(core.lane).users) > 1 and not job.cleared:
            # Another user came while it ran; it did not know that it had to clear what it leaves.
            self.lanes.get(core.lane).drop_all()
            self._tell_of_holes(core.lane)

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

    def worker_lost(self, job: LiveJob) -> None:
        """The connection of the process that used the device has ended; its process, as a rule, with it."""
        self.leases.settle()
        if self._still_uses_memory(job):
            job.worker = None
            if job.link is not None:
                job.link.hang_up()
            core = self.scheduler.jobs[job.job_id]
            if core.lease is Lease.NONE and not core.stalled:
                # It goes on by itself, outside the lane. A lease would be lost on it.
                self.decide(ev.JobIdled(job.job_id))
            elif core.lease is Lease.PROMISED:
                self.leases.batons.recall(job)
            return
        # It is dead: whatever it passed on, it had passed on before.
        self.leases.settle()
        self.leases.report(None)
        self.leases.end_offer(job)
        self._drop_what_it_left(job)
        job.worker = None
        self.leases.holders.pop(job.job_id, None)
        job.used = footprint_of(self.scheduler, job)
        if job.link is not None:
            job.link.close()
            job.link = None
        phase = self.scheduler.jobs[job.job_id].phase
        if phase is Phase.WAITING:
            self.decide(ev.ContextWanted(job.job_id, False))
        elif phase is Phase.PAGING_OUT:
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

    def _worker_replaced_itself(self, job: LiveJob) -> None:
        """By exec: the process goes on, and everything that its program before had mapped went with that."""
        self._stop_watching(job)
        os.close(job.pidfd)
        job.pidfd = -1
        self.worker_lost(job)

    def _stop_watching(self, job: LiveJob) -> None:
        """Before the descriptor is closed: the event loop would take the next one of that number for it."""
        if job.watched:
            self._loop.remove_reader(job.pidfd)
            job.watched = False

    def launcher_lost(self, job: LiveJob, pid: int) -> None:
        job.launcher = None
        self.cancelling.launcher_lost(job, pid)
        if job.process is None and not job.returning:
            job.fault = job.fault or LAUNCHER_KILLED
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
        self.leases.settle()
        self.leases.end_offer(job)
        self.leases.report(None)
        self._drop_what_it_left(job)
        core = self.scheduler.jobs[job.job_id]
        job.final = {
            "iterations": core.iterations_done,
            "gpu_time_s": core.attained_s,
            "ran_s": core.ran_s,
            **footprint_of(self.scheduler, job),
            **job.counted,
        }
        if self._account is not None:
            self.shares.add(job.uid, self._account.look(job, core, self._loop.time()))
            self._account.forget_job(job.job_id)
        job.finished_at, job.exit_code = time.time(), exit_code
        self.leases.holders.pop(job.job_id, None)
        self.decide(ev.JobLeft(job.job_id))
        self._file(job)
        if all(other.uid != job.uid for other in self.jobs.values()):
            self.leases.batons.forget_user(job.uid)
        self.sizes.remember(job, core, exit_code)
        for waiter in job.waiters:
            waiter.send(msg.Ended(job.job_id, exit_code))
        if job.process is not None:
            job.process.close()
        self._stop_watching(job)
        job.close()
        log.info("job %s ended with status %s", job.job_id, exit_code)
        if not self.jobs:
            self.on_empty()

    def set_policy(self, policy: Policy) -> None:
        self.handle(ev.PolicyChanged(policy))

    # The core

    def handle(self, event: ev.Event) -> list[act.Action]:
        self.leases.settle()
        self.leases.report(None)
        return self.decide(event)

    def decide(self, event: ev.Event) -> list[act.Action]:
        self.leases.settle()
        now = self._loop.time()
        actions = self.scheduler.handle(event, now)
        answers: list[ev.Event] = []
        for action in actions:
            try:
                self._obey(action, answers)
            except Exception as error:
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

    def _cut_off(self, action: act.Action, error: Exception) -> None:
        log.error("%s could not be carried out (%s)", action, error, exc_info=not isinstance(error, OSError))
        job = self.jobs.get(getattr(action, "job_id", ""))
        if job is not None and job.worker is not None:
            self._loop.call_soon(job.worker.close)

    def _obey(self, action: act.Action, answers: list[ev.Event]) -> None:
        match action:
            case act.GrantLease(job_id):
                self.leases.grant(self.jobs[job_id])
            case act.RevokeLease(job_id):
                self.leases.revoke(self.jobs[job_id])
            case act.PromiseLease(job_id, _, after):
                if not self.leases.promise(self.jobs[job_id], self.jobs[after]):
                    answers.append(ev.PromiseRefused(job_id))
            case act.WithdrawPromise(job_id):
                if job_id in self.jobs:
                    self.leases.batons.withdraw(self.jobs[job_id])
            case act.AdmitJob(job_id):
                job = self.jobs[job_id]
                self.admit(job)
                note_place(self.scheduler, job)
                self._open_the_door_soon(job, answers)
                if job.launcher is not None and job.last_queued is not None:
                    job.launcher.send(msg.Admitted())
                    job.last_queued = None
            case act.AllowContext(job_id):
                self._open_the_door_soon(self.jobs[job_id], answers)
            case act.AllowGrowth(job_id):
                self.admit(self.jobs[job_id])
                note_place(self.scheduler, self.jobs[job_id])
                self._loop.call_soon(self.leases.yield_late, self.jobs[job_id])
            case act.RefuseGrowth(job_id):
                link = self.jobs[job_id].link
                if link is not None:
                    link.refuse()
                self._loop.call_soon(self.leases.yield_late, self.jobs[job_id])
            case act.LeaveLane(job_id):
                job = self.jobs[job_id]
                note_place(self.scheduler, job)
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

    # Memory

    def admit(self, job: LiveJob) -> None:
        """Tells the job's arena what it may use, and in which lane; and asks for what it waits for beyond that."""
        core = self.scheduler.jobs.get(job.job_id)
        if job.link is None or core is None:
            return
        if core.lane is None:
            # What it may have now it gets with a lane; so it must want one.
            if job.link.wanted is not None:
                self._loop.call_soon(self.sizes.wanted, job)
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
                other.clears = self._scrub or len(lane.users) > 1
                other.page.words[Word.SCRUB] = int(other.clears)

    def _drop_what_it_left(self, job: LiveJob) -> None:
        """A process that died in the middle of an iteration has cleared nothing.

        What it took for itself is not the lane's, also if we have yet to hear of that: a child of it may go on using
        that memory.
        """
        if job.link is not None:
            job.link.catch_up()
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
            together = [other for other in lost if other is not job]
            if together:
                of_user = [f"job {other.job_id}" for other in together if other.uid == job.uid]
                others = ["another user's job"] if len(of_user) < len(together) else []
                job.fault = (
                    f"a fatal fault on the GPU ended it together with {', '.join(of_user + others)}, under MPS; "
                    "one of them made it"
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
        self.leases.report(None)
        self.count_usage()

    def count_usage(self) -> None:
        for job in self.jobs.values():
            core = self.scheduler.jobs.get(job.job_id)
            if core is not None and self._account is not None:
                self.shares.add(job.uid, self._account.look(job, core, self._loop.time()))

    def totals_of_others(self, may_see: Callable[[int], bool]) -> dict[str, Any]:
        return totals(self.jobs.values(), self.scheduler, self.shares, may_see)

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


def _used_by(job: LiveJob, pid: int) -> AnotherProcess:
    text = f"job {job.job_id} uses the device from another process already (PID {pid}), and one at a time is managed"
    again, job.told_of_another = job.told_of_another, True
    return (AnotherProcessAgain if again else AnotherProcess)(text)
