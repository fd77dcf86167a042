"""The keeper of a job: a process that starts the job's command, keeps all that descends from it, and sees to its end.

`salus run` is two processes: the one in front (`launch`), which the shell and its terminal know, and the keeper, its
child. Each sees to it that nothing of the job is left when the other is killed.

- All that the command starts stays below the keeper, also after a double fork or in a session of its own: the keeper
  is the job's subreaper. So the job has ended when the keeper has no child any more.
- The command is in the process group of the one in front, so it has the terminal, Ctrl-C and Ctrl-Z as if it had been
  started there. The keeper is in a group of its own, which none of that reaches: a job that is stopped can be ended.
- When the one in front is killed, its socket closes and the keeper ends the job. When the keeper is killed, the kernel
  kills the command, and the rest falls to the one in front, which is a subreaper too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shlex
import signal
import socket
import subprocess
import time
from collections import deque
from pathlib import Path

from salus import processes
from salus.client.say import say
from salus.ending import Ending, Phase
from salus.errors import CommandNotStarted
from salus.processes import Process
from salus.units import format_duration

ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
"""Signals that ask for an end."""
FORCE = signal.SIGQUIT
"""To the keeper, from `salus cancel --force` where there is no service. SIGTERM to the keeper ends the job, too."""
START, READY = b"start", b"ready"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_HANDLED = (signal.SIGCHLD, signal.SIGTERM, FORCE)
_BLOCKED = (
    signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
)  # fmt: skip
"""Somebody else's business. (With SIGTTOU blocked, the keeper may write to a terminal that another group uses.)"""
LONGEST_SLEEP_S = 3600.0
"""The kernel counts only so many milliseconds."""
NAMED = 5
"""How many processes a message names."""

_libc = ctypes.CDLL(None)


