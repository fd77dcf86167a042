"""Memory pressure and faults on a real GPU.

- paging: eight jobs of about 4 GiB each on what behaves like a GPU of 16 GiB: all finish, each with the losses of the
  bare script; how fast memory goes to the host and back against pinned copies in the same run, and how much of that is
  hidden behind the computation of others.
- faults: a job that needs more than the GPU; jobs that are killed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from salus.bench.own_service import OwnService
from salus.bench.sharing import jain
from salus.service.gpu import Nvml
from salus.service.journal import leases
from tests.gpu.jobs import START_LIMIT_S, command, result_of, says_ready

JOBS = 8
CAPACITY = "16GiB"
NEEDS = ("--persistent", "4.1GiB", "--ephemeral", "2.1GiB")
INSTANT_S = 0.02
"""Sooner than that, nothing was moved."""
KILLS = 30
ENDING_S = 0.05
"""Between the last word of a process that ends and the news of its end."""

PINNED = """
import time, torch
there = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
here = torch.empty(2 << 30, dtype=torch.uint8, pin_memory=True)
def rate(to, what):
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        to.copy_(what, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, 2 / (time.perf_counter() - began))
    return best
print(rate(here, there), rate(there, here))
"""


def paging(iterations: int, policies: list[str], keep: Path | None = None) -> dict[str, Any]:
    """With `keep`, the journals are left in that folder."""
    runs = [command("large", iterations, "--seed", str(seed)) for seed in range(JOBS)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ThreadPoolExecutor(JOBS) as pool:
        bare = list(pool.map(result_of, [subprocess.Popen(run, **pipes) for run in runs]))
    told = subprocess.run([sys.executable, "-c", PINNED], capture_output=True, text=True, check=True).stdout.split()
    pinned = {"out_gib_s": float(told[0]), "in_gib_s": float(told[1])}
    found: dict[str, Any] = {"pinned": pinned, "policies": {}}
    for policy in policies:
        row = _under(policy, runs, bare, pinned, keep)
        found["policies"][policy] = row
        print(policy, {key: value for key, value in row.items() if key != "timeline"}, pinned, flush=True)
    found["passed"] = all(row["same"] for row in found["policies"].values())
    return found


def _under(
    policy: str, runs: list[list[str]], bare: list[dict[str, Any]], pinned: dict[str, float], keep: Path | None
) -> dict[str, Any]:
    with OwnService("--policy", policy, "--capacity", CAPACITY, "--reserve", "0", "--host-memory", "64GiB") as service:
        began = time.monotonic()
        jobs = [
            # Those that come later are shorter, or so they say: under srtf they displace those before.
            service.run(run, "--name", f"p{number}", "--duration", f"{90 - 10 * number}s", *NEEDS)
            for number, run in enumerate(runs)
        ]
        with ThreadPoolExecutor(len(jobs)) as pool:
            told = list(pool.map(result_of, jobs))
        seconds = time.monotonic() - began
        with service.connect() as connection:
            rows = connection.jobs(everything=True)
        service.stop()
        journal = service.journal()
        moves = _moves(journal)
        held = leases(journal)
        if keep is not None:
            shutil.copy(journal, keep / f"{policy.partition(':')[0]}.jsonl")
    failed = [one["failed"] for one in told if "failed" in one]
    out = [end - start for kind, _, start, end in moves if kind == "PageOut"]
    back = [(job, start, end) for kind, job, start, end in moves if kind == "PageIn"]
    sizes = {row["id"]: row["persistent_bytes"] / 2**30 for row in rows}
    rates: dict[str, list[float]] = {"PageOut": [], "PageIn": []}
    firsts, been = [], set()
    for kind, job, start, end in moves:
        first, been = kind == "PageOut" and job not in been, been | {job}
        if first:
            # Its host memory is made and pinned, if there was no time for that before.
            firsts.append(end - start)
        elif end - start > INSTANT_S and sum(s < end and start < e for _, _, s, e in moves) == 1:
            # By itself: two that go at the same time share the bus. And something was there to move.
            rates[kind].append(sizes[job] / (end - start))
    ratios = {
        kind: statistics.median(rates[kind]) / pinned[which] if rates[kind] else None
        for kind, which in (("PageOut", "out_gib_s"), ("PageIn", "in_gib_s"))
    }
    hidden = [
        sum(max(0.0, min(end, e) - max(start, s)) for other, _, s, e in held if other != job) / (end - start)
        for job, start, end in back
    ]
    moved = {
        way: (sum(row[f"paged_{way}_bytes"] for row in rows), sum(row[f"paged_{way}_ns"] for row in rows))
        for way in ("out", "in")
    }
    return {
        "same": not failed and all(a["losses"] == b["losses"] for a, b in zip(told, bare, strict=True)),
        "failed": failed,
        "seconds": seconds,
        "page_outs": len(out),
        "page_ins": len(back),
        "page_out_s": statistics.median(out) if out else None,
        "page_in_s": statistics.median(end - start for _, start, end in back) if back else None,
        "first_page_outs_s": sorted(firsts),
        "page_out_to_pinned": ratios["PageOut"],
        "page_in_to_pinned": ratios["PageIn"],
        "alone_on_the_bus": {kind: len(values) for kind, values in rates.items()},
        "hidden": statistics.median(min(1.0, part) for part in hidden) if hidden else None,
        "persistent_gib": sum(row["persistent_bytes"] for row in rows) / 2**30,
        # As the jobs saw it: all moves, also those that shared the bus, without the way to the service and back.
        "paged_gib": {way: size / 2**30 for way, (size, _) in moved.items()},
        "paged_gib_s": {way: size / 2**30 / (ns / 1e9) if ns else None for way, (size, ns) in moved.items()},
        "said": sorted({line for one in told for line in one.get("said", []) if "waits for memory" not in line}),
        "timeline": {"moves": moves, "leases": held},
    }


def _moves(journal: Path) -> list[tuple[str, str, float, float]]:
    """Page-outs and page-ins, from the order to the answer; not those that a job answered by coming to its end."""
    began: dict[tuple[str, str], float] = {}
    found: list[tuple[str, str, float, float]] = []
    with journal.open() as file:
        next(file, None)
        for line in map(json.loads, file):
            event, now = line["event"], line["t"]
            if event["kind"] in ("PageOutFinished", "PageInFinished"):
                kind = event["kind"].removesuffix("Finished")
                found.append((kind, event["job_id"], began.pop((kind, event["job_id"]), now), now))
            last = found[-1] if found else None
            ended = event["kind"] == "JobLeft" and last is not None and last[:2] == ("PageOut", event["job_id"])
            if ended and now - last[3] < ENDING_S:
                found.pop()
            for action in line["actions"]:
                if action["kind"] in ("PageOut", "PageIn"):
                    began[action["kind"], action["job_id"]] = now
    return found


def shares(seconds: float = 30.0) -> dict[str, Any]:
    """Twenty jobs of four sizes at once under `fair` by memory x time: who got how much of that."""
    kinds = [f"sized-{width}" for width in (1024, 2048, 3072, 4096)] * 5
    with OwnService("--policy", "fair:by=memory,patience=1", "--capacity", CAPACITY, "--reserve", "0") as service:
        go = service.socket.parent / "go"
        jobs = [
            service.run(command(kind, 1_000_000, "--go", str(go)), "--name", f"{kind}-{number}")
            for number, kind in enumerate(kinds)
        ]
        ready = [says_ready(job, time.monotonic() + START_LIMIT_S) for job in jobs]
        go.touch()
        with service.connect() as connection:
            # Not the first seconds, in which each is measured.
            time.sleep(seconds / 3)
            before = {row["name"]: row["gpu_time_s"] for row in connection.jobs()}
            time.sleep(seconds)
            rows = connection.jobs()
    service_of = {
        row["name"]: (row["gpu_time_s"] - before[row["name"]])
        * (row["persistent_bytes"] + row["ephemeral_bytes"] + row["internal_bytes"])
        / 2**30
        for row in rows
    }
    index = jain(list(service_of.values()))
    passed = index >= 0.95 and len(rows) == len(kinds)
    return {"jain": index, "gib_s": service_of, "ready": sum(ready), "passed": passed}


def faults() -> dict[str, Any]:
    found = {"too large": _too_large(), "kills": _kills()}
    for name, row in found.items():
        print(name, row, flush=True)
    return {**found, "passed": all(row["passed"] for row in found.values())}


def _too_large() -> dict[str, Any]:
    """One job wants more than there is; its neighbours compute what they always do, as fast as they always do."""
    iterations = 600
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    bare = result_of(subprocess.Popen(command("vae", iterations), **pipes))
    with OwnService("--capacity", "6GiB", "--policy", "fair") as service:
        undisturbed, _ = _neighbours(service, iterations, None)
        told, errors = _neighbours(service, iterations, command("too-large", 1000))
    out_of_memory = "OutOfMemoryError" in errors
    same = all(one.get("losses") == bare["losses"] for one in [*undisturbed, *told])
    medians = [
        statistics.median(seconds for one in side for seconds in one.get("seconds", [0.0])[iterations // 10 :])
        for side in (undisturbed, told)
    ]
    return {
        "out_of_memory": out_of_memory,
        "neighbours_same": same,
        "neighbours_iteration_ms": {"undisturbed": 1000 * medians[0], "beside it": 1000 * medians[1]},
        "neighbours_slower_by": medians[1] / medians[0] if medians[0] else None,
        "said": errors.strip().splitlines()[-1:],
        "failed": [one["failed"] for one in [*undisturbed, *told] if "failed" in one],
        "passed": out_of_memory and same,
    }


def _neighbours(service: OwnService, iterations: int, greedy: list[str] | None) -> tuple[list[dict[str, Any]], str]:
    """Two jobs that start together; and in the middle of them, one that wants too much, with what it said."""
    go = service.socket.parent / f"go-{greedy is not None}"
    jobs = [service.run(command("vae", iterations, "--go", str(go)), "--name", f"n{number}") for number in range(2)]
    for job in jobs:
        says_ready(job, time.monotonic() + START_LIMIT_S)
    third = None if greedy is None else service.run([*greedy, "--go", str(go)], "--name", "greedy")
    if third is not None:
        says_ready(third, time.monotonic() + START_LIMIT_S)
    go.touch()
    errors = third.communicate(timeout=200)[1] if third is not None else ""
    return [result_of(job) for job in jobs], errors


def _kills() -> dict[str, Any]:
    """Jobs are killed at random moments, and others started in their place; in the end no memory is left in use."""
    rng = random.Random(5)
    nvml = Nvml()
    (gpu, *_) = nvml.gpus()
    before = nvml.used_bytes(gpu)
    iterations = 400
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    bare = result_of(subprocess.Popen(command("vae", iterations), **pipes))
    with OwnService("--capacity", "8GiB", "--policy", "rr", "--quantum", "0") as service:
        survivors = [service.run(command("vae", iterations), "--name", f"s{number}") for number in range(2)]
        kinds = ("vae", "dcgan", "lstm", "growing")
        with service.connect() as connection:
            killed = 0
            victims: list[subprocess.Popen[str]] = []
            while killed < KILLS:
                while len(victims) < 12:
                    victims.append(service.run(command(rng.choice(kinds), 100_000), "--name", "victim"))
                rows = [row for row in connection.jobs() if row["name"] == "victim" and row["pid"]]
                if not rows:
                    time.sleep(0.05)
                    continue
                time.sleep(rng.random() * 0.2)
                os.kill(rng.choice(rows)["pid"], signal.SIGKILL)
                killed += 1
                time.sleep(0.1)
                victims = [victim for victim in victims if victim.poll() is None]
            told = [result_of(job) for job in survivors]
    deadline = time.monotonic() + 10
    while (left := nvml.used_bytes(gpu) - before) > 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    same = all(one.get("losses") == bare["losses"] for one in told)
    return {
        "kills": killed,
        "survivors_same": same,
        "failed": [one["failed"] for one in told if "failed" in one],
        "left_mib": left >> 20,
        "passed": same and left <= 0,
    }
