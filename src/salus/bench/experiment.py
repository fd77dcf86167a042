"""What the experiments have in common: jobs, the ways to run them side by side, and steps that are not done twice.

A side is a way to run the same jobs: one by one, all at once as the driver slices time, all at once under NVIDIA MPS,
or under Salus. On every side they are the same ordinary processes (`scripts/workload.py`); each starts up and warms up
first, says that it is ready, and begins when it arrives. So Python, the framework and the GPU's context are in nobody's
time.
"""

from __future__ import annotations

import contextlib
import json
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from salus.bench.own_service import OwnService
from salus.errors import RequestRejected
from salus.service.gpu import Gpu, Nvml, choose
from salus.service.mps import Mps, find_control

WORKLOAD = Path(__file__).parent / "scripts" / "workload.py"
READY_S = 120.0
"""A job that is not ready by then goes on when it can: it waits for memory, or died."""
GROUP = 4
"""One by one, so many start up at the same time; on a GPU, one for each of these bytes."""
ROOM_BYTES = 12 << 30
LOOK_S = 0.1
WARM_UP = 3
END_S = 60.0
REST_S = 0.5
REST_LIMIT_S = 5.0
MOST_KEPT = 400
"""Moments at which iterations ended, of each job in the written result."""
KEPT = (
    "persistent_bytes", "ephemeral_bytes", "internal_bytes", "utilization", "iterations", "gpu_time_s",
    "paged_out_bytes", "paged_out_ns", "paged_in_bytes", "paged_in_ns",
)  # fmt: skip
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    device: str
    """cuda or cpu."""
    scale: float = 1.0
    """Of how long the jobs are."""
    jobs: int | None = None
    capacity: str | None = None
    """As on a smaller GPU."""

    def service(self, policy: str, *more: str) -> list[str]:
        """Options of `salus serve`."""
        device = ["--device", "host" if self.device == "cpu" else "cuda"]
        # The processor is one device, of which a job needs the whole.
        capacity = self.capacity or ("4GiB" if self.device == "cpu" else None)
        return [*device, "--policy", policy, *(["--capacity", capacity] if capacity else []), *more]

    def one_lane(self, policy: str) -> list[str]:
        """The same, with room for one lane of `whole_lane` and for what three jobs or more keep beside it."""
        room = [] if self.device == "cpu" or self.capacity else ["--capacity", "48GiB"]
        return self.service(policy, *room)

    @property
    def lane(self) -> str | None:
        """What a job on the processor says it needs of a lane: there is one for all. A GPU's jobs are measured."""
        return "3GiB" if self.device == "cpu" else None

    @property
    def whole_lane(self) -> str:
        """Declared by jobs that are to take turns and not to run side by side."""
        return self.lane or "26GiB"


@dataclass(frozen=True)
class Job:
    name: str
    model: str
    batch: int
    iterations: int
    arrives_s: float = 0.0
    seconds: float | None = None
    """It runs for so long, and for as many iterations at the least."""
    alone_s: float | None = None
    """How long it takes alone, for policies that go by that."""
    weight: float = 1.0
    serves: bool = False
    ephemeral: str | None = None
    """Declared; else it is measured."""
    persistent: str | None = None
    builds_late: bool = False
    """It has no memory before it begins, and does not warm up."""
    sm_share: int | None = None
    """Under Salus with MPS: of the multiprocessors, in percent."""

    def command(self, device: str, go: Path, at_s: float) -> list[str]:
        length = ["--iterations", str(self.iterations)]
        length += [] if self.seconds is None else ["--seconds", str(self.seconds)]
        more = [*(["--serve"] if self.serves else []), *(["--late"] if self.builds_late else [])]
        return [
            sys.executable, str(WORKLOAD), "--model", self.model, "--batch", str(self.batch), "--device", device,
            "--go", str(go), "--at", str(at_s), "--warm-up", str(WARM_UP), *length, *more,
        ]  # fmt: skip

    def options(self) -> list[str]:
        """For `salus run`."""
        length: list[str] = []
        if self.alone_s is not None:
            # The iterations before it begins are Salus's to count, too, and the first takes long.
            count = self.iterations + WARM_UP
            length = ["--iterations", str(count), "--duration", f"{self.alone_s * count / self.iterations:.3f}s"]
        given = {"--ephemeral": self.ephemeral, "--persistent": self.persistent, "--sm-share": self.sm_share}
        more = [word for option, value in given.items() if value is not None for word in (option, str(value))]
        return ["--name", self.name, "--weight", str(self.weight), *length, *more]


@dataclass(frozen=True)
class Ran:
    """What became of a job. Times are seconds since the clock started."""

    name: str
    arrived_s: float
    ends_s: list[float]
    """Of its iterations."""
    peak_bytes: int = 0
    failed: str | None = None
    gpu_bytes: int = 0
    """The most that was in use on the GPU while the jobs of its side ran, beyond what was before."""
    busy: float | None = None
    """The part of the time in which it kept the GPU busy, alone."""
    row: dict[str, Any] | None = None
    """What Salus said of it in the end, as in `ps --json`."""

    @property
    def jct_s(self) -> float:
        return self.ends_s[-1] - self.arrived_s

    @property
    def iteration_s(self) -> float:
        """The median."""
        return statistics.median(b - a for a, b in zip(self.ends_s, self.ends_s[1:], strict=False))


