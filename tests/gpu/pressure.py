"""Memory pressure and faults on a real GPU.

- paging: eight jobs of about 4 GiB each on what behaves like a GPU of 16 GiB: all finish, each with the losses of the
  bare script; how fast memory goes to the host and back against pinned copies in the same run, and how much of that is
  hidden behind the computation of others.
- faults: a job that needs more than the GPU; jobs that are killed.
- crowd: more jobs than there is room for contexts of their processes: all finish, each with the losses of the bare
  script, and no more of the GPU is used than the service was given.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from salus.bench.own_service import OwnService
from salus.bench.sharing import jain
from salus.client.connection import ServiceConnection
from salus.service.gpu import Nvml
from salus.service.replay import leases, lines
from tests.gpu.jobs import START_LIMIT_S, TIMEOUT_S, command, result_of, says_ready

JOBS = 8
CAPACITY = "16GiB"
NEEDS = ("--persistent", "4.2GiB", "--ephemeral", "1.2GiB")
KILLS = 30
CROWD_GIB = 5
GREEDY = 3
"""So many jobs that want too much come, one after the other."""
UNDISTURBED_S, WARM_UP_S, NEAR_S = 2.5, 1.0, 0.2
AS_FAST = 1.05
"""Neighbours count as unchanged up to here; the same script differs by as much from itself."""
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
        with ThreadPoolExecutor(len(jobs)) as pool, service.connect() as connection:
            results = [pool.submit(result_of, job) for job in jobs]
            copies = _watch_copies(connection, lambda: all(result.done() for result in results))
            told = [result.result() for result in results]
            seconds = time.monotonic() - began
            rows = connection.jobs(everything=True)
        service.stop()
        journal = service.journal()
        moves = _moves(journal)
        held = leases(journal)
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            shutil.copytree(journal, keep / policy.partition(":")[0], dirs_exist_ok=True)
    failed = [one["failed"] for one in told if "failed" in one]
    out = [end - start for kind, _, start, end in moves if kind == "PageOut"]
    back = [(job, start, end) for kind, job, start, end in moves if kind == "PageIn"]
    # The first one makes and pins its host memory, if there was no time for that before.
    firsts = [
        next(end - start for kind, j, start, end in moves if (kind, j) == ("PageOut", job))
        for job in {job for kind, job, _, _ in moves if kind == "PageOut"}
    ]
    rates = {kind: [copy.gib_s for copy in copies if copy.kind == kind] for kind in ("PageOut", "PageIn")}
    by_themselves = {
        # Two that go at the same time share the bus.
        kind: [copy.gib_s for copy in copies if copy.kind == kind and copy.is_alone(moves)]
        for kind in rates
    }
    ratios = {
        kind: [
            statistics.median(values[kind]) / pinned[which] if values[kind] else None
            for values in (by_themselves, rates)
        ]
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
        "page_out_to_pinned": ratios["PageOut"][0],
        "page_in_to_pinned": ratios["PageIn"][0],
        "with_others_on_the_bus": {"out": ratios["PageOut"][1], "in": ratios["PageIn"][1]},
        "alone_on_the_bus": {kind: len(values) for kind, values in by_themselves.items()},
        "copies": [asdict(copy) for copy in copies],
        "hidden": statistics.median(min(1.0, part) for part in hidden) if hidden else None,
        "persistent_gib": sum(row["persistent_bytes"] for row in rows) / 2**30,
        # As the jobs saw it: all moves, also those that shared the bus, without the way to the service and back.
        "paged_gib": {way: size / 2**30 for way, (size, _) in moved.items()},
        "paged_gib_s": {way: size / 2**30 / (ns / 1e9) if ns else None for way, (size, ns) in moved.items()},
        "said": sorted({line for one in told for line in one.get("said", []) if "waits for memory" not in line}),
        "timeline": {"moves": moves, "leases": held},
    }


@dataclass(frozen=True)
class Copy:
    """Memory that a job moved, as it counted it itself: until the memory was free for others, or could be used."""

    kind: str
    job: str
    gib: float
    seconds: float
    seen_at: float

    @property
    def gib_s(self) -> float:
        return self.gib / self.seconds

    def is_alone(self, moves: list[tuple[str, str, float, float]]) -> bool:
        """Whether nothing else went the same way meanwhile, by the journal; the bus has two."""
        own = [m for m in moves if m[:2] == (self.kind, self.job) and m[2] < self.seen_at and m[3] > self.seen_at - 0.5]
        return (
            bool(own)
            and sum(kind == self.kind and start < own[-1][3] and own[-1][2] < end for kind, _, start, end in moves) == 1
        )


def _watch_copies(connection: ServiceConnection, done: Callable[[], bool]) -> list[Copy]:
    """Those of half a GiB and more."""
    found: list[Copy] = []
    before: dict[tuple[str, str], tuple[int, int]] = {}
    while not done():
        now = time.monotonic()
        for row in connection.jobs():
            for kind, way in (("PageOut", "out"), ("PageIn", "in")):
                size, ns = row[f"paged_{way}_bytes"], row[f"paged_{way}_ns"]
                had_size, had_ns = before.get((row["id"], way), (0, 0))
                if ns > had_ns:
                    # The time is counted when it is over, so this is the whole of one move, or of several.
                    if size - had_size >= 1 << 29:
                        found.append(Copy(kind, row["id"], (size - had_size) / 2**30, (ns - had_ns) / 1e9, now))
                    before[row["id"], way] = size, ns
        time.sleep(0.02)
    return found


def _moves(journal: Path) -> list[tuple[str, str, float, float]]:
    """Page-outs and page-ins, from the order to the answer; not those that a job answered by coming to its end."""
    began: dict[tuple[str, str], float] = {}
    found: list[tuple[str, str, float, float]] = []
    for line in lines(journal):
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


def shares(seconds: float = 45.0) -> dict[str, Any]:
    """Twenty jobs of four sizes at once under `fair` by memory x time: who got how much of that, from the beginning."""
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
            before = {row["name"]: row["ran_s"] for row in connection.jobs()}
            time.sleep(seconds)
            rows = connection.jobs()
    service_of = {
        row["name"]: (row["ran_s"] - before[row["name"]])
        * (row["persistent_bytes"] + row["ephemeral_bytes"] + row["internal_bytes"])
        / 2**30
        for row in rows
    }
    index = jain(list(service_of.values()))
    passed = index >= 0.95 and len(rows) == len(kinds)
    iterations = {row["name"]: row["iterations"] for row in rows}
    return {"jain": index, "gib_s": service_of, "iterations": iterations, "ready": sum(ready), "passed": passed}


def crowd(jobs: int = 12, iterations: int = 200) -> dict[str, Any]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    bare = result_of(subprocess.Popen(command("vae", iterations), **pipes))
    nvml = Nvml()
    (gpu, *_) = nvml.gpus()
    idle_bytes, most_bytes, most_contexts, most_at_the_door = nvml.used_bytes(gpu), 0, 0, 0
    with OwnService("--policy", "fair", "--capacity", f"{CROWD_GIB}GiB", "--reserve", "0") as service:
        started = [service.run(command("vae", iterations), "--name", f"j{number}") for number in range(jobs)]
        with service.connect() as connection:
            while any(job.poll() is None for job in started):
                most_bytes = max(most_bytes, nvml.used_bytes(gpu) - idle_bytes)
                used = nvml.used_by(gpu)
                pids = {row["pid"] for row in connection.jobs()} - {None}
                most_contexts = max(most_contexts, len(pids & used.keys()))
                most_at_the_door = max(most_at_the_door, len(pids - used.keys()))
                time.sleep(0.05)
        told = [result_of(job) for job in started]
    same = [one.get("losses") == bare["losses"] for one in told]
    return {
        "jobs": jobs,
        "same": sum(same),
        "failed": [one["failed"] for one in told if "failed" in one],
        "capacity_gib": CROWD_GIB,
        "most_gib": most_bytes / 2**30,
        "most_contexts": most_contexts,
        "most_at_the_door": most_at_the_door,
        "passed": all(same) and most_bytes <= CROWD_GIB * 2**30,
    }


def faults() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, part in (("too large", _too_large), ("kills", _kills)):
        found[name] = part()
        print(name, found[name], flush=True)
    return {**found, "passed": all(row["passed"] for row in found.values())}


def _too_large() -> dict[str, Any]:
    """Jobs that want more than there is, one after the other; their neighbours compute what they always do, as fast.

    Both speeds are those of the same processes: beside such a job, and before it came and after it was killed. The last
    one takes what is free, waits for more, and gets its error when it has all there is: with this policy's patience,
    when its neighbours are done.
    """
    iterations = 5000
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    bare = result_of(subprocess.Popen(command("vae", iterations), **pipes))
    with OwnService("--capacity", "8GiB", "--policy", "fair") as service, ThreadPoolExecutor() as pool:
        go, *late = (service.socket.parent / name for name in ("go", *(f"go-{number}" for number in range(GREEDY))))
        neighbours = [
            service.run(command("vae", iterations, "--go", str(go)), "--name", f"n{number}") for number in range(2)
        ]
        greedy = [
            service.run(command("too-large", 1000, "--go", str(file)), "--name", f"greedy-{number}")
            for number, file in enumerate(late)
        ]
        for job in (*neighbours, *greedy):
            says_ready(job, time.monotonic() + START_LIMIT_S)
        go.touch()
        results = [pool.submit(result_of, job) for job in neighbours]
        beside: list[tuple[float, float]] = []
        with service.connect() as connection:
            pids = {row["name"]: row["pid"] for row in connection.jobs()}
        for number, file in enumerate(late[:-1]):
            time.sleep(UNDISTURBED_S)
            came = time.monotonic()
            file.touch()
            time.sleep(UNDISTURBED_S)
            beside.append((came, time.monotonic()))
            os.kill(pids[f"greedy-{number}"], signal.SIGKILL)
        time.sleep(UNDISTURBED_S)
        came = time.monotonic()
        late[-1].touch()
        errors = greedy[-1].communicate(timeout=TIMEOUT_S)[1]
        beside.append((came, time.monotonic()))
        told = [result.result() for result in results]
    out_of_memory = "OutOfMemoryError" in errors
    same = all(one.get("losses") == bare.get("losses") for one in told)
    speeds = _iteration_s(told, beside)
    slower = speeds["beside"] / speeds["without"] if all(speeds.values()) else None
    return {
        "out_of_memory": out_of_memory,
        "neighbours_same": same,
        "neighbours_iteration_s": speeds,
        "seconds_beside": [end - start for start, end in beside],
        "neighbours_slower_by": slower,
        "said": errors.strip().splitlines()[-1:],
        "failed": [one["failed"] for one in [bare, *told] if "failed" in one],
        "passed": out_of_memory and same and slower is not None and slower <= AS_FAST,
    }


def _iteration_s(told: list[dict[str, Any]], beside: list[tuple[float, float]]) -> dict[str, Any]:
    """How long an iteration took, at the median: while another job was there, and without it.

    Only while both neighbours run (the one that is left at the end has the GPU to itself), and not in the moments in
    which the other came or went.
    """
    found: dict[str, list[float]] = {"without": [], "beside": []}
    if not any("failed" in one for one in told):
        began = max(one["began_s"] for one in told) + WARM_UP_S
        ended = min(one["began_s"] + sum(one["seconds"]) for one in told)
        for one in told:
            at = one["began_s"]
            for seconds in one["seconds"]:
                if (
                    began <= at
                    and at + seconds <= ended
                    and not any(abs(at - t) < NEAR_S for span in beside for t in span)
                ):
                    found["beside" if any(start < at < end for start, end in beside) else "without"].append(seconds)
                at += seconds
    return {name: statistics.median(seconds) if seconds else None for name, seconds in found.items()}


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
