"""What switching costs: a boundary nobody asks for, a hand-over from job to job, and the throughput of one job alone.

- Boundary: a job alone begins and ends iterations that do nothing. It must cost microseconds and no system call; for
  the second part the kernel is asked to end the process at the first one (`seccomp`).
- Hand-over: two jobs in one lane, switched at every boundary. From the end of one's iteration to the beginning of the
  other's, on the clock that all processes share.
- After a kill: a job is killed (SIGKILL) while it holds the lease of the lane. From the kill to the next iteration of
  the job beside it.
- Throughput: an unmodified training script, bare and under Salus, in turns, so that both see the same weather.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from salus.bench.own_service import OwnService
from salus.client.connection import ServiceConnection
from salus.errors import RequestRejected
from salus.protocol import messages as msg

TRAIN = Path(__file__).parent / "scripts" / "train.py"
TARGETS = {
    "boundary_us": 5.0,
    "hand_over_us": 150.0,
    "after_a_kill_ms": 100.0,
    "throughput": 0.99,
}
"""On the host device."""
TIMEOUT_S = 300

Say = Callable[[str], None]


def measure(say: Say, *, boundaries: int, hand_overs: int, kills: int, rounds: int) -> dict[str, Any]:
    say("a boundary that nobody asks for")
    result: dict[str, Any] = {"boundary": boundary(boundaries)}
    say("hand-over from job to job")
    result["hand_over"] = hand_over(hand_overs)
    say("after a kill")
    result["after_a_kill"] = after_a_kill(kills)
    if rounds:
        result["throughput"] = throughput(say, rounds, blocks=6, block=10)
    result["targets"] = TARGETS
    return result


def boundary(count: int) -> dict[str, Any]:
    with OwnService() as service:
        output = finished(service.run(_job("alone", count)))
    costs, calls, *_ = [*map(json.loads, output.splitlines()), "some"]
    return {
        "count": count,
        "median_us": statistics.median(costs),
        "worst_batch_of_1000_us": max(costs),
        "system_calls": calls,
    }


def hand_over(count: int, seconds: float = 0.002) -> dict[str, Any]:
    """Both jobs stand at the door all the time, so that every end of an iteration is a hand-over."""
    options = ("--ephemeral", "3GiB")
    with OwnService("--policy", "rr", "--quantum", "0", "--capacity", "4GiB") as service:
        go = service.socket.parent / "go"
        jobs = [service.run([*_job("turns", count, seconds), str(go)], "--name", name, *options) for name in "ab"]
        _wait_until_all_have_begun(service, jobs)
        go.touch()
        spans = [json.loads(finished(job)) for job in jobs]
    turns = sorted(
        (began, ended, job)
        for job, (all_began, all_ended) in enumerate(spans)
        for began, ended in zip(all_began, all_ended, strict=True)
    )
    gaps_us = [(after[0] - before[1]) / 1000 for before, after in pairwise(turns) if before[2] != after[2]]
    if len(gaps_us) < count / 2:
        raise RequestRejected(f"only {len(gaps_us)} hand-overs between {2 * count} iterations; run it again")
    return {
        "count": len(gaps_us),
        "iteration_s": seconds,
        **spread(gaps_us, "us"),
        "two_wake_ups_us": two_wake_ups(count // 4, seconds),
    }


def two_wake_ups(count: int, seconds: float) -> float:
    """What of a hand-over is the machine's own: a packet wakes a process, which wakes the first one. Nothing else."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = "import os, sys\nwhile os.read(0, 16): os.write(1, b'x')"
    with here, subprocess.Popen([sys.executable, "-c", code], stdin=there.fileno(), stdout=there.fileno()) as echo:
        there.close()
        took_us: list[float] = []
        for _ in range(count):
            start = time.monotonic()
            while time.monotonic() - start < seconds:
                pass
            sent = time.monotonic_ns()
            here.send(b"x")
            here.recv(16)
            took_us.append((time.monotonic_ns() - sent) / 1000)
        echo.terminate()
    return statistics.median(took_us)


