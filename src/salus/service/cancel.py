"""How the service ends a job: through its launcher, which keeps the job's processes. Where the launcher and whoever
stood in for it are gone, the service ends what is left by itself, as far as it is allowed to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from salus import processes
from salus.ending import KILL_S, Ending, Phase
from salus.processes import Process
from salus.protocol import messages as msg
from salus.service.job import LiveJob

log = logging.getLogger(__name__)

LAUNCHER_KILLED = "its salus run was killed"
LOST_S = 0.5
"""So long after its connection has ended, a launcher is dead, or was cut off and comes back."""


class Cancelling:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked: dict[str, Phase] = {}
        """By job: how far it is to be brought. Each has a task that sees to it."""
        self._tasks: set[asyncio.Task[None]] = set()

    def cancel(self, job: LiveJob, force: bool) -> None:
        job.cancelled = True
        if job.launcher is None:
            self._end(job, Phase.KILLING if force else Phase.ENDING)
            return
        job.launcher.send(msg.Terminate(force))
        launcher = processes.look_at(job.launcher.pid)
        if launcher is not None:
            # One that was stopped hears of it when it goes on.
            with contextlib.suppress(PermissionError):
                processes.resume(launcher)

    def launcher_lost(self, job: LiveJob, pid: int) -> None:
        """Without a launcher there is no job: nobody would hear of its end, and nobody could stop it."""
        launcher = processes.look_at(pid)

        def look() -> None:
            if job.launcher is None and (launcher is None or not processes.is_there(launcher.pid, launcher.began)):
                job.fault = job.fault or LAUNCHER_KILLED
                self._end(job, Phase.ENDING)

        self._loop.call_later(LOST_S, look)

    def _end(self, job: LiveJob, phase: Phase) -> None:
        if job.job_id not in self._asked:
            log.info("job %s has no launcher; what is left of it is ended", job.job_id)
            worker = None if job.process is None else processes.look_at(job.process.pid)
            ending = Ending(_finder(job.token, worker), job.asked.grace_s)
            task = self._loop.create_task(self._see_to_it(job.job_id, ending))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._asked[job.job_id] = phase

    async def _see_to_it(self, job_id: str, ending: Ending) -> None:
        try:
            while ending.phase is not Phase.ENDED:
                ending.ask(self._asked[job_id], time.monotonic())
                # In a thread: there may be thousands of processes to look at.
                await asyncio.to_thread(ending.look, time.monotonic())
                await asyncio.sleep(KILL_S)
        finally:
            del self._asked[job_id]


def _finder(token: str, worker: Process | None) -> Callable[[], list[Process]]:
    """`worker`: the process that uses the device. It need not have the token in its environment."""
    return lambda: processes.of_job(token, worker)
