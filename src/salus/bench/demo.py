"""`salus demo`: four real training jobs of different lengths, under one policy after the other.

The jobs are an ordinary script (`scripts/train.py`). A few iterations of each are measured first, to find the number
of iterations that makes it as long as it should be. Then each runs alone, without Salus, from its start to its end.
Then, for each policy, a service of its own starts, all four start up and wait, the clock starts, and they arrive one
after another, the longest first. Declared sizes put them in one lane.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from salus.bench.own_service import OwnService
from salus.bench.switch import TRAIN, finished
from salus.core.model import Footprint
from salus.errors import RequestRejected
from salus.service.gpu import Nvml, choose
from salus.service.replay import leases
from salus.simulate.engine import Hardware, JobRecord, Outcome, Segment
from salus.simulate.trace import TraceJob

HOST_BYTES = 4 << 30
"""What the service is told that the host device has."""
LANE_PART = 0.6
"""Of the device: as much as each job says it needs of a lane, so that there is room for one."""
QUANTUM_S = 0.1
"""A processor has to fill its caches again after every switch, which a GPU has not."""
CALIBRATION = 40


@dataclass(frozen=True)
class DemoJob:
    name: str
    model: str
    seconds: float
    """Device time it should take alone."""
    arrives_s: float


JOBS = (
    DemoJob("long", "convnet", 10.0, 0.0),
    DemoJob("medium", "lstm", 5.0, 0.5),
    DemoJob("short", "transformer", 2.5, 1.0),
    DemoJob("tiny", "mlp", 1.2, 1.5),
)

Progress = Callable[[str, dict[str, int]], None]
"""What is going on, and the iterations done by each job."""


@dataclass(frozen=True)
class Measured:
    job: DemoJob
    iterations: int
    iteration_s: float
    alone_s: float
    """From its start to its end, with the device to itself and without Salus."""
    digest: str
    """Of its losses."""


def measure_alone(device: str, scale: float, progress: Progress) -> list[Measured]:
    """How many iterations make each job as long as it should be, and how long it takes for them alone."""
    said = _one_by_one({job: _command(job, device, CALIBRATION) for job in JOBS}, "tries", progress)
    iteration_s = {job: statistics.median(said[job]["seconds"]) for job in JOBS}
    iterations = {job: max(1, round(job.seconds * scale / iteration_s[job])) for job in JOBS}
    whole = {job: [*_command(job, device, count), "--warm-up", "0"] for job, count in iterations.items()}
    said = _one_by_one(whole, "runs", progress)
    return [Measured(job, iterations[job], iteration_s[job], said[job]["took_s"], said[job]["digest"]) for job in JOBS]


def _one_by_one(commands: dict[DemoJob, list[str]], what: str, progress: Progress) -> dict[DemoJob, dict[str, Any]]:
    """What each has said at its end, and how long it took. They start up together, and run one by one."""
    found = {}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with tempfile.TemporaryDirectory(prefix="salus-") as folder, contextlib.ExitStack() as stack:
        progress("the jobs start up, to be measured alone", {})
        started = []
        for job, command in commands.items():
            go = str(Path(folder) / job.name)
            started.append(stack.enter_context(subprocess.Popen([*command, "--go", go], **pipes)))
            stack.callback(started[-1].kill)
        _wait_until_ready(started)
        for job, process in zip(commands, started, strict=True):
            progress(f"{job.name} {what} alone", {})
            begin_s = time.monotonic()
            (Path(folder) / job.name).touch()
            said = json.loads(finished(process).splitlines()[-1])
            found[job] = {**said, "took_s": said["ended_s"] - begin_s}
    return found


def run_policy(policy: str, jobs: Sequence[Measured], device: str, progress: Progress) -> tuple[Outcome, list[str]]:
    """What happened, and the digests of all losses."""
    capacity_bytes = _capacity(device)
    lane_bytes = int(LANE_PART * capacity_bytes)
    options = ["--policy", policy, "--quantum", f"{QUANTUM_S}s", "--capacity", f"{capacity_bytes}B"]
    gpu = choose(Nvml().gpus(), None) if device == "cuda" else None
    options += ["--device", "host"] if gpu is None else ["--device", "cuda", "--gpu", gpu.uuid]
    with OwnService(*options) as service:
        go = service.socket.parent / "go"
        started = []
        for one in jobs:
            command = [*_command(one.job, device, one.iterations), "--warm-up", "0"]
            command += ["--go", str(go), "--delay", str(one.job.arrives_s)]
            length = ("--duration", f"{one.iterations * one.iteration_s:.3f}s", "--iterations", str(one.iterations))
            size = ("--ephemeral", f"{lane_bytes}B")
            started.append(service.run(command, "--name", one.job.name, *length, *size))
            service.wait_until_registered(len(started))
        progress(f"{policy}: starting up", {})
        _wait_until_ready(started)
        begin_s = time.monotonic()
        go.touch()
        # Each is listened to all the time: a script that says more than a pipe holds would never end.
        with service.connect() as connection, ThreadPoolExecutor(len(started)) as pool:
            listening = [pool.submit(finished, process) for process in started]
            while not all(one.done() for one in listening):
                progress(policy, {row["name"]: row["iterations"] for row in connection.jobs(everything=True)})
                time.sleep(0.1)
            ids = {row["name"]: row["id"] for row in connection.jobs(everything=True)}
        told = [json.loads(one.result().splitlines()[-1]) for one in listening]
        service.stop()
        held = leases(service.journal())
    records, segments = [], []
    for one, said in zip(jobs, told, strict=True):
        job_id = ids[one.job.name]
        mine = [(lane, start, end) for owner, lane, start, end in held if owner == job_id]
        footprint = Footprint(0, lane_bytes)
        trace_job = TraceJob(
            job_id, begin_s + one.job.arrives_s, one.iterations, one.iteration_s, footprint, name=one.job.name
        )
        records.append(JobRecord(trace_job, 0, started_s=mine[0][1], finished_s=said["ended_s"], leases=len(mine)))
        segments += [Segment(job_id, 0, lane, start, end) for lane, start, end in mine]
    busy_s = sum(segment.end_s - segment.start_s for segment in segments)
    outcome = Outcome(policy, Hardware(1, capacity_bytes, quantum_s=QUANTUM_S), records, busy_s, segments)
    return outcome, [said["digest"] for said in told]


def _capacity(device: str) -> int:
    gpu = choose(Nvml().gpus(), None) if device == "cuda" else None
    return HOST_BYTES if gpu is None else gpu.total_bytes - gpu.used_bytes


def _command(job: DemoJob, device: str, iterations: int) -> list[str]:
    return [sys.executable, str(TRAIN), "--model", job.model, "--device", device, "--iterations", str(iterations)]


def _wait_until_ready(started: Sequence[subprocess.Popen[str]]) -> None:
    """Until every script has said that it is ready."""
    for process in started:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise RequestRejected(f"a job of the demo failed: {process.communicate()[1].strip()[-300:]}")
