"""The end of a job: all its processes are asked to end, and after a while what is left is killed.

A job may fork while it is being ended, so its processes are looked for again and again until there are none. Whoever
ends a job calls `look` when something may have changed, and at `look_at_s` at the latest.

    RUNNING --> LEAVING --> ENDING --> KILLING --> ENDED
       a phase may be skipped; nothing leads back

Standard library only: launchers use it too.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from enum import Enum

from salus import processes
from salus.errors import InvariantBroken
from salus.processes import Process

GRACE_S = 10.0
"""Between SIGTERM and SIGKILL, where nothing else was asked for."""
LEAVING_S = 1.0
"""How long what a command leaves running may take to end by itself: helpers that notice the end of their parent."""
LOOK_S = 0.1
"""How often a job that was told to end is looked at."""
KILL_S = 0.02
"""The same while it is being killed: it may be forking."""


class Phase(Enum):
    RUNNING = "running"
    LEAVING = "leaving"
    """The command has ended. What it left running may end by itself."""
    ENDING = "ending"
    """All have been sent SIGTERM."""
    KILLING = "killing"
    """All are sent SIGKILL."""
    ENDED = "ended"
    """No process is left, but perhaps some that are not ours to end."""


TRANSITIONS = {
    Phase.RUNNING: {Phase.LEAVING, Phase.ENDING, Phase.KILLING},
    Phase.LEAVING: {Phase.ENDING, Phase.KILLING, Phase.ENDED},
    Phase.ENDING: {Phase.KILLING, Phase.ENDED},
    Phase.KILLING: {Phase.ENDED},
    Phase.ENDED: set(),
}


class Ending:
    """`find` lists the processes of the job, parents before their children."""

    def __init__(
        self,
        find: Callable[[], list[Process]],
        grace_s: float = GRACE_S,
        send: Callable[[Process, int], bool] = processes.send,
    ) -> None:
        self._find, self._grace_s, self._send = find, grace_s, send
        self.phase = Phase.RUNNING
        self.look_at_s: float | None = None
        """When `look` is due; None: not before something happens."""
        self.unreachable: dict[tuple[int, int], Process] = {}
        """Processes of another user, as of a command under sudo."""
        self._over_at = 0.0
        """When the next phase begins."""
        self._told: set[tuple[int, int]] = set()

    def ask(self, phase: Phase, now: float) -> None:
        """From now on in this phase, unless the job is nearer to its end already."""
        if phase in TRANSITIONS[self.phase]:
            self._enter(phase, now)

    def look(self, now: float) -> list[Process]:
        """Does what is due, and gives back the processes that were left."""
        self.look_at_s = None
        if self.phase in (Phase.RUNNING, Phase.ENDED):
            return []
        left = [process for process in self._find() if _key(process) not in self.unreachable]
        if left and self.phase is not Phase.KILLING and now >= self._over_at:
            self._enter(Phase.ENDING if self.phase is Phase.LEAVING else Phase.KILLING, now)
        if self.phase is Phase.ENDING:
            self._tell(left)
            self.look_at_s = min(self._over_at, now + LOOK_S)
        elif self.phase is Phase.KILLING:
            for process in left:
                self._signal(process, signal.SIGKILL)
            self.look_at_s = now + KILL_S
        else:
            self.look_at_s = self._over_at
        if all(_key(process) in self.unreachable for process in left):
            self._enter(Phase.ENDED, now)
        return left

    def _enter(self, phase: Phase, now: float) -> None:
        """The one way from phase to phase."""
        if phase not in TRANSITIONS[self.phase]:
            raise InvariantBroken(f"a job that is {self.phase.value} cannot be {phase.value}")
        self.phase = phase
        self._over_at = now + {Phase.LEAVING: LEAVING_S, Phase.ENDING: self._grace_s}.get(phase, 0.0)
        self.look_at_s = None if phase is Phase.ENDED else now

    def _tell(self, left: list[Process]) -> None:
        """SIGTERM to each of them, once.

        What appears later below a process that has been told is started by its handler, to clear up. What appears
        without such a parent was forked just before that one died, and has not been told.
        """
        there, first = {process.pid for process in left}, not self._told
        for process in left:
            if _key(process) not in self._told and (first or process.parent not in there):
                self._told.add(_key(process))
                self._signal(process, signal.SIGTERM)
        for process in left:
            # What is stopped can neither clear up nor end. It may be stopped again.
            if process.state == processes.STOPPED:
                self._signal(process, signal.SIGCONT)

    def _signal(self, process: Process, number: int) -> None:
        try:
            self._send(process, number)
        except PermissionError:
            self.unreachable[_key(process)] = process


def end_all(find: Callable[[], list[Process]], grace_s: float = GRACE_S, *, force: bool = False) -> None:
    """Ends them and waits until none is left."""
    ending = Ending(find, grace_s)
    ending.ask(Phase.KILLING if force else Phase.ENDING, time.monotonic())
    while ending.phase is not Phase.ENDED:
        ending.look(time.monotonic())
        time.sleep(KILL_S)


def _key(process: Process) -> tuple[int, int]:
    return process.pid, process.began