def after_a_kill(count: int) -> dict[str, Any]:
    """One job stays, and others beside it in its lane are killed one after the other while they run."""
    options = ("--ephemeral", "3GiB")
    killed_at: list[int] = []
    with OwnService("--policy", "fair", "--quantum", "50ms", "--capacity", "4GiB") as service:
        stays = service.run(_job("turns", 1_000_000, 0.002), "--name", "stays", *options)
        with service.connect() as connection:
            _wait_for(connection, "stays", "running")
            for number in range(count):
                victim = service.run(_job("turns", 1_000_000, 0.002), "--name", f"victim{number}", *options)
                pid = _wait_for(connection, f"victim{number}", "running")["pid"]
                killed_at.append(time.monotonic_ns())
                os.kill(pid, signal.SIGKILL)
                victim.wait(timeout=TIMEOUT_S)
            stays_id = next(row["id"] for row in connection.jobs() if row["name"] == "stays")
            connection.request(msg.CancelJob(stays_id))
        began = json.loads(finished(stays))[0]
    gaps_ms = [(began[bisect_left(began, at)] - at) / 1e6 for at in killed_at]
    return {"count": count, "median_ms": statistics.median(gaps_ms), "max_ms": max(gaps_ms)}


def _wait_for(connection: ServiceConnection, name: str, state: str) -> dict[str, Any]:
    """The job, once it is in that state and has begun to iterate."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for row in connection.jobs():
            if row["name"] == name and row["state"] == state and row["iterations"]:
                return row
    raise RequestRejected(f"job {name} of the benchmark was never {state}")


def throughput(say: Say, rounds: int, blocks: int, block: int) -> dict[str, Any]:
    """The same script three times, as a job and twice bare; all start up, and then they train in turns, block by block.

    So all see the same weather, and start-up is on no side; the clock is the script's own. Where a process lies in
    memory and on which core it runs makes far more of a difference than Salus does, so there are many short rounds with
    new processes, each against the mean of the two bare ones. Of each process the lower quartile of its iterations
    counts: what others do on the machine makes some slower and none faster.
    """
    command = [sys.executable, str(TRAIN), "--device", "cpu", "--model", "lstm"]
    command += ["--iterations", str(blocks * block), "--block", str(block)]
    took: list[dict[str, float]] = []
    digests: set[str] = set()
    with OwnService() as service:
        for number in range(rounds):
            say(f"throughput, round {number + 1} of {rounds}")
            sides = {
                "bare": service.start_bare(command),
                "salus": service.run(command),
                "again": service.start_bare(command),
            }
            for turn in range(blocks):
                for side in in_turn(list(sides), turn):
                    take_turn(sides[side])
            told = {side: json.loads(finished(process).splitlines()[-1]) for side, process in sides.items()}
            took.append({side: statistics.quantiles(said["seconds"], n=4)[0] for side, said in told.items()})
            digests |= {said["digest"] for said in told.values()}
    ratios = [(one["bare"] + one["again"]) / 2 / one["salus"] for one in took]
    bare = [one["bare"] / one["again"] for one in took]
    return {
        "rounds": took,
        "iterations_a_round": blocks * block,
        "ratio": trimmed_mean(ratios),
        "error": standard_error(ratios),
        "ratio_of_bare_to_bare": trimmed_mean(bare),
        "error_of_bare_to_bare": standard_error(bare),
        "same_losses_bit_for_bit": len(digests) == 1,
    }


def trimmed_mean(values: list[float]) -> float:
    """Without the tenth at either end: nearly as precise as the mean, and not moved by what happens now and then."""
    cut = len(values) // 10
    return statistics.mean(sorted(values)[cut : len(values) - cut])


def standard_error(values: list[float]) -> float:
    """Of the trimmed mean: how far from the truth it is to be expected.

    What is cut off scatters too: it counts as if it were as far out as the last that is kept.
    """
    if len(values) < 2:
        return float("inf")
    cut = len(values) // 10
    kept = sorted(values)[cut : len(values) - cut]
    pulled_in = [kept[0]] * cut + kept + [kept[-1]] * cut
    return statistics.stdev(pulled_in) * math.sqrt(len(values)) / len(kept)


def in_turn(sides: list[str], turn: int) -> list[str]:
    """An order in which, turn by turn, nobody follows itself: whoever goes on from its own last turn is faster."""
    return sides[turn % len(sides) :] + sides[: turn % len(sides)]


def take_turn(process: subprocess.Popen[str]) -> None:
    """Waits until the script stands before a block, and lets it have the block to itself."""
    assert process.stdin is not None and process.stdout is not None
    while (line := process.stdout.readline().strip()) != "block":
        if not line:
            raise RequestRejected(f"the script failed: {_last_line(process.communicate()[1])}")
    process.stdin.write("\n")
    process.stdin.flush()
    # It is done when it stands before the next one, or has ended: the next line it says is left to be read then.
    select.select([process.stdout], [], [], TIMEOUT_S)


def _wait_until_all_have_begun(service: OwnService, jobs: Sequence[subprocess.Popen[str]]) -> None:
    with service.connect() as connection:
        while sum(row["iterations"] > 0 for row in connection.jobs()) < len(jobs):
            for job in jobs:
                if job.poll() is not None:
                    finished(job)
            time.sleep(0.01)


def finished(job: subprocess.Popen[str]) -> str:
    """The job's output, once it has ended."""
    output, errors = job.communicate(timeout=TIMEOUT_S)
    # SIGSYS, from the kernel, is an answer: the output that was there before is the whole story.
    if job.returncode not in (0, 128 + 31):
        raise RequestRejected(f"the job failed: {_last_line(errors)}")
    return output


