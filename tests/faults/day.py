"""A day of use: python -m tests.faults.day [--jobs N] [--seed N]

A person submits jobs of every kind (jobs that work, that fail, that die, that ignore a request to end, shells around
jobs), cancels some, pauses some, changes policies and weights, and the service is killed and started again meanwhile.
At the end everything that a person can look at must agree with what happened: `ps --all`, `usage`, the logs, the exit
statuses of `wait`. Nothing runs any more, and the state folder is within its limit.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from salus.service.usage import LOOK_S
from salus.units import HOUR_S
from tests.faults.soak import processes_of
from tests.service.harness import SOURCE, Service, eventually

AT_ONCE = 5
KEPT_MIB = 16
"""Of the journal, and of the output of jobs."""
OPTIONS = ("--quantum", "5ms", "--journal-size", f"{KEPT_MIB}MiB", "--output-size", f"{KEPT_MIB}MiB")
MOST_STORED_MIB = 3 * KEPT_MIB
"""With the records, the history and the accounts."""
POLICIES = ("fair", "srtf", "fifo", "rr", "las", "priority", "pack")
JOB_LIMIT_S = 120.0
GAP_S = 0.02
"""How far two sums of device time may lie apart for the moment between two looks."""

SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {source!r})
from salus.client.lease import of_this_process

iterations, last_word = int(sys.argv[1]), sys.argv[2]
if last_word == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
lease = of_this_process()
print("began", flush=True)
for _ in range(iterations):
    lease.begin()
    until = time.perf_counter() + 0.004
    while time.perf_counter() < until:
        pass
    lease.end()
print("made", iterations, "iterations", flush=True)
if last_word == "fail":
    sys.exit(3)
if last_word == "die":
    os.kill(os.getpid(), signal.SIGUSR1)
"""


class Fate(Enum):
    """What is meant to become of a job."""

    WORKS = "works"
    FAILS = "fail"
    DIES = "die"
    IS_CANCELLED = "cancelled"
    IGNORES_CANCEL = "deaf"
    SHELL_WORKS = "a shell that works"
    SHELL_IS_CANCELLED = "a shell that is cancelled"


ENDLESS = 1_000_000
CANCELLED = (Fate.IS_CANCELLED, Fate.IGNORES_CANCEL, Fate.SHELL_IS_CANCELLED)
STATUS = {Fate.FAILS: 3, Fate.DIES: 128 + signal.SIGUSR1, Fate.WORKS: 0, Fate.SHELL_WORKS: 0}


@dataclass
class Submitted:
    name: str
    fate: Fate
    iterations: int
    job_id: str = ""
    paused: bool = False

    def command(self, script: Path) -> list[str]:
        last_word = self.fate.value if self.fate in (Fate.FAILS, Fate.DIES, Fate.IGNORES_CANCEL) else "-"
        python = [sys.executable, str(script), str(self.iterations), last_word]
        if self.fate in (Fate.SHELL_WORKS, Fate.SHELL_IS_CANCELLED):
            return ["bash", "-c", f"{' '.join(python)}; echo after"]
        return python

    @property
    def output(self) -> str:
        """The whole log of a job that nobody cancels."""
        after = "after\n" if self.fate is Fate.SHELL_WORKS else ""
        return f"began\nmade {self.iterations} iterations\n{after}"