def become_subreaper() -> None:
    """What descends from this process stays below it when its own parent dies."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Keeper:
    """`who` is the job, in messages."""

    def __init__(self, front: socket.socket, who: str, grace_s: float, time_limit_s: float | None) -> None:
        self._front, self.who, self._time_limit_s = front, who, time_limit_s
        self._front_process = processes.look_at(os.getppid())
        self.why = ""
        """Why the job was ended before its command came to its end by itself; nothing where somebody cancelled it."""
        self._ending = Ending(self._find, grace_s)
        self._asked: deque[Phase] = deque()
        self._command = -1
        self._status: int | None = None
        self._childless = self._interrupted = False
        self._over_at: float | None = None
        self._awake, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        become_subreaper()

    def start(self, command: list[str], environment: dict[str, str], *, ignores_children: bool) -> None:
        """Raises `CommandNotStarted`. `ignores_children`: the caller of `salus run` ignores SIGCHLD."""
        group, keeper = os.getpgid(os.getppid()), os.getpid()
        ignored = [number for number in _HANDLED if signal.getsignal(number) is signal.SIG_IGN]
        ignored += [signal.SIGCHLD] if ignores_children else []
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number in _HANDLED:
            signal.signal(number, lambda *_: None)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)

        def as_the_caller_is() -> None:
            _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != keeper:
                os.kill(os.getpid(), signal.SIGKILL)
            with contextlib.suppress(OSError):
                # The group is gone when the one in front is. Then we are about to end the job.
                os.setpgid(0, group)
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

        try:
            started = subprocess.Popen(command, env=environment, preexec_fn=as_the_caller_is)
        except OSError as error:
            raise _not_started(command[0], error) from None
        self._command = started.pid
        # It is waited for here, with all the others.
        started.returncode = 0
        if self._time_limit_s is not None:
            self._over_at = time.monotonic() + self._time_limit_s

    def ask(self, phase: Phase) -> None:
        """From any thread: the job is to end."""
        self._asked.append(phase)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"\0")

    def wait(self) -> int:
        """Until nothing of the job is left. How its command ended: negative, the signal that killed it."""
        poll = select.poll()
        poll.register(self._awake, select.POLLIN)
        poll.register(self._front, select.POLLIN)
        self._reap()
        while self._status is None or self._ending.phase is not Phase.ENDED:
            for descriptor, _ in poll.poll(self._timeout_ms()):
                if descriptor == self._awake:
                    self._woken(os.read(self._awake, 4096))
                elif not self._front_says():
                    poll.unregister(self._front)
            self._look()
        if self._ending.unreachable:
            say(f"{self.who}: not ours to end, and left as it is: {_named(list(self._ending.unreachable.values()))}")
        return self._status

    def _timeout_ms(self) -> float | None:
        times = [at_s for at_s in (self._over_at, self._ending.look_at_s) if at_s is not None]
        if not times:
            return None
        return min(max(0.0, min(times) - time.monotonic()), LONGEST_SLEEP_S) * 1000 + 1

    # What happens.

    def _woken(self, signals: bytes) -> None:
        if signal.SIGCHLD in signals:
            self._reap()
        if FORCE in signals:
            self._ask(Phase.KILLING)
        elif signal.SIGTERM in signals:
            self._ask(Phase.ENDING)
        while self._asked:
            self._ask(self._asked.popleft())

    def _front_says(self) -> bool:
        """A signal came to the one in front. False: that one is gone."""
        try:
            packet = self._front.recv(2)
        except OSError:
            packet = b""
        if not packet:
            if self._ending.phase is Phase.RUNNING:
                self.why = "its salus run was killed"
            self._ask(Phase.ENDING)
            return False
        number, typed = packet
        if self._status is not None or self._ending.phase is not Phase.RUNNING:
            # The command has ended, or is told to. Whoever asks once more does not want to wait.
            if number in ENDS:
                self._ask(Phase.KILLING if self._ending.phase is Phase.ENDING else Phase.ENDING)
            return True
        self._interrupted = self._interrupted or number in ENDS
        if not typed:
            # What is typed reaches the command by itself. (A process that we have not waited for keeps its number.)
            os.kill(self._command, number)
        return True

    def _reap(self) -> None:
        """Takes note of all children that have ended: the command, and what has lost its parent."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._childless = True
                break
            if not pid:
                break
            if pid == self._command:
                self._status = os.waitstatus_to_exitcode(status)
        if self._status is not None:
            # What is left after Ctrl-C has had its chance to end by itself.
            self._ask(Phase.ENDING if self._interrupted and not self._childless else Phase.LEAVING)

    def _look(self) -> None:
        now = time.monotonic()
        if self._over_at is not None and now >= self._over_at:
            if self._ending.phase is Phase.RUNNING:
                limit = format_duration(self._time_limit_s or 0.0)
                self.why = f"its time limit of {limit} was over"
                say(f"{self.who}: its time limit of {limit} is over; it is told to end")
            self._over_at = None
            self._ask(Phase.ENDING)
        was = self._ending.phase
        left = self._ending.look(now)
        if was is Phase.LEAVING and self._ending.phase is Phase.ENDING:
            say(f"{self.who}: its command has ended; what it left running is told to end: {_named(left)}")

    def _ask(self, phase: Phase) -> None:
        before = self._ending.phase
        self._ending.ask(phase, time.monotonic())
        ends = before is Phase.RUNNING and self._ending.phase in (Phase.ENDING, Phase.KILLING)
        if ends and self._front_process is not None:
            # By Ctrl-Z it may have been stopped together with the job. It is to end as well.
            processes.resume(self._front_process)

    def _find(self) -> list[Process]:
        # Where a service that we started is our child, too, we have to look. What forks meanwhile may be missed once.
        return [] if self._childless else processes.below(os.getpid()) or processes.below(os.getpid())


def _named(found: list[Process]) -> str:
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(map(str, found[:NAMED])) + more


def _not_started(name: str, error: OSError) -> CommandNotStarted:
    is_script = name.endswith(".py") and Path(name).is_file()
    advice = f"; write: {shlex.join(['python', name])}" if is_script else ""
    status = 127 if isinstance(error, FileNotFoundError) else 126
    return CommandNotStarted(f"{name}: cannot be run ({error.strerror}){advice}", status)
