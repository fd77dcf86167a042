"""A real service in a process of its own, and real jobs that need no framework."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from salus.client.connection import ServiceConnection
from salus.errors import ServiceUnavailable
from salus.service.replay import lines

SOURCE = Path(__file__).parent.parent.parent / "src"

JOB = '''
"""A job: iterations that keep the processor busy. argv: how many, seconds each, seconds of idling in between."""
import sys, time
sys.path.insert(0, {source!r})
from salus.client.lease import of_this_process

lease = of_this_process()
count, seconds, idle = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
for _ in range(count):
    lease.begin()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
    lease.end()
    if idle:
        time.sleep(idle)
print("finished")
'''


def eventually(condition: Callable[[], Any], what: str, timeout_s: float = 20.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"never happened: {what}")


class Service:
    def __init__(self, folder: Path, *options: str, start: bool = True, module: str = "salus") -> None:
        self.folder = folder
        self._module = module
        """What `serve` is a command of."""
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("SALUS_")},
            "SALUS_RUNTIME_DIR": str(folder / "run"),
            "SALUS_STATE_DIR": str(folder / "state"),
            # Not those of whoever runs the tests, nor of their machine.
            "SALUS_CONFIG": str(folder / "config.toml"),
            "SALUS_SYSTEM_CONFIG_DIR": str(folder / "etc"),
            "PYTHONPATH": f"{SOURCE}{os.pathsep}{SOURCE.parent}",
        }
        self.socket = folder / "run" / "service.sock"
        self.job_file = folder / "job.py"
        self.job_file.write_text(JOB.format(source=str(SOURCE)))
        self.started: list[subprocess.Popen[str]] = []
        self.process: subprocess.Popen[str] | None = None
        self._options = options
        if start:
            self.start()

    def start(self) -> None:
        self.process = self.in_background(self._module, "serve", *self._options)
        eventually(self._answers, "the service answers")

    def kill(self) -> None:
        """As if it had crashed: nothing is said, nothing is cleared away."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def salus_in_background(self, *arguments: str) -> subprocess.Popen[str]:
        return self.in_background("salus", *arguments)

    def in_background(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def salus(
        self, *arguments: str, stdin: str | None = None, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "salus", *arguments]
        return subprocess.run(
            command, env=self.environment, input=stdin, capture_output=True, text=True, check=False, timeout=timeout_s
        )

    def job(self, *options: str, iterations: int, seconds: float, idle: float = 0.0) -> subprocess.Popen[str]:
        """Starts a job in the background, as `salus run` would in a terminal."""
        command = [sys.executable, str(self.job_file), str(iterations), str(seconds), str(idle)]
        return self.salus_in_background("run", *options, "--", *command)

    def connect(self) -> ServiceConnection:
        return ServiceConnection(self.socket)

    def jobs(self, everything: bool = True) -> dict[str, dict[str, Any]]:
        """By name."""
        with self.connect() as connection:
            return {row["name"]: row for row in connection.jobs(everything)}

    def when(self, name: str, *states: str) -> dict[str, Any]:
        """The job, once it is in one of these states."""
        return eventually(
            lambda: (row := self.jobs().get(name)) and row["state"] in states and row, f"{name} is {states}"
        )

    def descriptors(self) -> int:
        assert self.process is not None
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def journals(self) -> list[Path]:
        """What is being written, or was last."""
        return sorted((self.folder / "state" / "journal").glob("*.jsonl"))

    def decisions(self) -> list[dict[str, Any]]:
        """Of every service so far, as the journal has them by now: `t`, `event` and `actions`."""
        return list(lines(self.folder / "state" / "journal"))

    def status(self) -> dict[str, Any]:
        from salus.protocol import messages as msg

        with self.connect() as connection:
            return connection.request(msg.GetStatus()).status

    def stop(self) -> None:
        for process in reversed(self.started):
            with contextlib.suppress(ProcessLookupError):
                # The whole group. The keeper of a job sees to the rest of it.
                os.killpg(process.pid, signal.SIGTERM if process is self.process else signal.SIGKILL)
            process.communicate(timeout=20)
        self.started.clear()

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"the service ended: {self.process.communicate()[1]}")
        try:
            self.connect().close()
        except ServiceUnavailable:
            return False
        return True


def finish(*jobs: subprocess.Popen[str], timeout_s: float = 90.0) -> None:
    for job in jobs:
        output, errors = job.communicate(timeout=timeout_s)
        assert job.returncode == 0, errors
        assert "finished" in output


CROWD = """
import sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from salus.client.connection import ServiceConnection
from salus.client.lease import Lease
from salus.protocol import messages as msg

path, count = Path(sys.argv[2]), int(sys.argv[3])

def one(n):
    launcher = ServiceConnection(path, None)
    job = launcher.request(msg.Register(f"job{n}", ["x"], "/", weight=1 + n % 3, ephemeral_bytes=(n % 4) << 30))
    lease = Lease(path, job.job_id, job.token)
    for _ in range(30):
        lease.begin()
        sum(range(2000))
        lease.end()
    launcher.send(msg.Finished(0))
    while not isinstance(launcher.receive()[0], msg.Done):
        pass
    launcher.close()

threads = [threading.Thread(target=one, args=(n,)) for n in range(count)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("finished")
"""


def crowd(service: Service, count: int) -> None:
    """Many jobs at once, all connected, from the threads of one process; each does 30 iterations."""
    command = [sys.executable, "-c", CROWD, str(SOURCE), str(service.socket), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "finished\n", done.stderr
