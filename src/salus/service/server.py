"""`salus serve`: who may speak to the service, and what is answered.

One process, one thread, asyncio. A connection is a person's command, a launcher or a process of a job; which of them
shows in what it says first. When a connection ends, what hung on it ends: that is how deaths are noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import signal
import socket
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from salus import __version__
from salus.core.placement import choose
from salus.core.scheduler import Scheduler
from salus.errors import NoService, RequestRejected, SalusError, ServiceUnavailable
from salus.paths import make_private, take_over
from salus.plugins import load_policy
from salus.protocol import messages as msg
from salus.protocol.errors import NoSuchJob, NotLetIn, to_message, version_mismatch
from salus.registry import FILE, Numbers, Record, Registry, SavedJob
from salus.service.access import NOBODY_ELSE, Access
from salus.service.address import Address
from salus.service.caps import Caps
from salus.service.changes import Changes
from salus.service.connection import Connection
from salus.service.devices import Device, allowed
from salus.service.gpu import Gpu, Nvml
from salus.service.history import History, command_key
from salus.service.housekeeping import Housekeeping
from salus.service.job import LiveJob
from salus.service.journal import Journal
from salus.service.live import Live
from salus.service.mps import Mps, MpsUnavailable
from salus.service.recovery import Recovery
from salus.service.report import counted_by_launcher
from salus.service.stopped import LOOK_S as STOPPED_S
from salus.service.storage import HISTORY, Limits
from salus.service.usage import FILE as USAGE
from salus.service.usage import KEYS, LOOK_S, Account, Book
from salus.service.view import together

log = logging.getLogger(__name__)

LINGER_S = 1.0
"""A service that was started for a job waits this long after its last one."""
WATCH_S = 0.5
"""How often NVML is asked who uses how much."""
MPS_WATCH_S = 0.1
"""Whoever dies of a fault is told while its process still comes to its end."""
ACCEPT_AGAIN_S = 0.5
"""How long nobody new is let in after the process ran out of descriptors."""
REFUSAL_S = 1.0
"""How long somebody who is turned away may take to read that."""
BUSY_S = 0.2
"""How long a write to the list of jobs may hold everything up while a command or a launcher writes."""
GARBAGE_THRESHOLD = 20_000


@dataclass(frozen=True)
class Options:
    socket: Path
    state: Path
    devices: tuple[Device, ...]
    policy: str = "fair"
    journal: bool = True
    limits: Limits = field(default_factory=Limits)
    """Of what is kept on the disk."""
    caps: Caps = field(default_factory=Caps)
    """What users may ask for."""
    linger: bool = False
    """End when the last job has: the service was started by `salus run`."""
    access: Access = NOBODY_ELSE
    """Who else may run jobs here."""
    machine_wide: bool = False
    """Every user's commands find it, and are told if they are not let in."""
    visible: bool = False
    """Everyone sees everyone's jobs."""
    scrub: bool = False
    """What a job leaves in its lane is cleared at every switch."""
    stuck_after_s: float = 60.0
    """A lease holder that passes no boundary for this long is stuck; 0: none ever is."""
    on_stop: str = "release"
    """What SIGTERM does to jobs: `release` lets them go on unmanaged, `drain` waits for them."""
    mps: str = "off"
    """off, on, or auto: on where it can be."""


