"""The environment of a job's processes, in which the adaptor loads by itself and the job sees its own device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from salus.paths import socket_path
from salus.processes import APART
from salus.protocol import messages as msg

HIDES_ALL = ("", "-1", "none", "NoDevFiles", "void")
"""Settings of CUDA_VISIBLE_DEVICES with which there is no GPU."""


def visible_gpus(environment: Mapping[str, str]) -> str | None:
    """The GPUs that the user lets the job see; None: all."""
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    return None if setting in HIDES_ALL else setting


def environment_for(job: msg.Registered, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of the command, and of all that it starts."""
    bootstrap = str(Path(__file__).parent.parent / "adaptors" / "bootstrap")
    others = [entry for entry in base.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != bootstrap]
    # A job that may see no GPU at all is to run without.
    hidden = base.get("CUDA_VISIBLE_DEVICES") in HIDES_ALL
    placed = {} if job.gpu is None or hidden else {"CUDA_VISIBLE_DEVICES": job.gpu}
    return {
        **unmanaged_environment(base),
        **placed,
        "PYTHONPATH": os.pathsep.join([bootstrap, *others]),
        "SALUS_SOCKET": str(socket_path()),
        "SALUS_JOB": job.job_id,
        "SALUS_BOOTSTRAP": os.path.join(bootstrap, "sitecustomize.py"),
        **({} if job.gpu is None else {"SALUS_GPU": job.gpu}),
        **_mps(job),
        "SALUS_TOKEN": job.token,
    }


def unmanaged_environment(base: Mapping[str, str], gpu: str | None = None) -> dict[str, str]:
    """The environment of a command that runs without a service."""
    placed = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    # A launcher may be apart from the job it was started in. Its own job is not apart from it.
    return {**{name: value for name, value in base.items() if name != APART}, **placed}


def _mps(job: msg.Registered) -> dict[str, str]:
    settings = {
        "CUDA_MPS_PIPE_DIRECTORY": job.mps_pipe,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": job.sm_share,
        "CUDA_MPS_CLIENT_PRIORITY": job.mps_priority,
    }
    return {name: str(value) for name, value in settings.items() if job.mps_pipe is not None and value is not None}
