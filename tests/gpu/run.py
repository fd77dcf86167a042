"""The GPU suite: `make test-gpu`, or python -m tests.gpu.run [--out FILE.json] [--phases ...] [--kinds ...]

- alone: each script bare and under Salus: the same losses to the last bit; and the time of an iteration with Salus in
  its process and without, in turns, block by block: within 1 %.
- together: all of them at once, three to a lane, switched at every boundary, the lane poisoned at every switch: the
  same losses to the last bit. This is the one that matters most.
- memory: three ResNet-50 in one lane: the GPU's memory, and the hand-over.
- throughput: three ResNet-50 in one lane, at once against one after the other: tests/gpu/throughput.py.
- paging, shares, faults, crowd: tests/gpu/pressure.py.
- arena: what joining a lane and an allocation cost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib.metadata import version
from pathlib import Path
from typing import Any

from salus.bench import arena, hooks, machine
from salus.bench.own_service import OwnService
from salus.bench.switch_gpu import hand_overs
from salus.protocol import messages as msg
from salus.service.gpu import Nvml
from salus.service.replay import lines
from tests.gpu import pressure, throughput
from tests.gpu.jobs import START_LIMIT_S, TIMEOUT_S, command, result_of, says_ready
from tests.gpu.train_kinds import ALL, ALONE, ITERATIONS_A_STEP

IN_AND_OUT = str(Path(__file__).parent / "in_and_out.py")
MEASURE_S = 7.0
LONGER_S = {"resnet50": 40.0, "lstm": 30.0}
"""They wait for the processor all the time, and what that takes changes by a tenth from block to block."""
AT_ONCE, CORES = 7, 1
"""Kinds of `alone` that start up together, and the cores that each has: on several, threads that take turns make a
script a fifth slower now and then, for seconds."""
CONTEXT_GIB = 1.0
"""A little more than a process's context and library code take: with much more there would be room for another lane."""
SHOWN = ("name", "state", "lane", "wait_reason", "iterations", "persistent_bytes", "ephemeral_bytes")
PERSISTENT_GIB = {"resnet50": 0.6, "vit": 1.8, "gpt2": 3.0, "growing": 0.6}
"""What each declares; 0.5 GiB where nothing is said."""
LANE_GIB = 16.0
"""What each declares. While the first ones are there and the others are not, there must be no room for a lane more: so
it is more than the persistent memory and the contexts of the others together."""


