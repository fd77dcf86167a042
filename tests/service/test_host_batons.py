"""On the host device, without an arena, the lease goes straight from job to job too."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

from tests.memory.test_batons import never_two_at_once, told
from tests.service.harness import SOURCE, Service, eventually

JOB = """
import json, os, sys, time
sys.path.insert(0, {source!r})
from salus.client.lease import of_this_process
lease = of_this_process()
passed, times = 0, []
pass_on = lease._pass_on
def counted(*args):
    global passed
    done = pass_on(*args)
    passed += done
    return done
lease._pass_on = counted
for _ in range(int(sys.argv[1])):
    lease.begin()
    began = time.monotonic_ns()
    time.sleep(float(sys.argv[2]))
    times.append((began, time.monotonic_ns()))
    lease.end()
    time.sleep(float(sys.argv[3]))
print(json.dumps({{"times": times, "passed": passed}}))
"""
ONE_LANE = ("--policy", "rr", "--quantum", "0", "--capacity", "520MiB")


def start(
    service: Service, name: str, count: int, seconds: float = 0.002, pause_s: float = 0.0
) -> subprocess.Popen[str]:
    script = service.folder / "job.py"
    script.write_text(JOB.format(source=str(SOURCE)))
    command = [sys.executable, str(script), str(count), str(seconds), str(pause_s)]
    return service.salus_in_background("run", "--name", name, "--ephemeral", "400MiB", "--", *command)


def test_three_pass_the_lease_around_and_the_journal_says_the_same(serve):
    service = serve(*ONE_LANE)
    found = told(*[start(service, name, 150) for name in "abc"])
    switches = never_two_at_once(found)
    assert switches > 100 and sum(one["passed"] for one in found) > switches / 2, "mostly by themselves"
    done = service.salus("replay", str(service.journals()[0]))
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_that_comes_late_to_what_it_was_promised_does_not_hold_the_others_up(serve):
    service = serve(*ONE_LANE)
    found = told(start(service, "slow", 20, pause_s=0.05), *[start(service, name, 150) for name in "ab"])
    never_two_at_once(found)


def test_jobs_are_killed_and_stopped_at_any_moment_and_the_others_go_on(serve):
    service = serve(*ONE_LANE, "--stuck-after", "0.5s")
    before = service.descriptors()
    rng = random.Random(7)
    survivors = [start(service, name, 400) for name in "ab"]
    victims = [start(service, f"v{number}", 100_000) for number in range(6)]
    for number in range(6):
        eventually(lambda number=number: service.jobs().get(f"v{number}", {}).get("iterations"), "it runs")
    for number in range(6):
        pid = service.jobs()[f"v{number}"]["pid"]
        if number % 2:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(rng.random() * 0.1)
        os.kill(pid, signal.SIGKILL)
    never_two_at_once(told(*survivors))
    for victim in victims:
        victim.communicate(timeout=20)
    eventually(lambda: service.descriptors() <= before + 1, "no descriptor is left")


def test_the_service_is_killed_while_leases_are_passed(serve):
    service = serve(*ONE_LANE)
    jobs = [start(service, name, 1000) for name in "abc"]
    rng = random.Random(3)
    for _ in range(3):
        eventually(
            lambda: len(service.jobs()) == 3 and all(r["iterations"] > 5 for r in service.jobs().values()), "all"
        )
        time.sleep(rng.random() * 0.1)
        service.kill()
        service.start()
    never_two_at_once(told(*jobs))


def test_where_one_of_the_lane_is_stopped_the_others_go_to_another_lane(serve):
    """Also the one that would have been next."""
    service = serve("--policy", "pack", "--capacity", "850MiB", "--stuck-after", "0.5s")
    running = []
    for name in ("stopped", "filler"):
        running.append(start(service, name, 100_000))
        eventually(lambda name=name: service.jobs().get(name, {}).get("iterations", 0) > 5, "it runs")
    others = [start(service, name, 50) for name in "cd"]
    eventually(lambda: sum(bool(row["pid"]) for row in service.jobs().values()) == 4, "all are there")
    os.kill(service.jobs()["stopped"]["pid"], signal.SIGSTOP)
    eventually(lambda: service.jobs()["stopped"]["state"] == "stopped", "it is seen")
    service.salus("cancel", service.jobs()["filler"]["id"])
    told(*others)
    os.kill(service.jobs()["stopped"]["pid"], signal.SIGKILL)
    for job in running:
        job.communicate(timeout=20)
