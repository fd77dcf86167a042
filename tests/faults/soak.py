"""Random kills under load: python -m tests.faults.soak [--kills N] [--seed N]

A handful of jobs that check every byte they should still have, on a device that is too small for all of them. At
random moments one of them is killed, or the service, which is started again; others take their place. Some are spared
and live through many kills. Whoever is not killed must end well. In the end nothing is left: no process, no descriptor,
no byte.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from salus.errors import SalusError
from tests.service.harness import SOURCE, Service, eventually

JOB = Path(__file__).parent.parent / "memory" / "arena_job.py"
AT_ONCE = 6
SPARED = 3
"""Of those: never killed."""
OPTIONS = (
    "--policy", "rr:patience=0.2", "--quantum", "5ms", "--capacity", "330MiB", "--host-memory", "1GiB",
)  # fmt: skip
SERVICE_PART = 0.2
"""Of the kills."""
JOB_LIMIT_S = 90.0


@dataclass
class Soak:
    kills: int
    seed: int
    folder: Path
    jobs: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    spared: set[int] = field(default_factory=set)
    killed: int = 0
    restarts: int = 0
    finished: int = 0

    def run(self) -> None:
        rng = random.Random(self.seed)
        service = Service(self.folder, *OPTIONS)
        service.environment |= {
            "SALUS_SOCKET": str(service.socket), "ARENA_JOB_PRIVATE_MIB": "48", "ARENA_JOB_ITERATION_S": "0.002",
        }  # fmt: skip
        (self.folder / "go").touch()
        before = service.descriptors()
        number = 0
        try:
            while self.killed < self.kills:
                self._collect()
                while len(self.jobs) < AT_ONCE:
                    number += 1
                    if sum(one in self.spared for one in self.jobs) < SPARED:
                        self.spared.add(number)
                    self.jobs[number] = self._start(service, rng, number)
                time.sleep(rng.random() ** 2 * 0.3)
                if rng.random() < SERVICE_PART:
                    service.kill()
                    time.sleep(rng.random() ** 3)
                    service.start()
                    self.restarts += 1
                else:
                    victim = rng.choice([one for one in self.jobs if one not in self.spared])
                    process = self.jobs.pop(victim)
                    process.kill()
                    process.communicate()
                self.killed += 1
            deadline = time.monotonic() + JOB_LIMIT_S
            while self.jobs and time.monotonic() < deadline:
                self._collect()
                time.sleep(0.02)
            if self.jobs:
                raise AssertionError(f"these never ended: {self._evidence(service)}")
            eventually(lambda: service.status()["jobs"] == 0, "the service knows that all have ended")
            status = service.status()
            left = {key: status[key] for key in ("lane_chunks", "paged_out_bytes")}
            assert left == {"lane_chunks": 0, "paged_out_bytes": 0}, left
            eventually(lambda: service.status()["free_bytes"] == status["capacity_bytes"], "every byte is free again")
            eventually(lambda: service.descriptors() <= before + 1, "no descriptor is left")
        finally:
            for process in self.jobs.values():
                process.kill()
                process.communicate()
            service.stop()
        assert not processes_of(self.folder), "no process is left"

    def _start(self, service: Service, rng: random.Random, number: int) -> subprocess.Popen[str]:
        arguments = [str(SOURCE), f"j{number}", str(rng.randrange(20, 200)), str(number), str(self.folder / "go")]
        return subprocess.Popen(
            [sys.executable, str(JOB), *arguments],
            env=service.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _evidence(self, service: Service) -> str:
        """Of jobs that are still there: what the service thinks of them, where they are, and what was decided last."""
        lines = [str(row) for row in _rows(service)]
        for number, process in self.jobs.items():
            process.send_signal(signal.SIGUSR1)  # it writes its stacks (`arena_job`)
            time.sleep(0.2)
            process.kill()
            lines.append(f"job {number}: {process.communicate()[1]}")
        lines += map(str, service.decisions()[-60:])
        return "\n".join(lines)

    def _collect(self) -> None:
        """Whoever has ended by itself must have ended well."""
        for number, process in list(self.jobs.items()):
            if process.poll() is not None:
                output, errors = process.communicate()
                assert process.returncode == 0 and output.startswith("finished"), f"job {number}: {errors}"
                self.finished += 1
                del self.jobs[number]


def _rows(service: Service) -> list[dict[str, object]]:
    try:
        return list(service.jobs(everything=False).values())
    except SalusError as error:
        return [{"service": str(error)}]


def processes_of(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(folder).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="salus-soak-") as folder:
        soak = Soak(options.kills, options.seed, Path(folder))
        soak.run()
    print(f"{soak.killed} kills ({soak.restarts} of the service), {soak.finished} jobs finished; nothing is left")


if __name__ == "__main__":
    main()