@dataclass
class Day:
    jobs: int
    seed: int
    folder: Path
    kills: int = 0
    submitted: dict[str, Submitted] = field(default_factory=dict)
    over: list[Submitted] = field(default_factory=list)

    def run(self) -> None:
        self.rng = random.Random(self.seed)
        self.service = Service(self.folder, *OPTIONS)
        self.service.environment["SALUS_SOCKET"] = str(self.service.socket)
        self.script = self.folder / "script.py"
        self.script.write_text(SCRIPT.format(source=str(SOURCE)))
        try:
            for number in range(self.jobs):
                self._submit(number)
                self._something_happens()
                self._until(lambda: len(self.submitted) < AT_ONCE, "a job ends")
            self._until(lambda: not self.submitted, "all jobs end")
            self._check_the_books()
        finally:
            self._cancel_what_is_left()
            self.service.stop()
        assert not processes_of(self.folder), "no process is left"

    # What a person does.

    def _submit(self, number: int) -> None:
        fate = self.rng.choice(list(Fate))
        iterations = ENDLESS if fate in CANCELLED else self.rng.randrange(1, 60)
        job = Submitted(f"{number}-{fate.name.lower()}", fate, iterations)
        options = ["--name", job.name, "--weight", str(self.rng.choice((0.5, 1, 2))), "--priority", str(number % 3)]
        job.job_id = self._salus("submit", *options, "--", *job.command(self.script)).strip()
        self.submitted[job.job_id] = job

    def _something_happens(self) -> None:
        dice = self.rng.random()
        job = self.rng.choice(list(self.submitted.values()))
        if dice < 0.10:
            self.service.kill()
            self.service.start()
            self.kills += 1
        elif dice < 0.25:
            self._salus("policy", self.rng.choice(POLICIES))
        elif dice < 0.35:
            self._salus("set", job.job_id, "--weight", "3", may_fail=True)
        elif dice < 0.50:
            job.paused = not job.paused
            self._salus("pause" if job.paused else "resume", job.job_id, may_fail=True)
        elif dice < 0.60:
            self._salus("ps")

    def _cancel_endless_ones(self) -> None:
        for job in list(self.submitted.values()):
            if job.fate in CANCELLED and "began" in self._log(job):
                force = ["--force"] if job.fate is Fate.IGNORES_CANCEL else []
                self._salus("cancel", *force, job.job_id)
                self._salus("wait", job.job_id, may_fail=True)
            if job.paused:
                job.paused = False
                self._salus("resume", job.job_id, may_fail=True)

    def _until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + JOB_LIMIT_S
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"never happened: {what}; {json.dumps(self._rows(), indent=1)}")
            self._cancel_endless_ones()
            states = {row["id"]: row["state"] for row in self._rows()}
            for job_id in [one for one in self.submitted if states[one] in ("done", "failed", "cancelled", "lost")]:
                self.over.append(self.submitted.pop(job_id))

    # What must be true in the evening.

    def _check_the_books(self) -> None:
        rows = {row["id"]: row for row in self._rows()}
        assert len(rows) == self.jobs
        for job in self.over:
            self._check(job, rows[job.job_id])
        used = json.loads(self._salus("usage", "--by", "job", "--json"))
        self._check_usage(rows, used)
        assert self._stored_bytes() <= MOST_STORED_MIB << 20
        status = self.service.status()
        assert (status["jobs"], status["lane_chunks"], status["queue_length"]) == (0, 0, 0), status

    def _check(self, job: Submitted, row: dict[str, Any]) -> None:
        story = f"{job}: {row}"
        assert row["name"] == job.name, story
        waited = self.service.salus("wait", job.job_id)
        if job.fate in CANCELLED:
            assert row["state"] == "cancelled", story
            assert waited.returncode in (128 + signal.SIGTERM, 128 + signal.SIGKILL), f"{story}: {waited}"
            assert "made" not in self._log(job) and "after" not in self._log(job), story
            assert row["iterations"] > 0 or row["gpu_time_s"] < GAP_S, story
        else:
            assert row["state"] == ("done" if STATUS[job.fate] == 0 else "failed"), story
            assert waited.returncode == STATUS[job.fate], f"{story}: {waited}"
            assert self._log(job) == job.output, f"{story}: {self._log(job)!r}"
            assert row["iterations"] == job.iterations, story
        assert row["submitted_at"] <= (row["started_at"] or row["finished_at"]) <= row["finished_at"], story

    def _check_usage(self, rows: dict[str, dict[str, Any]], used: list[dict[str, Any]]) -> None:
        by_job = {row["job"]: row["gpu_hours"] * HOUR_S for row in used}
        for job_id, row in rows.items():
            apart_s = abs(by_job.get(job_id, 0.0) - row["gpu_time_s"])
            # The account is written every few seconds: what a killed service had not written yet is lost.
            least_s = LOOK_S * self.kills + GAP_S
            assert apart_s <= least_s, f"job {job_id}: usage has {by_job.get(job_id)} s, ps has {row['gpu_time_s']} s"

    def _rows(self) -> list[dict[str, Any]]:
        return list(json.loads(self._salus("ps", "--all", "--json")))

    def _log(self, job: Submitted) -> str:
        return self._salus("logs", job.job_id, may_fail=True)

    def _stored_bytes(self) -> int:
        return sum(file.stat().st_size for file in _files(self.folder / "state"))

    def _salus(self, *arguments: str, may_fail: bool = False) -> str:
        done: subprocess.CompletedProcess[str] = self.service.salus(*arguments)
        assert "Traceback" not in done.stderr, done.stderr
        assert may_fail or done.returncode == 0, f"salus {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def _cancel_what_is_left(self) -> None:
        for job_id in self.submitted:
            self.service.salus("cancel", "--force", job_id)
        eventually(lambda: not self.service.jobs(everything=False), "nothing is left of a day that went wrong")


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="salus-day-") as folder:
        day = Day(options.jobs, options.seed, Path(folder))
        day.run()
    print(f"{options.jobs} jobs, {day.kills} restarts of the service: ps, usage, logs and exit statuses agree")


if __name__ == "__main__":
    main()
