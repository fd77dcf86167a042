"""What a crowd costs: many jobs connected at once, all wanting to run. The service's processor time and memory, and how
long `salus ps` waits for its answer.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from salus.bench.own_service import OwnService
from salus.bench.switch import finished

PAUSE_S = 0.1
TARGETS = {"processor_share": 0.5, "peak_mb": 200.0, "ps_ms": 100.0}


def measure(jobs: int, seconds: float) -> dict[str, Any]:
    with OwnService("--policy", "fair", "--capacity", "6GiB") as service:
        command = [sys.executable, "-m", "salus.bench.crowd_job", str(service.socket), str(jobs), str(seconds)]
        crowd = subprocess.Popen(
            command, env=service.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert crowd.stdout is not None
        crowd.stdout.readline()
        pid = service.pid
        began_s, used_s = time.monotonic(), _processor_time_s(pid)
        asked_ms: list[float] = []
        seen = 0
        while time.monotonic() < began_s + seconds - 2 * PAUSE_S:
            start = time.perf_counter()
            with service.connect() as connection:
                seen = max(seen, len(connection.jobs()))
            asked_ms.append((time.perf_counter() - start) * 1000)
            time.sleep(PAUSE_S)
        share = (_processor_time_s(pid) - used_s) / (time.monotonic() - began_s)
        finished(crowd)
        peak_mb = _peak_mb(pid)
        with service.connect() as connection:
            done = sum(row["exit_code"] == 0 for row in connection.jobs(everything=True))
    return {
        "jobs": jobs,
        "jobs_finished": done,
        "most_at_once": seen,
        "seconds": seconds,
        "processor_share": share,
        "peak_mb": peak_mb,
        "ps_ms": {"median": statistics.median(asked_ms), "max": max(asked_ms), "count": len(asked_ms)},
        "targets": TARGETS,
    }


def verdicts(result: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    share, peak, asked, done = (result[key] for key in ("processor_share", "peak_mb", "ps_ms", "jobs_finished"))
    return [
        ("jobs that finished", f"{done} of {result['jobs']}", "all", done == result["jobs"]),
        ("processor time of the service", f"{share:.2f} of a core", "under 0.5", share < TARGETS["processor_share"]),
        ("its memory, peak", f"{peak:.0f} MB", "under 200 MB", peak < TARGETS["peak_mb"]),
        ("an answer to ps, median", f"{asked['median']:.1f} ms", "", True),
        ("the slowest", f"{asked['max']:.1f} ms", "at most 100 ms", asked["max"] <= TARGETS["ps_ms"]),
    ]


def _processor_time_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6