def one_by_one(jobs: Sequence[Job], device: str, say: Say, *, watch: bool = False) -> list[Ran]:
    """In the order of arrival, each when the one before is done.

    A group of them starts up at a time, while nothing runs. Then, and while one is taken down, the clock stands still:
    that is in nobody's time.
    `watch`: how busy each keeps the GPU is looked at meanwhile.
    """
    nvml = Nvml()
    gpu = choose(nvml.gpus(), None) if device == "cuda" else None
    size = GROUP if gpu is None else max(1, gpu.total_bytes // ROOM_BYTES)
    ran: list[Ran] = []
    zero = 0.0
    with ThreadPoolExecutor(1) as pool, OwnService("--device", "host") as folder:
        for first in range(0, len(jobs), size):
            asked = time.monotonic()
            group = [
                (job, folder.socket.parent / f"go-{first + at}") for at, job in enumerate(jobs[first : first + size])
            ]
            say(f"one by one: {len(ran)} of {len(jobs)} are done, {len(group)} start up")
            started = [folder.start_bare(job.command(device, go, 0.0)) for job, go in group]
            _wait_until_ready({job.name: process for (job, _), process in zip(group, started, strict=True)})
            zero = zero + time.monotonic() - asked if ran else time.monotonic()
            for (job, go), process in zip(group, started, strict=True):
                time.sleep(max(0.0, zero + job.arrives_s - time.monotonic()))
                _start_clock(go)
                say(f"one by one: {job.name}, {len(ran) + 1} of {len(jobs)}")
                reading = pool.submit(_outcome, job, process, zero)
                busy = _busy(nvml, gpu, reading) if watch and gpu is not None else None
                ran.append(replace(reading.result(), busy=busy))
                # Its memory is the next one's; until it is gone, the clock stands still as well.
                stopped = time.monotonic()
                process.communicate()
                zero += time.monotonic() - stopped
    return ran


def _busy(nvml: Nvml, gpu: Gpu, reading: Future[Ran]) -> float | None:
    """The part of the time in which anything runs on the GPU, until then; None where that cannot be seen."""
    nvml.activity(gpu)
    looks: list[float] = []
    while not reading.done():
        wait([reading], timeout=LOOK_S)
        seen = nvml.activity(gpu)
        if seen is not None:
            looks.append(seen.busy)
    # The last one may have found it done.
    return statistics.median(looks[:-1]) if len(looks) > 1 else None


def has_mps(device: str) -> bool:
    return device == "cuda" and find_control() is not None


@contextlib.contextmanager
def plain_mps(folder: Path) -> Iterator[dict[str, str]]:
    """A daemon as people start it by hand; what a process needs in its environment to join it."""
    gpu = choose(Nvml().gpus(), None)
    if gpu is None:
        raise RequestRejected("there is no GPU for MPS")
    mps = Mps(folder / "mps", gpu.uuid)
    mps.start()
    try:
        yield {"CUDA_MPS_PIPE_DIRECTORY": str(mps.pipe)}
    finally:
        mps.stop()


class _GpuMemory:
    """The most that is in use, beyond what was at first."""

    def __init__(self, device: str) -> None:
        self._nvml = Nvml()
        self._gpu = choose(self._nvml.gpus(), None) if device == "cuda" else None
        self._before = self._at_rest()
        self.most_bytes = 0

    def _at_rest(self) -> int:
        """Once the processes of the side before have let go of theirs."""
        now, before, deadline = self._now(), -1, time.monotonic() + REST_LIMIT_S
        while now != before and self._gpu is not None and time.monotonic() < deadline:
            time.sleep(REST_S)
            now, before = self._now(), now
        return now

    def look(self) -> None:
        self.most_bytes = max(self.most_bytes, self._now() - self._before)

    def _now(self) -> int:
        return 0 if self._gpu is None else self._nvml.used_bytes(self._gpu)


def at_once(
    jobs: Sequence[Job],
    device: str,
    say: Say,
    service: Sequence[str] | None = None,
    *,
    mps: bool = False,
    trace: Path | None = None,
) -> list[Ran]:
    """All, each from its arrival on. Bare, under a plain MPS, or with a service of these options.

    `trace`: each job writes down there when the GPU was its own, in a file with this name and its process's id.
    """
    options = ["--device", "host" if device == "cpu" else "cuda"] if service is None else [*service]
    memory = _GpuMemory(device)
    with contextlib.ExitStack() as stack:
        # Left last: whoever reads what a job says goes on until that has ended, with its service at the latest.
        pool = stack.enter_context(ThreadPoolExecutor(len(jobs)))
        own = stack.enter_context(OwnService(*options))
        if mps:
            own.bare_environment.update(stack.enter_context(plain_mps(own.socket.parent)))
        if trace is not None:
            own.environment["SALUS_TRACE"] = str(trace)
        go = own.socket.parent / "go"
        commands = [job.command(device, go, job.arrives_s) for job in jobs]
        started = []
        for job, command in zip(jobs, commands, strict=True):
            started.append(own.start_bare(command) if service is None else own.run(command, *job.options()))
            if service is not None:
                own.wait_until_registered(len(started))
        named = {job.name: process for job, process in zip(jobs, started, strict=True)}
        _wait_until_ready(named, own.who_waits_for_memory if service is not None else set)
        zero = _start_clock(go)
        what = "under Salus" if service is not None else "under MPS" if mps else "at once"
        # Each is listened to all the time: one that says more than a pipe holds would never end.
        reading = [pool.submit(_outcome, job, process, zero) for job, process in zip(jobs, started, strict=True)]
        while not all(one.done() for one in reading):
            say(f"{what}: {sum(one.done() for one in reading)} of {len(jobs)} are done")
            memory.look()
            wait(reading, timeout=0.2)
        rows = {} if service is None else _rows(own)
        for process in started if trace is not None else ():
            # That is written last.
            process.wait(timeout=END_S)
    ran = [one.result() for one in reading]
    return [replace(one, gpu_bytes=memory.most_bytes, row=rows.get(one.name)) for one in ran]


def _rows(service: OwnService) -> dict[str, dict[str, Any]]:
    """Of each job what Salus says of it, by name."""
    with service.connect() as connection:
        return {row["name"]: {key: row[key] for key in KEPT} for row in connection.jobs(everything=True)}


def _wait_until_ready(
    processes: dict[str, subprocess.Popen[str]], who_waits_for_memory: Callable[[], set[str]] = set
) -> None:
    """Until all are but those that wait for memory, by name: they will not be before others have ended."""
    deadline = time.monotonic() + READY_S
    missing = {process.stdout: name for name, process in processes.items() if process.stdout is not None}
    while missing and time.monotonic() < deadline:
        there, _, _ = select.select(list(missing), [], [], LOOK_S)
        for output in there:
            output.readline()
            del missing[output]
        if not there and who_waits_for_memory() >= set(missing.values()):
            return


def _start_clock(go: Path) -> float:
    """The file appears whole."""
    now = time.monotonic()
    new = go.with_suffix(".new")
    new.write_text(repr(now))
    new.rename(go)
    return now


def _outcome(job: Job, process: subprocess.Popen[str], zero: float) -> Ran:
    """As soon as it says so; taking the framework down is in nobody's time either."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            told = json.loads(line)
            return Ran(job.name, job.arrives_s, [end - zero for end in told["ends_s"]], told["peak_bytes"])
    errors = process.communicate()[1]
    last = (errors.strip().splitlines() or [f"status {process.returncode}"])[-1]
    return Ran(job.name, job.arrives_s, [], failed=last[:300])


class Steps:
    """The parts of an experiment. Each is kept as soon as it is done, so that an interrupted run can be resumed."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path, self._settings = path, settings
        self._done: dict[str, Any] = {}
        if path is not None and path.exists():
            with contextlib.suppress(ValueError, KeyError):
                saved = json.loads(path.read_text())
                if saved["settings"] == json.loads(json.dumps(settings)):
                    self._done = saved["steps"]

    def __len__(self) -> int:
        return len(self._done)

    def runs(self, name: str, run: Callable[[], list[Ran]]) -> list[Ran]:
        """Does it, or remembers what it gave."""
        if name not in self._done:
            self._done[name] = [asdict(one) for one in run()]
            self._keep()
        return [Ran(**one) for one in self._done[name]]

    def rows(self, name: str, measure: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """The same for what is no list of runs."""
        if name not in self._done:
            self._done[name] = measure()
            self._keep()
        found: list[dict[str, Any]] = self._done[name]
        return found

    def raw(self) -> dict[str, Any]:
        """Everything, but of a job with thousands of iterations only the end of every so-manieth, and of the last."""
        return {name: [_thinned(one) for one in rows] for name, rows in self._done.items()}

    def forget(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _keep(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps({"settings": self._settings, "steps": self._done}))
            new.rename(self._path)


def _thinned(row: dict[str, Any]) -> dict[str, Any]:
    if not row.get("ends_s"):
        return row
    ends = row["ends_s"]
    every = -(-len(ends) // MOST_KEPT)
    return {**row, "ends_s": [round(at, 6) for at in ends[len(ends) - 1 :: -every][::-1]], "of_iterations": len(ends)}


def check_all_ran(side: str, ran: Sequence[Ran]) -> None:
    failed = [f"{one.name}: {one.failed}" for one in ran if one.failed]
    if failed:
        raise RequestRejected(f"{side}: {len(failed)} of {len(ran)} jobs failed; the first: {failed[0]}")
