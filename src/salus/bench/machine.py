"""What a benchmark ran on, and how its result is written."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import salus
from salus.errors import RequestRejected
from salus.service.gpu import Nvml, choose


def describe() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "salus": salus.__version__,
    }


_NUMBERS = re.compile(r"\[[-+.,\deE\s]+\]")
"""A list of nothing else, which takes a line of its own for each of them."""


def write(path: Path, benchmark: str, result: dict[str, Any]) -> None:
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"benchmark": benchmark, "date": date, "machine": describe(), **result}, indent=2)
    path.write_text(_NUMBERS.sub(lambda match: " ".join(match.group().split()), text) + "\n")
    print(f"wrote {path}")


def trained_on(device: str) -> dict[str, str]:
    """The framework, and the GPU where the jobs ran on one."""
    found = choose(Nvml().gpus(), None) if device == "cuda" else None
    return {"torch": version("torch"), **({} if found is None else {"gpu": found.name})}


def device_to_run_on(device: str) -> str:
    """The device to run on; before the work rather than after it."""
    code = "import torch; print(torch.cuda.is_available())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if found.returncode:
        raise RequestRejected(f"the jobs train with PyTorch, which {sys.executable} does not have: pip install torch")
    has_gpu = found.stdout.strip() == "True"
    if device == "cuda" and not has_gpu:
        raise RequestRejected("--device: PyTorch finds no GPU here; leave the option out to run on the CPU")
    return ("cuda" if has_gpu else "cpu") if device == "auto" else device


@contextlib.contextmanager
def few_cores(number: int, each: int, groups: int) -> Iterator[None]:
    """What is started here stays on the cores of this group, where there are enough: no two cores are equally fast.

    Groups are far from one another: cores that lie side by side may be two halves of one.
    """
    before = os.sched_getaffinity(0)
    if len(before) >= each * groups:
        first = number * (len(before) // groups)
        os.sched_setaffinity(0, sorted(before)[first : first + each])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