def alone(kinds: list[str], iterations: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """For each, what the bare script computed, and how Salus compares. They start up together.

    Losses are those of two processes. What Salus adds to an iteration is measured within a third one (`in_and_out.py`),
    one kind after the other: from one process to the next the same script differs by far more.
    """
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        told: list[dict[str, Future[dict[str, Any]]]] = []
        measured = []
        for number, kind in enumerate(kinds):
            service, own = stack.enter_context(OwnService()), stack.enter_context(OwnService())
            run, go = command(kind, iterations), own.socket.parent / "go"
            sides = {"bare": service.start_bare(run), "salus": service.run(run, "--name", kind)}
            with machine.few_cores(number, CORES, AT_ONCE):
                job = own.run(
                    [sys.executable, IN_AND_OUT, kind, str(LONGER_S.get(kind, MEASURE_S)), "--go", str(go)],
                    "--name",
                    kind,
                )
            told.append({side: pool.submit(result_of, process) for side, process in sides.items()})
            measured.append((own, go, job))
        for sides_of_one in told:
            wait(sides_of_one.values())
        return [
            _compare(kind, {side: future.result() for side, future in sides_of_one.items()}, *of_one)
            for kind, sides_of_one, of_one in zip(kinds, told, measured, strict=True)
        ]


def _compare(
    kind: str, told: dict[str, dict[str, Any]], service: OwnService, go: Path, job: subprocess.Popen[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    ready = says_ready(job, time.monotonic() + START_LIMIT_S)
    go.touch()
    output, errors = job.communicate(timeout=TIMEOUT_S)
    with service.connect() as connection:
        (row,) = connection.jobs(everything=True)
    lines = output.splitlines()
    if not ready or not lines or any("failed" in one for one in told.values()):
        return told["bare"], {"kind": kind, "failed": {**told, "measured": errors.strip().splitlines()[-6:]}}
    blocks = json.loads(lines[-1])
    added = hooks.compare(blocks)
    return told["bare"], {
        "kind": kind,
        "same": told["bare"]["losses"] == told["salus"]["losses"],
        "ratio": 1 + added["added_us"] / added["bare_us"],
        "error": added["error_us"] / added["bare_us"],
        "blocks": len(blocks["bare"]),
        **added,
        "persistent_mib": row["persistent_bytes"] >> 20,
        "ephemeral_mib": row["ephemeral_bytes"] >> 20,
        "said": told["salus"]["said"],
    }


def together(kinds: list[str], iterations: int, bare: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """All at once: each lane has room for three, every boundary is a switch, every switch poisons."""
    needs = {kind: PERSISTENT_GIB.get(kind, 0.5) for kind in kinds}
    groups = (len(kinds) + 2) // 3
    capacity = sum(persistent + CONTEXT_GIB for persistent in needs.values()) + groups * LANE_GIB
    options = ("--policy", "rr", "--quantum", "0", "--capacity", f"{capacity}GiB", "--reserve", "0")
    results: dict[str, Any] = {}
    os.environ["SALUS_POISON"] = "1"
    with OwnService(*options) as service:
        service.environment["SALUS_POISON"] = "1"
        go = service.socket.parent / "go"
        jobs = {
            kind: service.run(
                command(kind, iterations, "--go", str(go)),
                "--name", kind, "--persistent", f"{needs[kind]}GiB", "--ephemeral", f"{LANE_GIB}GiB",
            )
            for kind in kinds
        }  # fmt: skip
        started = time.monotonic()
        for kind, job in jobs.items():
            if not says_ready(job, started + START_LIMIT_S):
                print(f"  {kind} did not start", flush=True)
                with service.connect() as connection:
                    for row in connection.jobs():
                        print("   ", {key: row[key] for key in SHOWN}, flush=True)
        go.touch()
        most_lanes = 0
        with service.connect() as connection:
            while any(job.poll() is None for job in jobs.values()) and time.monotonic() < started + TIMEOUT_S:
                most_lanes = max(most_lanes, len(connection.request(msg.GetStatus()).status["lanes"]))
                time.sleep(0.1)
            for kind, job in jobs.items():
                told = result_of(job)
                if "failed" in told:
                    results[kind] = told
                    continue
                results[kind] = {"same": told["losses"] == bare[kind]["losses"], "said": told["said"]}
            rows = {row["name"]: row for row in connection.jobs(everything=True)}
        for kind, found in results.items():
            found["persistent_mib"] = rows[kind]["persistent_bytes"] >> 20
            found["ephemeral_mib"] = rows[kind]["ephemeral_bytes"] >> 20
            found["iterations"] = rows[kind]["iterations"]
            expected = ITERATIONS_A_STEP.get(kind, 0) * iterations
            found["counted"] = not expected or found["iterations"] == expected
        took_s = time.monotonic() - started
        service.stop()
        grants = sum(action["kind"] == "GrantLease" for line in lines(service.journal()) for action in line["actions"])
    return {"jobs": results, "seconds": took_s, "grants": grants, "most_lanes": most_lanes}


def memory(iterations: int) -> dict[str, Any]:
    """Three ResNet-50 in one lane, against one alone: memory as NVML shows it, throughput, hand-over."""
    nvml = Nvml()
    (gpu, *_) = nvml.gpus()
    found: dict[str, Any] = {}
    for name, count, options in (
        ("alone", 1, ()),
        ("three, every boundary", 3, ("--policy", "rr", "--quantum", "0")),
        ("three, fair, 20 ms", 3, ("--policy", "fair")),
        ("alone again", 1, ()),
    ):
        idle_bytes = nvml.used_bytes(gpu)
        with OwnService("--capacity", "8.2GiB", *options) as service:
            go, trace = service.socket.parent / "go", service.state / "trace"
            service.environment["SALUS_TRACE"] = str(trace)
            run = command("resnet50", iterations, "--go", str(go))
            needs = ("--persistent", "0.6GiB", "--ephemeral", "3.6GiB")
            jobs = [service.run(run, "--name", f"r{number}", *needs) for number in range(count)]
            for job in jobs:
                if not says_ready(job, time.monotonic() + START_LIMIT_S):
                    print(f"  {name}: a job did not start", flush=True)
            go.touch()
            samples: list[tuple[float, int]] = []
            rows: list[dict[str, Any]] = []
            used_bytes = chunk_bytes = 0
            with service.connect() as connection:
                while any(job.poll() is None for job in jobs):
                    now = connection.jobs()
                    done = [row["iterations"] for row in now]
                    # While all of them are at work, after the first iterations, which take their memory.
                    if len(now) == count and min(done) >= 20 and max(done) <= iterations - 5:
                        samples.append((time.monotonic(), sum(done)))
                        rows = now
                        used_bytes = nvml.used_bytes(gpu) - idle_bytes
                        chunk_bytes = connection.request(msg.GetStatus()).status["lane_chunk_bytes"]
                        by_process = {row["name"]: nvml.used_by(gpu).get(row["pid"], 0) >> 20 for row in now}
                    time.sleep(0.05)
            told = [result_of(job) for job in jobs]
            if any("failed" in one for one in told) or len(samples) < 2:
                found[name] = {"failed": [one.get("failed") for one in told], "samples": len(samples)}
                continue
            (began, first), (ended, last) = samples[0], samples[-1]
            traces = [json.loads(path.read_text()) for path in service.state.glob("trace.*")]
            found[name] = {
                "iterations_a_second": (last - first) / (ended - began),
                "seconds": ended - began,
                "nvml_mib": used_bytes >> 20,
                "nvml_mib_by_process": by_process,
                "lane_chunks_mib": chunk_bytes >> 20,
                "persistent_mib": [row["persistent_bytes"] >> 20 for row in rows],
                "ephemeral_mib": [row["ephemeral_bytes"] >> 20 for row in rows],
                "lanes": sorted({row["lane"] for row in rows}),
                "hand_over_us": hand_overs(traces),
                "losses_same": all(one["losses"] == told[0]["losses"] for one in told),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--phases", default="alone,together,memory,throughput,arena")
    parser.add_argument("--kinds", default=",".join(ALL))
    parser.add_argument("--policies", default="fair:patience=0.5 srtf", help="for paging")
    parser.add_argument("--keep", type=Path, help="a folder for journals of paging, and for what throughput was told")
    parser.add_argument("--iterations", type=int, default=100)
    options = parser.parse_args()
    kinds, phases = options.kinds.split(","), options.phases.split(",")
    (gpu, *_) = Nvml().gpus()
    result: dict[str, Any] = {"gpu": gpu.name, "torch": version("torch"), "iterations": options.iterations}
    bare: dict[str, dict[str, Any]] = {}
    rows = []
    if "alone" in phases:
        measured = [kind for kind in kinds if kind in ALONE]
        for at in range(0, len(measured), AT_ONCE):
            for computed, row in alone(measured[at : at + AT_ONCE], options.iterations):
                bare[row["kind"]] = computed
                rows.append(row)
                print({key: value for key, value in row.items() if key != "iterations"}, flush=True)
        result["alone"] = rows
    if "together" in phases:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        missing = [kind for kind in kinds if kind not in bare]
        started = {kind: subprocess.Popen(command(kind, options.iterations), **pipes) for kind in missing}
        bare |= {kind: result_of(process) for kind, process in started.items()}
        result["together"] = together([k for k in kinds if "losses" in bare[k]], options.iterations, bare)
        for kind, found in result["together"]["jobs"].items():
            print(kind, found, flush=True)
        print({key: value for key, value in result["together"].items() if key != "jobs"}, flush=True)
    if "memory" in phases:
        result["memory"] = memory(options.iterations)
        for name, row in result["memory"].items():
            print(name, row, flush=True)
    if "throughput" in phases:
        result["throughput"] = throughput.measure(options.keep)
        print("throughput", result["throughput"], flush=True)
    if "paging" in phases:
        result["paging"] = pressure.paging(options.iterations, options.policies.split(" "), options.keep)
    if "shares" in phases:
        result["shares"] = pressure.shares()
        print("shares", result["shares"], flush=True)
    if "faults" in phases:
        result["faults"] = pressure.faults()
    if "crowd" in phases:
        result["crowd"] = pressure.crowd()
        print("crowd", result["crowd"], flush=True)
    if "arena" in phases:
        result["arena"] = arena.measure("cuda", 16 << 30)
        print("arena", result["arena"], flush=True)
    if options.out is not None:
        machine.write(options.out, "gpu", result)
    under_pressure = ("paging", "shares", "faults", "crowd")
    wrong = [what for what in under_pressure if not result.get(what, {"passed": True})["passed"]]
    wrong += [row["kind"] for row in rows if not row.get("same")]
    wrong += [kind for kind, row in result.get("together", {"jobs": {}})["jobs"].items() if not row.get("same")]
    miscounted = [kind for kind, row in result.get("together", {"jobs": {}})["jobs"].items() if not row["counted"]]
    if miscounted and not wrong:
        sys.exit(f"the losses are the same, but not the iterations that were counted: {', '.join(miscounted)}")
    if wrong:
        sys.exit(f"NOT the same as bare: {', '.join(wrong)}")
    print("all losses are the same as bare, to the last bit")


if __name__ == "__main__":
    main()
