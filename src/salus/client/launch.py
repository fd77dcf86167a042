"""`salus run` from its beginning to its end: the process in front, which the shell and its terminal know.

It forks the keeper, which registers the job and starts its command (`keeper`). Then it passes on the signals that come
to it, waits, and ends with the status of the command. If the keeper is killed, it ends what is left of the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from salus import processes
from salus.client import kept_record
from salus.client.connection import ServiceConnection
from salus.client.environment import environment_for, unmanaged_environment
from salus.client.keeper import ENDS, READY, START, Keeper, become_subreaper
from salus.client.listener import Listener
from salus.client.say import say
from salus.client.start import connect
from salus.client.unseen import Unseen
from salus.ending import Ending, Phase
from salus.errors import NoService, RequestRejected, SalusError, ServiceUnavailable
from salus.protocol import messages as msg

START_ATTEMPTS = 3
PASSED_ON = (*ENDS, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
_TAKEN = (*PASSED_ON, signal.SIGCHLD)
FROM_KEYS = (signal.SIGINT, signal.SIGQUIT)
SI_KERNEL = 0x80
"""As the sender of a signal: the kernel, on behalf of the terminal."""


def run(asked: msg.Register, *, announce: bool = False, unmanaged_if_none: bool = False) -> int:
    """Runs a job to its end and gives back its exit status, as a shell would: 128 and the signal that killed it.

    What keeps the job from its start is said on stderr. Call it from the main thread, where there is no other.
    """
    # Where children are ignored, nobody hears of their end.
    ignores_children = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ours, keepers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    become_subreaper()
    keeper = os.fork()
    if keeper == 0:
        ours.close()
        status = 1
        try:
            status = _keep(keepers, asked, announce, unmanaged_if_none, ignores_children)
        except BaseException:
            traceback.print_exc()
        finally:
            # Whatever was to be done at the end of this program is the other process's to do.
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(status)
    keepers.close()
    # Until the command starts, a signal ends this process as it ends any other, and the keeper with it.
    if ours.recv(len(START)) == START:
        signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
        with contextlib.suppress(OSError):
            ours.send(READY)
    return _wait_for(keeper, ours, asked.grace_s)


def as_shell_status(status: int) -> int:
    return status if status >= 0 else 128 - status


# In front.


def _wait_for(keeper: int, ours: socket.socket, grace_s: float) -> int:
    """How the keeper ended: with the status of the job. Whatever is left of the job by then is ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
    status: int | None = None
    ending = Ending(lambda: processes.below(os.getpid()), grace_s)
    while True:
        status = _reaped(keeper, status)
        if status is not None:
            if status < 0 and ending.phase is Phase.RUNNING:
                say("the keeper of the job was killed; what is left of the job is told to end")
                ending.ask(Phase.ENDING, time.monotonic())
            ending.look(time.monotonic())
            if status >= 0 or ending.phase is Phase.ENDED:
                return as_shell_status(status)
        if ending.look_at_s is None:
            came: signal.struct_siginfo | None = signal.sigwaitinfo(_TAKEN)
        else:
            came = signal.sigtimedwait(_TAKEN, max(0.0, ending.look_at_s - time.monotonic()))
        if came is None or came.si_signo not in PASSED_ON:
            continue
        if status is not None and came.si_signo in ENDS:
            ending.ask(Phase.KILLING, time.monotonic())
        typed = came.si_signo in FROM_KEYS and came.si_code == SI_KERNEL
        with contextlib.suppress(OSError):
            ours.send(bytes([came.si_signo, typed]))


def _reaped(keeper: int, status: int | None) -> int | None:
    """Takes note of all children that have ended; how the keeper did, once it has."""
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if not pid:
            return status
        if pid == keeper:
            status = os.waitstatus_to_exitcode(ended)


# In the keeper.


def _keep(
    front: socket.socket, asked: msg.Register, announce: bool, unmanaged_if_none: bool, ignores_children: bool
) -> int:
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    connection: ServiceConnection | None = None
    try:
        try:
            connection, job = _register(asked)
            who, environment = f"job {job.job_id}", environment_for(job, os.environ)
        except ServiceUnavailable as error:
            if not unmanaged_if_none:
                raise
            say(f"{error}; {asked.name} runs unmanaged")
            job, who, environment = None, asked.name, unmanaged_environment(os.environ, asked.gpu)
        if job is not None and asked.sm_share is not None and job.mps_pipe is None:
            say(f"{who}: --sm-share has no effect: the service runs without MPS (salus serve --mps on)")
        _take_output(None if asked.log is None else _open_log(Path(asked.log)), job if announce else None)
        keeper = Keeper(front, who, asked.grace_s, asked.time_limit_s)
        if not _front_is_ready(front):
            return 1
        unseen = None if job is None else Unseen(job.job_id, asked.command, on_gpu=job.gpu is not None)
        keeper.start(asked.command, environment, ignores_children=ignores_children)
    except SalusError as error:
        if connection is not None:
            with contextlib.suppress(SalusError):
                connection.send(msg.Finished(error.status))
            connection.close()
        print(f"salus: {error}", file=sys.stderr)
        return error.status
    listener = None
    if connection is not None and job is not None:
        listener = Listener(
            connection,
            job,
            lambda force: keeper.ask(Phase.KILLING if force else Phase.ENDING),
            kept_record.begin(connection, asked, job),
        )
        listener.start()
    if unseen is not None:
        unseen.watch()
    status = keeper.wait()
    if listener is not None:
        listener.finish(msg.Finished(status, keeper.why))
    if unseen is not None and listener is not None:
        unseen.tell(status, came=listener.came)
    return as_shell_status(status)


def _register(asked: msg.Register) -> tuple[ServiceConnection, msg.Registered]:
    for left in reversed(range(START_ATTEMPTS)):
        connection = connect(start=True)
        try:
            job: msg.Registered = connection.request(asked)
        except NoService:
            # It was about to end when we came.
            if not left:
                raise
        else:
            connection.wait_for_ever()
            return connection, job
    raise AssertionError(START_ATTEMPTS)


def _take_output(log: int | None, announced: msg.Registered | None) -> None:
    if announced is not None:
        print(announced.job_id, flush=True)
    if log is not None:
        # For what the job writes, and for what is said to it.
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.close(log)


def _open_log(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RequestRejected(
            f"{path}: cannot be written ({error.strerror}); make room, or set SALUS_STATE_DIR"
        ) from None


def _front_is_ready(front: socket.socket) -> bool:
    """From now on it passes signals on. False: it has ended, so that nobody wants the job any more."""
    try:
        front.send(START)
        return front.recv(len(READY)) == READY
    except OSError:
        return False
