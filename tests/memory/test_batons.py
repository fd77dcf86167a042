"""A lease goes straight from one job to the next, between real processes on the host device."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from tests.service.harness import SOURCE, Service, eventually

JOB = Path(__file__).parent / "passing_job.py"
KEEPING = Path(__file__).parent / "keeping_job.py"
MEMORY = ("--persistent", "20MiB", "--ephemeral", "400MiB")
"""So that all share one lane of a device of 520 MiB."""
ROUND_ROBIN = ("--policy", "rr", "--quantum", "0", "--capacity", "520MiB")


def start(
    service: Service,
    name: str,
    iterations: int,
    *more: str,
    pause_s: float = 0.002,
    seconds: float = 0.002,
    weight: int = 1,
) -> subprocess.Popen[str]:
    arguments = [str(SOURCE), str(iterations), str(seconds), str(pause_s), str(service.folder / "go"), *more]
    options = ("--name", name, "--weight", str(weight), *MEMORY)
    return service.salus_in_background("run", *options, "--", sys.executable, str(JOB), *arguments)


def go(service: Service, *names: str) -> None:
    for name in names:
        eventually(lambda name=name: service.jobs().get(name, {}).get("pid"), f"{name} is attached")
    (service.folder / "go").touch()


def told(*jobs: subprocess.Popen[str]) -> list[dict]:
    found = []
    for job in jobs:
        output, errors = job.communicate(timeout=100)
        assert job.returncode == 0, errors
        found.append(json.loads(output.splitlines()[-1]))
    return found


def never_two_at_once(found: list[dict]) -> int:
    """How often the lease went from one job to another."""
    turns = sorted((*turn, job) for job, one in enumerate(found) for turn in one["times"])
    for before, after in pairwise(turns):
        assert before[2] == after[2] or before[1] <= after[0], "two ran in one lane"
    return sum(before[2] != after[2] for before, after in pairwise(turns))


def test_a_lease_goes_from_job_to_job_and_the_service_hears_of_it_afterwards(serve):
    service = serve(*ROUND_ROBIN)
    found = told_of_three(service)
    switches = never_two_at_once(found)
    assert switches > 150, "they took turns"
    assert sum(one["passed"] for one in found) > switches / 2, "and mostly by themselves"
    assert all(row["iterations"] == 101 for row in service.jobs().values())
    assert service.status()["lane_chunks"] == 0
    (journal,) = service.journals()
    done = service.salus("replay", str(journal))
    assert done.returncode == 0, done.stdout + done.stderr


def told_of_three(service: Service) -> list[dict]:
    jobs = [start(service, name, 100) for name in "abc"]
    go(service, *"abc")
    return told(*jobs)


def test_with_jobs_that_come_at_once_the_lease_is_passed_too(serve):
    service = serve(*ROUND_ROBIN)
    jobs = [start(service, name, 100, pause_s=0) for name in "ab"]
    go(service, *"ab")
    assert never_two_at_once(told(*jobs)) > 50


def test_with_short_iterations_nobody_loses_count(serve):
    """The service counts a lease that was passed on while the heir takes it."""
    service = serve(*ROUND_ROBIN)
    jobs = [start(service, name, 1500, pause_s=0, seconds=0.0003) for name in "abc"]
    go(service, *"abc")
    never_two_at_once(told(*jobs))


def test_what_is_made_private_at_a_yield_is_never_the_next_ones(serve):
    """The giver says what it takes while the service names its heir."""
    service = serve("--policy", "rr", "--quantum", "0", "--capacity", "700MiB")
    memory = ("--persistent", "120MiB", "--ephemeral", "400MiB")
    jobs = []
    for role in ("taker", "peer"):
        command = [sys.executable, str(KEEPING), str(SOURCE), "800", str(service.folder / "go"), role]
        jobs.append(service.salus_in_background("run", "--name", role, *memory, "--", *command))
    go(service, "taker", "peer")
    for job in jobs:
        output, errors = job.communicate(timeout=100)
        assert job.returncode == 0 and "finished" in output, errors


def stop_while_it_holds(service: Service, name: str) -> int:
    """Stops the process while it has the lease, in an iteration or between two."""
    pid = service.jobs()[name]["pid"]
    for _ in range(40):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.01)
        if any(lane["holder"] == service.jobs()[name]["id"] for lane in service.status()["lanes"]):
            return pid
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.003)
    raise AssertionError(f"{name} never held the lease")


def test_an_heir_that_lost_its_connection_does_not_take_the_lane_with_it(serve):
    service = serve(*ROUND_ROBIN)
    names = [f"q{number}" for number in range(4)]
    job = start(service, "a", 100_000, pause_s=0.0025, seconds=0.0001)
    quitters = [start(service, name, 100_000, "quits", pause_s=0.0025, seconds=0.0001) for name in names]
    go(service, "a", *names)
    eventually(lambda: service.jobs()["a"]["iterations"] > 20, "it runs")
    for name in names:
        pid = stop_while_it_holds(service, "a")
        os.kill(service.jobs()[name]["pid"], signal.SIGUSR1)
        time.sleep(0.05)
        before = service.jobs()["a"]["iterations"]
        os.kill(pid, signal.SIGCONT)
        eventually(lambda before=before: service.jobs()["a"]["iterations"] > before + 10, "the others go on")
    assert all(one.poll() is None for one in (job, *quitters))


def test_the_heir_of_a_stuck_job_is_asked_and_waits_like_any_other_again(serve):
    service = serve(*ROUND_ROBIN, "--stuck-after", "0s")
    # It stops when it has said that it will yield, before the helper thread yields for it.
    jobs = [start(service, "a", 100_000, "stops", pause_s=0.001), start(service, "b", 100_000)]
    go(service, *"ab")
    for _ in range(30):
        pid = service.when("a", "stopped")["pid"]
        time.sleep(1.2)  # until the journal is on the disk
        events = service.decisions()
        stuck = max(number for number, line in enumerate(events) if line["event"]["kind"] == "JobStuck")
        kinds = [[action["kind"] for action in line["actions"]] for line in events]
        last = max(n for n, names in enumerate(kinds[:stuck]) if "GrantLease" in names or "PromiseLease" in names)
        os.kill(pid, signal.SIGCONT)
        if "PromiseLease" in kinds[last]:
            assert any("WithdrawPromise" in names for names in kinds[stuck:])
            break
    else:
        raise AssertionError("it was never stopped between two iterations")
    before = {name: service.jobs()[name]["iterations"] for name in "ab"}
    for name in "ab":
        eventually(lambda name=name: service.jobs()[name]["iterations"] > before[name] + 10, "both go on")
    assert all(job.poll() is None for job in jobs)


def test_a_signal_that_raises_in_the_script_leaves_nobody_in_a_lane_that_was_passed_on(serve):
    service = serve(*ROUND_ROBIN)
    jobs = [
        start(service, name, 150, mode, pause_s=0.001)
        for name, mode in (("a", "raises"), ("b", "raises"), ("c", "works"))
    ]
    go(service, *"abc")
    found = told(*jobs)
    assert never_two_at_once(found) > 100
    assert found[0]["passed"] > 20, "or nothing was shown"


def test_weights_count_where_most_of_the_work_is_done_after_the_boundary(serve):
    service = serve("--policy", "fair", "--capacity", "520MiB")
    weights = {"a": 1, "b": 2, "c": 4}
    jobs = [
        start(service, name, 100_000, "works", seconds=0.002, pause_s=0.023, weight=weight)
        for name, weight in weights.items()
    ]
    go(service, *weights)
    eventually(lambda: service.jobs()["a"]["iterations"] > 5, "all run")
    before = {name: row["iterations"] for name, row in service.jobs().items()}
    eventually(lambda: service.jobs()["a"]["iterations"] >= before["a"] + 30, "a while has passed")
    parts = {name: row["iterations"] - before[name] for name, row in service.jobs().items()}
    for name, weight in weights.items():
        assert abs(parts[name] / sum(parts.values()) * 7 / weight - 1) < 0.15, parts
    assert all(job.poll() is None for job in jobs)


def test_jobs_are_killed_at_any_moment_and_the_others_go_on(serve):
    service = serve(*ROUND_ROBIN)
    before = service.descriptors()
    rng = random.Random(11)
    survivors = [start(service, name, 250) for name in "ab"]
    victims = [start(service, f"v{number}", 100_000) for number in range(8)]
    go(service, "a", "b", *(f"v{number}" for number in range(8)))
    for number in rng.sample(range(8), 8):
        time.sleep(rng.random() * 0.1)
        os.kill(service.jobs()[f"v{number}"]["pid"], rng.choice((signal.SIGKILL, signal.SIGTERM)))
    never_two_at_once(told(*survivors))
    for victim in victims:
        victim.communicate(timeout=20)
    eventually(lambda: service.descriptors() <= before + 1, "no descriptor is left")


def test_a_giver_that_is_stopped_keeps_its_lease_and_its_heir_goes_on_when_it_is_dead(serve):
    service = serve(*ROUND_ROBIN, "--stuck-after", "0.5s")
    jobs = [start(service, name, 100_000) for name in "ab"]
    go(service, *"ab")
    eventually(lambda: service.jobs()["a"]["iterations"] > 20, "it runs")
    pid = stop_while_it_holds(service, "a")
    rests = service.jobs()["b"]["iterations"]
    time.sleep(0.1)
    assert service.jobs()["b"]["iterations"] <= rests + 1
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: service.jobs()["b"]["iterations"] > rests + 20, "the other one goes on")
    jobs[0].communicate(timeout=20)


def test_the_service_is_killed_while_leases_are_passed(serve):
    service = serve(*ROUND_ROBIN)
    jobs = [start(service, name, 400) for name in "abc"]
    go(service, *"abc")
    rng = random.Random(3)
    for _ in range(4):
        eventually(lambda: all(row["iterations"] > 5 for row in service.jobs().values()), "all run")
        time.sleep(rng.random() * 0.1)
        service.kill()
        service.start()
    never_two_at_once(told(*jobs))
