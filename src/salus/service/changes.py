"""What people change about jobs that run: name, weight, priority, and whether a job is paused.

Each change is written down before it is carried out, so that a service that is started again knows it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from salus.core import events as ev
from salus.core.model import HEAVIEST, LIGHTEST
from salus.errors import RequestRejected
from salus.names import check_job_name
from salus.protocol import messages as msg
from salus.registry import Registry
from salus.service.caps import Caps
from salus.service.connection import Connection
from salus.service.job import LiveJob

log = logging.getLogger(__name__)


class Changes:
    def __init__(
        self, registry: Registry, may_change: Callable[[Connection, str, str], LiveJob], caps: Caps | None = None
    ) -> None:
        """`may_change` gives back the job, or refuses the user: connection, job id, and what is to be done to it."""
        self._registry, self._may_change, self._caps = registry, may_change, caps or Caps()

    def on_set_job(self, connection: Connection, message: msg.SetJob) -> None:
        job = self._may_change(connection, message.job_id, "change")
        asked = job.asked
        wanted = {"name": message.name, "weight": message.weight, "priority": message.priority}
        new = {key: value for key, value in wanted.items() if value is not None and value != getattr(asked, key)}
        if message.name is not None:
            check_job_name(message.name)
        if message.weight is not None and not LIGHTEST <= message.weight <= HEAVIEST:
            raise RequestRejected(f"weight: {message.weight} is out of range; expected {LIGHTEST:g} to {HEAVIEST:g}")
        # Of the job's user, whoever asks. What stays as it is may be from before the cap.
        self._caps.check(
            job.uid,
            weight=message.weight if "weight" in new else None,
            priority=message.priority if "priority" in new else None,
        )
        job.asked = replace(asked, **new)  # type: ignore[arg-type]
        self._registry.change(job.job_id, job.asked)
        if job.job_id in job.live.scheduler.jobs and new.keys() & {"weight", "priority"}:
            job.live.handle(ev.JobChanged(job.job_id, job.asked.weight, job.asked.priority))
        self._describe(job)
        shown = ", ".join(f"{key} {value:g}" if key == "weight" else f"{key} {value}" for key, value in new.items())
        log.info("job %s was changed by user %d: %s", job.job_id, connection.uid, shown)
        connection.send(msg.Done(f"job {job.job_id}: {shown or 'nothing to change'}"))

    def on_pause_job(self, connection: Connection, message: msg.PauseJob) -> None:
        job = self._may_change(connection, message.job_id, "pause")
        if job.paused_by is not None:
            connection.send(msg.Done(f"job {job.job_id} is paused already"))
            return
        job.paused_by = connection.uid
        self._registry.pause(job.job_id, job.paused_by)
        # One that has yet to come back after a restart is paused when it does.
        if job.job_id in job.live.scheduler.jobs:
            job.live.handle(ev.JobPaused(job.job_id))
        self._describe(job)
        log.info("job %s was paused by user %d", job.job_id, connection.uid)
        connection.send(msg.Done(f"job {job.job_id} is paused; salus resume {job.job_id} continues it"))

    def on_resume_job(self, connection: Connection, message: msg.ResumeJob) -> None:
        job = self._may_change(connection, message.job_id, "resume")
        if job.paused_by is None:
            raise RequestRejected(f"job {job.job_id} is not paused")
        job.paused_by = None
        self._registry.pause(job.job_id, None)
        if job.job_id in job.live.scheduler.jobs:
            job.live.handle(ev.JobResumed(job.job_id))
        self._describe(job)
        log.info("job %s was resumed by user %d", job.job_id, connection.uid)
        connection.send(msg.Done(f"job {job.job_id} goes on"))

    def _describe(self, job: LiveJob) -> None:
        self._registry.describe(job.live.describe(job))
