"""Who gets how much: real training jobs in one lane under fair, with weights, under srtf and under fifo.

- fair: three equal jobs. Jain's index of the device time each gets while all three compete; 1 is equal.
- weights 1:2:3: each one's part, against what it should have.
- srtf and fifo: a short job arrives behind a long one. How long it takes, against alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from salus.bench.own_service import OwnService
from salus.bench.switch import TRAIN, Say, finished
from salus.client.connection import ServiceConnection
from salus.errors import RequestRejected

ONE_LANE = ("--capacity", "4GiB")
IN_IT = ("--ephemeral", "3GiB")
WARM = 5
TIMEOUT_S = 300.0
TARGETS = {"jain": 0.98, "weights_off_by": 0.05, "srtf_ratio": 1.3}


def measure(say: Say, seconds: float, short_iterations: int) -> dict[str, Any]:
    say("three equal jobs under fair")
    equal = shares((1, 1, 1), seconds)
    say("weights one, two and three under fair")
    weighted = shares((1, 2, 3), seconds)
    off_by = max(abs(had / (sum(weighted) * weight / 6) - 1) for had, weight in zip(weighted, (1, 2, 3), strict=True))
    say("a short job alone")
    alone_s = short_job(short_iterations, None)
    say("a short job behind a long one under srtf")
    srtf_s = short_job(short_iterations, "srtf")
    say("a short job behind a long one under fifo")
    fifo_s = short_job(short_iterations, "fifo")
    return {
        "seconds": seconds,
        "equal": {"device_time_s": equal, "jain": jain(equal)},
        "weights_1_2_3": {"device_time_s": weighted, "off_by": off_by},
        "short_job": {
            "alone_s": alone_s,
            "behind_a_long_one_under_srtf_s": srtf_s,
            "ratio": srtf_s / alone_s if alone_s and srtf_s else None,
            "under_fifo_it_waits": fifo_s is None,
        },
        "targets": TARGETS,
    }


def shares(weights: Sequence[int], seconds: float) -> list[float]:
    """Device time that each job gets while all of them compete."""
    with OwnService("--policy", "fair", *ONE_LANE) as service:
        for number, weight in enumerate(weights):
            service.run(_train(1_000_000), "--name", str(number), "--weight", str(weight), *IN_IT)
        with service.connect() as connection:
            _wait_for(connection, len(weights), WARM)
            before = _device_time(connection)
            time.sleep(seconds)
            after = _device_time(connection)
    return [after[str(number)] - before[str(number)] for number in range(len(weights))]


def short_job(iterations: int, policy: str | None) -> float | None:
    """Seconds that its iterations take, waiting included; None: it never got to run while the long one was there."""
    with OwnService("--policy", policy or "fair", *ONE_LANE) as service:
        count = 1
        if policy is not None:
            service.run(_train(1_000_000), "--name", "long", "--duration", "10h", *IN_IT)
            with service.connect() as connection:
                _wait_for(connection, 1, WARM)
            count = 2
        short = service.run(_train(iterations), "--name", "short", "--duration", "10s", *IN_IT)
        if policy == "fifo":
            with service.connect() as connection:
                _wait_for(connection, count, 0, ready=True)
                time.sleep(3.0)
                row = next(row for row in connection.jobs() if row["name"] == "short")
            return None if row["iterations"] == 0 else row["gpu_time_s"]
        return float(sum(json.loads(finished(short))["seconds"]))


def jain(values: Sequence[float]) -> float:
    """1 where all are equal, 1/n where one has everything."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def verdicts(result: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    equal, weighted, short = (result[key] for key in ("equal", "weights_1_2_3", "short_job"))
    return [
        ("Jain's index of three equal jobs", f"{equal['jain']:.4f}", "at least 0.98", equal["jain"] >= 0.98),
        ("weights 1:2:3, off by at most", f"{weighted['off_by']:.1%}", "at most 5 %", weighted["off_by"] <= 0.05),
        ("short behind long under srtf", f"{short['ratio']:.2f} x alone", "at most 1.3", short["ratio"] <= 1.3),
        (
            "short behind long under fifo",
            "waits" if short["under_fifo_it_waits"] else "runs",
            "waits",
            short["under_fifo_it_waits"],
        ),
    ]


def _train(iterations: int) -> list[str]:
    return [sys.executable, str(TRAIN), "--device", "cpu", "--model", "lstm", "--iterations", str(iterations)]


def _device_time(connection: ServiceConnection) -> dict[str, float]:
    return {row["name"]: row["gpu_time_s"] for row in connection.jobs()}


def _wait_for(connection: ServiceConnection, count: int, iterations: int, *, ready: bool = False) -> None:
    """Until that many jobs have done that many iterations, or stand at the door."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        rows = connection.jobs()
        there = [row for row in rows if row["iterations"] >= iterations]
        if ready:
            there = [row for row in there if row["state"] in ("ready", "running")]
        if len(there) == count:
            return
        time.sleep(0.05)
    raise RequestRejected("the jobs of the benchmark did not start")
