"""The scripts of train.py as jobs: started, waited for, read."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TRAIN = str(Path(__file__).parent / "train.py")
TIMEOUT_S = 150
START_LIMIT_S = 90.0


def command(kind: str, iterations: int, *more: str) -> list[str]:
    return [sys.executable, TRAIN, kind, str(iterations), *more]


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=TIMEOUT_S)
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        return {"failed": (errors.strip().splitlines() or ["it said nothing"])[-6:], "status": process.returncode}
    return {**json.loads(lines[-1]), "said": [line for line in errors.splitlines() if line.startswith("salus:")]}


def says_ready(job: subprocess.Popen[str], until: float) -> bool:
    assert job.stdout is not None
    there, _, _ = select.select([job.stdout], [], [], max(0.1, until - time.monotonic()))
    return bool(there) and job.stdout.readline().strip() == "ready"