def spread(values: list[float], unit: str) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {
        f"median_{unit}": statistics.median(values),
        f"p90_{unit}": cuts[89],
        f"p99_{unit}": cuts[98],
        f"max_{unit}": max(values),
    }


def verdicts(result: Mapping[str, Any]) -> list[tuple[str, str, str, bool]]:
    """What was measured, the value, the target, and whether it was met."""
    at_a_boundary, hand = result["boundary"], result["hand_over"]
    calls = at_a_boundary["system_calls"]
    rows = [
        (
            "boundary, nobody waits",
            f"{at_a_boundary['median_us']:.2f} us",
            "at most 5 us",
            at_a_boundary["median_us"] <= 5,
        ),
        ("its system calls", "not checked here" if calls is None else str(calls), "none", calls == "none"),
        ("hand-over, median", f"{hand['median_us']:.0f} us", "at most 150 us", hand["median_us"] <= 150),
        ("for comparison, two bare wake-ups", f"{hand['two_wake_ups_us']:.0f} us", "", True),
        ("hand-over, 99 of 100", f"{hand['p99_us']:.0f} us", "", True),
    ]
    kill = result["after_a_kill"]
    slowest = f"after a kill, the slowest of {kill['count']}"
    rows.append((slowest, f"{kill['max_ms']:.1f} ms", "at most 100 ms", kill["max_ms"] <= 100))
    if "throughput" in result:
        found = result["throughput"]
        ratio, again, same = found["ratio"], found["ratio_of_bare_to_bare"], found["same_losses_bit_for_bit"]
        errors = [f" ± {found[key]:.4f}" if key in found else "" for key in ("error", "error_of_bare_to_bare")]
        rows.append(("throughput against bare", f"{ratio:.4f}{errors[0]}", "at least 0.99", ratio >= 0.99))
        rows.append(("bare against bare", f"{again:.4f}{errors[1]}", "", True))
        rows.append(("losses against bare", "the same bit for bit" if same else "DIFFERENT", "the same", same))
    return rows


def _job(kind: str, count: int, seconds: float = 0.0) -> list[str]:
    return [sys.executable, "-m", "salus.bench.switch_job", kind, str(count), str(seconds)]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]
