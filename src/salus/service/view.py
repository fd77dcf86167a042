"""A job as a person sees it: the row of `salus ps`, and the memory it is said to use."""

from __future__ import annotations

from typing import Any

from salus.core.admission import Waiting, WaitReason
from salus.core.model import Job, Phase
from salus.core.scheduler import Scheduler
from salus.names import user_name
from salus.protocol.page import Word
from salus.service.job import LiveJob
from salus.service.stopped import is_stopped

PAGED = {
    "paged_out_bytes": Word.WENT_BYTES,
    "paged_out_ns": Word.WENT_NS,
    "paged_in_bytes": Word.CAME_BYTES,
    "paged_in_ns": Word.CAME_NS,
}
MOST_DEVICES = 64
MOST_LETTERS = 200
"""Of a name or a command, as it is shown."""
MOST_LANES = 64
"""In one answer, which is one packet."""


def describe(scheduler: Scheduler, job: LiveJob) -> dict[str, Any]:
    core = scheduler.jobs.get(job.job_id)
    why = scheduler.explain(job.job_id) if core is not None else None
    row: dict[str, Any] = {
        "id": job.job_id,
        "name": _shown(job.asked.name),
        "user": user_name(job.uid),
        "state": _state(job, core),
        "wait_reason": _reason(job, core, why),
        "position": why.position if why is not None else None,
        "gpu": job.live.device.index,
        "device": job.live.device.key,
        "lane": core.lane if core is not None else None,
        "priority": job.asked.priority,
        "weight": job.asked.weight,
        "paused_by": None if job.paused_by is None else user_name(job.paused_by),
        "iterations": core.iterations_done if core is not None else 0,
        "gpu_time_s": core.attained_s if core is not None else 0.0,
        "ran_s": core.ran_s if core is not None else 0.0,
        **footprint_of(scheduler, job),
        "submitted_at": job.submitted_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "exit_code": job.exit_code,
        "command": _shown(" ".join(job.asked.command)),
        "log": job.asked.log,
        "utilization": seen.busy if job.activity is not None and (seen := job.activity.mean()) is not None else None,
        "sm_share": job.sm_share,
        "pid": process.pid if (process := job.process) is not None else None,
    }
    return row | job.final


def together(devices: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of a service: of each of its devices, and of all of them as if they were one."""
    first = devices[0]
    summed = {
        key: sum(one[key] or 0 for one in devices)
        for key in (
            "capacity_bytes", "free_bytes", "jobs", "queue_length", "outside_bytes", "host_bytes", "paged_out_bytes",
            "lane_chunks", "lane_chunk_bytes",
        )
    }  # fmt: skip
    part = max(1, MOST_LANES // len(devices))
    lanes = [{"gpu": one["gpu"], "device": one["device"], **lane} for one in devices for lane in one["lanes"][:part]]
    broken = next((one["journal_broken"] for one in devices if one["journal_broken"]), None)
    others = {key: sum(one["others"][key] for one in devices) for key in first["others"]}
    # Of all devices together: each of them has the same time.
    others["share"] /= len(devices)
    each = [{key: value for key, value in one.items() if key != "lanes"} for one in devices]
    return {
        **first,
        **summed,
        "journal_broken": broken,
        "others": others,
        "lanes": lanes[:MOST_LANES],
        "devices": each[:MOST_DEVICES],
    }


def footprint_of(scheduler: Scheduler, job: LiveJob) -> dict[str, int]:
    """What the job uses, where it has an arena that says so; else what it reserved."""
    core = scheduler.jobs.get(job.job_id)
    if core is None:
        return {"persistent_bytes": 0, "ephemeral_bytes": 0, "internal_bytes": 0, **dict.fromkeys(PAGED, 0)}
    if job.used is not None:
        return job.used
    found = {
        "persistent_bytes": core.footprint.persistent_bytes,
        "ephemeral_bytes": core.footprint.ephemeral_bytes,
        "internal_bytes": core.footprint.internal_bytes,
        **dict.fromkeys(PAGED, 0),
    }
    if job.link is not None and job.report is not None:
        capacity = scheduler.config.capacity_bytes
        found["persistent_bytes"] = min(job.report.bytes_in(Word.PRIVATE_BYTES), capacity)
        found["ephemeral_bytes"] = min(job.report.bytes_in(Word.LANE_BYTES), capacity)
        # Out and in, since it began, and how long that took.
        for key, word in PAGED.items():
            found[key] = job.report.bytes_in(word) if key.endswith("_bytes") else job.report.time_in_ns(word)
    return found


def _state(job: LiveJob, core: Job | None) -> str:
    if job.returning:
        return "returning"
    if core is not None and is_stopped(job):
        return "stopped"
    if core is None:
        return "cancelled" if job.cancelled else "done" if job.exit_code == 0 else "failed"
    if core.paused:
        return "pausing" if core.holds else "paused"
    if core.phase is not Phase.RESIDENT:
        return str(core.phase.value)
    if core.holds:
        return "stuck" if core.stuck else "running"
    if core.ready:
        return "ready"
    return "starting" if job.started_at is None else "idle"


def _reason(job: LiveJob, core: Job | None, why: Waiting | None) -> str | None:
    if core is not None and is_stopped(job):
        return f"stopped, as by Ctrl-Z; fg lets it go on, salus cancel {job.job_id} ends it"
    if core is not None and core.stuck:
        return f"has passed no boundary for long; salus cancel {job.job_id} ends it"
    if why is not None and why.reason is WaitReason.PAUSED and job.paused_by is not None:
        by = why.text.replace("paused", f"paused by {user_name(job.paused_by)}", 1)
        return f"{by}; salus resume {job.job_id} continues it"
    if why is not None:
        return why.text
    return None if job.fault is None else _shown(job.fault)


def _shown(text: str) -> str:
    """In any terminal, also another user's: what a client of somebody's own making registered may hold anything."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:MOST_LETTERS])