class Server:
    def __init__(self, options: Options) -> None:
        self._options = options
        self._is_for_others = options.machine_wide or options.access.for_others
        self._stopping = asyncio.Event()
        self._draining = False
        self._loop = asyncio.get_running_loop()
        self._linger: asyncio.TimerHandle | None = None
        self._connections: set[Connection] = set()
        self._launchers: dict[Connection, LiveJob] = {}
        self._workers: dict[Connection, LiveJob] = {}
        _allow_many_descriptors()
        self._address = Address(options.socket, for_others=self._is_for_others)
        take_over(options.state, "SALUS_STATE_DIR")
        journal_folder = make_private(options.state / "journal", "SALUS_STATE_DIR")
        self._history = History(options.state / HISTORY)
        numbers = Numbers.SHARED if self._is_for_others else Numbers.OWN
        self._registry = Registry(options.state / FILE, str(options.socket), numbers=numbers, busy_s=BUSY_S)
        self._registry.trim()
        self._account = Account(Book(options.state / USAGE, busy_s=BUSY_S))
        self._journals: dict[Journal, Scheduler] = {}
        self._lives = [self._make_live(device, journal_folder) for device in options.devices]
        self._recoveries = {live: Recovery(live) for live in self._lives}
        self._changes = Changes(self._registry, self._may_change, options.caps)
        self._answers: dict[type, Callable[[Connection, Any], None]] = {
            msg.Hello: self._on_hello,
            msg.Register: self._on_register,
            msg.Attach: self._on_attach,
            msg.Rejoin: self._on_rejoin,
            msg.Reattach: self._on_reattach,
            msg.Ready: self._on_ready,
            msg.Yielding: self._on_yielding,
            msg.Yielded: self._on_yielded,
            msg.Recalled: self._on_recalled,
            msg.Finished: self._on_finished,
            msg.ListJobs: self._on_list_jobs,
            msg.GetStatus: self._on_get_status,
            msg.GetUsage: self._on_get_usage,
            msg.CancelJob: self._on_cancel_job,
            msg.SetJob: self._changes.on_set_job,
            msg.PauseJob: self._changes.on_pause_job,
            msg.ResumeJob: self._changes.on_resume_job,
            msg.AwaitJob: self._on_await_job,
            msg.SetPolicy: self._on_set_policy,
            msg.Stop: self._on_stop,
        }

    def _make_live(self, device: Device, journal_folder: Path) -> Live:
        policy = load_policy(self._options.policy)
        journal = None
        if self._options.journal:
            which = f"-{device.number}" if len(self._options.devices) > 1 else ""
            segment_bytes = self._options.limits.segment_bytes(len(self._options.devices))
            journal = Journal(journal_folder, device.config, policy, which, segment_bytes)
        live = Live(
            device, policy, journal, self._history, self._registry, self._emptied, scrub=self._options.scrub,
            share_of=self._options.caps.share, may_not_grow=self._may_not_grow, account=self._account,
        )  # fmt: skip
        if journal is not None:
            self._journals[journal] = live.scheduler
        live.mps = self._start_mps(device)
        return live

    def _start_mps(self, device: Device) -> Mps | None:
        """None: jobs run without. One of the service before us is left to its jobs then, and ends with them."""
        mps = Mps(
            self._options.socket.parent / f"mps{device.number}", device.gpu.uuid if device.gpu is not None else ""
        )
        try:
            if device.gpu is None and self._options.mps == "on":
                raise MpsUnavailable("there is no GPU")
            if device.gpu is not None and self._options.mps != "off":
                mps.start()
                return mps
        except MpsUnavailable as error:
            if self._options.mps == "on":
                raise RequestRejected(f"--mps: {error}") from None
            log.warning("runs without MPS: %s", error)
        mps.stop()
        return None

    async def run(self, started: Callable[[], None] = lambda: None) -> int:
        """Serves until told to end. 1 if the journal broke off, else 0."""
        listener = self._address.listen()
        self._loop.add_reader(listener.fileno(), self._accept, listener)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.stop, self._options.on_stop == "drain")
        chores = [asyncio.create_task(self._look_for_stuck()), asyncio.create_task(self._look_for_stopped())]
        chores += [asyncio.create_task(self._keep_account())]
        housekeeping = Housekeeping(
            self._options.state, self._options.limits, self._journals, self._registry, self._history, self._account
        )
        chores += [asyncio.create_task(housekeeping.run())]
        for live in self._lives:
            if live.device.gpu is not None:
                chores.append(asyncio.create_task(self._watch_gpu(live, live.device.gpu)))
            if live.mps is not None:
                chores.append(asyncio.create_task(self._watch_mps(live, live.mps)))
        self._recover()
        if self._options.linger:
            self._linger = self._loop.call_later(10 * LINGER_S, self._end_if_empty)
        started()
        # What is here now stays; a collection in the middle of a hand-over would be in the way.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GARBAGE_THRESHOLD)
        try:
            await self._stopping.wait()
        finally:
            for chore in chores:
                chore.cancel()
            self._loop.remove_reader(listener.fileno())
            self._address.close(listener)
            self._release()
            for connection in list(self._connections):
                connection.send(msg.Farewell())
                connection.close()
            for live in self._lives:
                if live.mps is not None:
                    live.mps.stop()
            for journal in self._journals:
                journal.close()
            self._history.close()
            self._account.close()
            self._registry.close()
            self._address.leave()
        return 1 if any(journal.broken for journal in self._journals) else 0

    def _recover(self) -> None:
        """Each job that was running before goes to the device it was on."""
        known = {live.device.key: live for live in self._lives}
        jobs: dict[Live, list[SavedJob]] = {live: [] for live in self._lives}
        for saved in self._registry.running():
            live = known.get(saved.device) if saved.device else self._lives[0]
            if live is None:
                log.warning("job %s ran on %s, which is not shared any more", saved.job_id, saved.device)
                self._registry.release(saved.job_id)
                continue
            jobs[live].append(saved)
        for live, of_it in jobs.items():
            self._recoveries[live].begin(of_it)

    def _release(self) -> None:
        """The jobs go on unmanaged. Before they hear of it: then they write themselves how they ended."""
        self._write_account()
        for live in self._lives:
            for job in live.jobs.values():
                row = live.describe(job)
                self._registry.describe(row)
                self._registry.release(job.job_id)
                if job.launcher is not None:
                    job.launcher.send(msg.Described(row))

    def stop(self, drain: bool = False) -> None:
        count = sum(len(live.jobs) for live in self._lives)
        if drain and count:
            log.info("ends when its %d jobs have", count)
            self._draining = True
        else:
            self._stopping.set()

    # Connections

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            self._pause_accepting(listener, error)
            return
        connection = Connection(sock, self._on_message, self._on_closed)
        self._connections.add(connection)
        if self._options.access.lets_in(connection.uid):
            connection.listen()
        else:
            log.warning("user %d was turned away", connection.uid)
            connection.send(
                msg.Failed(
                    NotLetIn.code,
                    f"the service at {self._options.socket} belongs to user {os.getuid()}, who has not let you in "
                    "(salus serve --users); start your own",
                )
            )
            # Not at once: closed with something unread, a socket takes back what it has sent.
            self._loop.call_later(REFUSAL_S, connection.close)

    def _pause_accepting(self, listener: socket.socket, error: OSError) -> None:
        """Where there is no descriptor left for a peer, it waits at the socket, and others are served meanwhile."""
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            log.warning("nobody new can be let in for a moment (%s)", error.strerror)
            self._loop.remove_reader(listener.fileno())
            self._loop.call_later(ACCEPT_AGAIN_S, self._accept_again, listener)

    def _accept_again(self, listener: socket.socket) -> None:
        if not self._stopping.is_set():
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _on_closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if self._stopping.is_set():
            return
        worker = self._workers.pop(connection, None)
        if worker is not None and worker.job_id in worker.live.jobs:
            if worker.worker is connection:
                worker.live.worker_lost(worker)
            elif worker.process is connection:
                worker.live.left_the_door(worker)
        launched = self._launchers.pop(connection, None)
        if launched is not None and launched.job_id in launched.live.jobs:
            launched.live.launcher_lost(launched, connection.pid)

    def _on_message(self, connection: Connection, message: msg.Message) -> None:
        if not connection.greeted and not isinstance(message, msg.Hello):
            raise msg.ProtocolError("a message before hello")
        try:
            self._answers[type(message)](connection, message)
        except msg.ProtocolError:
            raise
        except SalusError as error:
            connection.send(to_message(error))
        except sqlite3.Error as error:
            log.warning("the list of jobs cannot be read (%s)", error)
            connection.send(msg.Failed(RequestRejected.code, f"the list of jobs cannot be read ({error})"))

    # Messages

    def _on_hello(self, connection: Connection, message: msg.Hello) -> None:
        if message.version != msg.VERSION:
            connection.send(to_message(version_mismatch(message.version, message.salus[:40], __version__)))
            connection.close()
            return
        connection.greeted = True
        connection.send(msg.Welcome(msg.VERSION, __version__, os.getpid()))

    def _on_register(self, connection: Connection, message: msg.Register) -> None:
        if connection in self._launchers:
            raise msg.ProtocolError("a second job on one connection")
        if self._draining:
            raise ServiceUnavailable(
                "the service ends when its jobs have, and takes no new ones; "
                "try again then, or go without: salus run --if-no-service run"
            )
        live = self._place(connection, message)
        self._check_caps(connection, message, live)
        job = live.register(connection, message)
        self._launchers[connection] = job
        if self._linger is not None:
            self._linger.cancel()
        gpu, mps = job.live.device.gpu, job.live.mps
        job.sm_share = job.live.sizes.sm_share(job)
        connection.send(
            msg.Registered(
                job.job_id,
                job.token,
                None if gpu is None else gpu.uuid,
                mps_pipe=None if mps is None else str(mps.pipe),
                sm_share=job.sm_share,
                # MPS knows two: as usual, and after those.
                mps_priority=None if mps is None else int(message.priority < 0),
            )
        )

    def _check_caps(self, connection: Connection, asked: msg.Register, live: Live) -> None:
        uid = connection.uid
        key = command_key(uid, asked.command, asked.directory)
        more_bytes = live.sizes.expected(asked, key).total_bytes
        self._options.caps.check(
            uid,
            weight=asked.weight,
            priority=asked.priority,
            jobs=1 + sum(job.uid == uid for one in self._lives for job in one.jobs.values()),
            memory_bytes=self._memory_of(uid) + more_bytes,
            more_bytes=more_bytes,
        )

    def _memory_of(self, uid: int) -> int:
        """What the user's jobs have reserved, on all devices."""
        cores = (one.scheduler.jobs[key] for one in self._lives for key, job in one.jobs.items()
                 if job.uid == uid and key in one.scheduler.jobs)  # fmt: skip
        return sum(core.footprint.total_bytes for core in cores)

    def _may_not_grow(self, uid: int, more_bytes: int) -> str | None:
        return self._options.caps.memory_refusal(uid, self._memory_of(uid) + more_bytes, more_bytes)

    def _place(self, connection: Connection, asked: msg.Register) -> Live:
        """The device a new job goes to: one it names, else one with room, else the one with the least to do."""
        may = allowed(self._options.devices, asked.gpu, asked.visible)
        key = command_key(connection.uid, asked.command, asked.directory)
        needs_bytes = self._lives[0].sizes.expected(asked, key).total_bytes
        return self._lives[choose(needs_bytes, {index: self._lives[index].room() for index in may})]

    def _on_attach(self, connection: Connection, message: msg.Attach) -> None:
        if connection in self._workers:
            raise msg.ProtocolError("a second attach on one connection")
        self._workers[connection] = self._live_of(message.job_id).attach(connection, message)

    def _on_rejoin(self, connection: Connection, message: msg.Rejoin) -> None:
        if connection in self._launchers:
            raise msg.ProtocolError("a second job on one connection")
        job = self._recoveries[self._live_of(message.job_id)].rejoin(connection, message)
        self._launchers[connection] = job
        connection.send(msg.Registered(job.job_id, job.token))
        job.live.leases.share_counts(job)

    def _on_reattach(self, connection: Connection, message: msg.Reattach) -> None:
        if connection in self._workers:
            raise msg.ProtocolError("a second attach on one connection")
        recovery = self._recoveries[self._live_of(message.job_id)]
        self._workers[connection] = recovery.reattach(connection, message)

    def _on_ready(self, connection: Connection, message: msg.Ready) -> None:
        job = self._worker(connection)
        job.live.leases.ready(job)

    def _on_yielding(self, connection: Connection, message: msg.Yielding) -> None:
        job = self._worker(connection)
        job.live.leases.yielding(job, message.now)

    def _on_yielded(self, connection: Connection, message: msg.Yielded) -> None:
        job = self._worker(connection)
        try:
            job.live.leases.yielded(job, message.wants_more, message.passed)
        except RequestRejected as error:
            raise msg.ProtocolError(str(error)) from None

    def _on_recalled(self, connection: Connection, message: msg.Recalled) -> None:
        job = self._worker(connection)
        job.live.leases.recalled(job, message.ticket)

    def _on_finished(self, connection: Connection, message: msg.Finished) -> None:
        job = self._launchers.get(connection)
        if job is None:
            raise msg.ProtocolError("the end of a job that was never registered here")
        job.fault = job.fault or message.why or None
        if not job.last_pid:
            # No process of it has used the device since this service began.
            job.counted = counted_by_launcher(message, time.time() - job.submitted_at)
        job.live.end(job, message.exit_code)
        connection.send(msg.Described(job.live.describe(job)))
        connection.send(msg.Done(came=job.came or job.had_worker))

    def _on_list_jobs(self, connection: Connection, message: msg.ListJobs) -> None:
        rows = []
        for live in self._lives:
            live.refresh()
            rows += [live.describe(job) for job in live.jobs.values() if self._may_see(connection, job.uid)]
        past = [*self._registry.unmanaged(), *(self._registry.ended() if message.everything else ())]
        rows += [record.row for record in past if self._may_see(connection, record.uid)]
        rows.sort(key=lambda row: int(row["id"]))
        self._send_rows(connection, rows, msg.Jobs)

    def _send_rows(self, connection: Connection, rows: list[dict[str, Any]], kind: type[msg.Jobs | msg.Usage]) -> None:
        """In as many packets as it takes."""
        while True:
            count = msg.fitting(rows)
            connection.send(kind(rows[:count], more=count < len(rows)))
            rows = rows[count:]
            if not rows:
                return

    def _on_get_status(self, connection: Connection, message: msg.GetStatus) -> None:
        found = []
        for live in self._lives:
            live.refresh()
            status = live.status()
            status["others"] = live.totals_of_others(lambda uid: self._may_see(connection, uid))
            if not self._is_administrator(connection):
                status["journal"] = None
            for lane in status["lanes"]:
                lane["jobs"] = [job_id for job_id in lane["jobs"] if self._may_see(connection, live.jobs[job_id].uid)]
                lane["holder"] = lane["holder"] if lane["holder"] in lane["jobs"] else None
            found.append(status)
        connection.send(msg.Status(together(found)))

    def _on_get_usage(self, connection: Connection, message: msg.GetUsage) -> None:
        """A user's own; the administrator's is everybody's."""
        if not message.by or not all(key in KEYS for key in message.by):
            raise RequestRejected("usage can be added up by user, day and job")
        self._write_account()
        uid = None if self._is_administrator(connection) else connection.uid
        rows = self._account.sums(message.by, message.since, uid)
        self._send_rows(connection, rows, msg.Usage)

    def _on_cancel_job(self, connection: Connection, message: msg.CancelJob) -> None:
        job = self._may_change(connection, message.job_id, "end")
        job.live.cancelling.cancel(job, message.force)
        connection.send(msg.Done(f"job {job.job_id} was {'killed' if message.force else 'told to end'}"))

    def _may_change(self, connection: Connection, job_id: str, what: str) -> LiveJob:
        """The job, if this service looks after it and the user may do this to it."""
        job = self._job(connection, job_id)
        if isinstance(job, Record) and job.goes_on:
            raise RequestRejected(
                f"job {job_id} goes on without a service, since the one that it was started with has ended; "
                f"kill {job.launcher or job.worker} ends it"
            )
        if isinstance(job, Record) or job.finished_at is not None:
            raise RequestRejected(f"job {job_id} has ended already")
        if job.uid != connection.uid and not self._is_administrator(connection):
            raise RequestRejected(f"job {job_id} is another user's; only its owner and the administrator can {what} it")
        return job

    def _on_await_job(self, connection: Connection, message: msg.AwaitJob) -> None:
        job = self._job(connection, message.job_id)
        if isinstance(job, Record):
            if job.goes_on:
                raise NoService(f"job {message.job_id} goes on without a service; nobody here will hear of its end")
            connection.send(msg.Ended(message.job_id, job.row["exit_code"]))
        elif job.finished_at is not None:
            connection.send(msg.Ended(job.job_id, job.exit_code))
        else:
            job.waiters.append(connection)

    def _on_set_policy(self, connection: Connection, message: msg.SetPolicy) -> None:
        self._require_administrator(connection)
        for live in self._lives:
            # Each its own: a policy may remember something of the jobs it was asked about.
            live.set_policy(load_policy(message.policy))
        connection.send(msg.Done(f"the policy is {self._lives[0].scheduler.policy} now"))

    def _on_stop(self, connection: Connection, message: msg.Stop) -> None:
        self._require_administrator(connection)
        connection.send(msg.Done())
        self.stop(message.drain)

    # Helpers

    def _worker(self, connection: Connection) -> LiveJob:
        job = self._workers.get(connection)
        if job is None or job.job_id not in job.live.jobs or job.worker is not connection:
            raise msg.ProtocolError("a lease message from a process that is not attached")
        return job

    def _is_administrator(self, connection: Connection) -> bool:
        return connection.uid in (os.getuid(), 0)

    def _require_administrator(self, connection: Connection) -> None:
        if not self._is_administrator(connection):
            raise RequestRejected(f"only the user who runs the service ({os.getuid()}) can do that")

    def _may_see(self, connection: Connection, uid: int) -> bool:
        return uid == connection.uid or self._options.visible or self._is_administrator(connection)

    def _job(self, connection: Connection, job_id: str) -> LiveJob | Record:
        live = self._live_of(job_id)
        job: LiveJob | Record | None = live.jobs.get(job_id) or live.ended.get(job_id)
        job = job or self._registry.find(job_id)
        if job is None or not self._may_see(connection, job.uid):
            raise NoSuchJob(f"there is no job {job_id:.40}; salus ps --all lists those there are")
        return job

    def _live_of(self, job_id: str) -> Live:
        """Where the job is; any, if it is nowhere."""
        return next((live for live in self._lives if job_id in live.jobs or job_id in live.ended), self._lives[0])

    def _emptied(self) -> None:
        if any(live.jobs for live in self._lives):
            return
        if self._draining:
            self._loop.call_soon(self._stopping.set)
        elif self._options.linger:
            self._linger = self._loop.call_later(LINGER_S, self._end_if_empty)

    def _end_if_empty(self) -> None:
        if not any(live.jobs for live in self._lives):
            self._stopping.set()

    async def _watch_gpu(self, live: Live, gpu: Gpu) -> None:
        """Asks NVML now and then, in a thread: the driver may take its time."""
        nvml = Nvml()
        while True:
            await asyncio.sleep(WATCH_S)
            used_by, used_bytes = await asyncio.to_thread(nvml.usage, gpu)
            activity = await asyncio.to_thread(nvml.activity, gpu)
            live.sizes.gpu_seen(used_by, used_bytes - gpu.used_bytes)
            if activity is not None:
                live.sizes.activity_seen(activity, used_by)

    async def _watch_mps(self, live: Live, mps: Mps) -> None:
        while True:
            await asyncio.sleep(MPS_WATCH_S)
            live.lost_together(mps.lost())

    async def _keep_account(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for live in self._lives:
                live.count_usage()
                live.shares.mark(self._loop.time())
            if self._account.is_due(self._loop.time()):
                self._write_account()

    def _write_account(self) -> None:
        """With what the jobs used until now, which otherwise is read when something happens."""
        for live in self._lives:
            live.refresh()
        self._account.write(self._loop.time())

    async def _look_for_stopped(self) -> None:
        while True:
            await asyncio.sleep(STOPPED_S)
            for live in self._lives:
                live.stopped.look()

    async def _look_for_stuck(self) -> None:
        after_s = self._options.stuck_after_s
        while after_s > 0:
            await asyncio.sleep(min(1.0, after_s / 4))
            for live in self._lives:
                live.watch.look_for_stuck(after_s)


def _allow_many_descriptors() -> None:
    """One for every chunk of every lane, and a few for every job."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
