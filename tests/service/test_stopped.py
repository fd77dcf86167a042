"""A job that is stopped, as by Ctrl-Z, holds nobody up."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import Any

from salus import processes
from tests.memory.test_batons import never_two_at_once, told
from tests.memory.test_batons import start as start_with_arena
from tests.service.harness import Service, eventually, finish
from tests.service.test_commands import on_a_terminal
from tests.service.test_host_batons import start as start_counting

ONE_LANE = ("--policy", "rr", "--quantum", "5ms", "--capacity", "1000MiB", "--stuck-after", "0s")
"""Nobody is found stuck for being silent."""
LARGE = ("--ephemeral", "600MiB")


def iterates(service: Service, *names: str) -> None:
    for name in names:
        eventually(lambda name=name: service.jobs().get(name, {}).get("iterations", 0) > 5, f"{name} runs")


def stop(service: Service, name: str) -> int:
    pid: int = service.jobs()[name]["pid"]
    os.kill(pid, signal.SIGSTOP)
    return pid


def is_stopped(pid: int) -> bool:
    process = processes.look_at(pid)
    return process is not None and process.state == processes.STOPPED


def stop_while_it_holds(service: Service, name: str) -> int:
    for _ in range(100):
        pid = stop(service, name)
        eventually(lambda pid=pid: is_stopped(pid), "it is stopped")
        if holder(service) == service.jobs()[name]["id"]:
            return pid
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.003)
    raise AssertionError(f"{name} never held the lease")


def holder(service: Service) -> str | None:
    lanes: list[dict[str, Any]] = service.status()["lanes"]
    return next((lane["holder"] for lane in lanes if lane["holder"] is not None), None)


def test_a_stopped_job_loses_its_lease_to_its_neighbour_and_goes_on_later_where_it_was(serve):
    service = serve(*ONE_LANE)
    jobs = {name: service.job("--name", name, *LARGE, iterations=400, seconds=0.004) for name in ("stopped", "other")}
    iterates(service, *jobs)
    pid = stop_while_it_holds(service, "stopped")
    assert service.jobs()["stopped"]["state"] == "stopped", "ps agrees at once"
    assert "stopped, as by Ctrl-Z" in service.jobs()["stopped"]["wait_reason"]
    finish(jobs["other"])
    assert is_stopped(pid), "its neighbour did not wait for it"
    os.kill(pid, signal.SIGCONT)
    finish(jobs["stopped"])
    assert [service.jobs()[name]["iterations"] for name in jobs] == [400, 400]
    done = service.salus("replay", str(service.journals()[0]))
    assert done.returncode == 0, done.stdout + done.stderr


def test_ctrl_z_at_salus_run_holds_no_other_job_up(serve):
    service = serve(*ONE_LANE)
    command = [sys.executable, str(service.job_file), "100000", "0.004"]
    run, terminal = on_a_terminal(service, "run", "--name", "stopped", *LARGE, "--", *command)
    iterates(service, "stopped")
    os.write(terminal, b"\x1a")
    eventually(lambda: service.jobs()["stopped"]["state"] == "stopped", "ps says so")
    finish(service.job("--name", "other", *LARGE, iterations=50, seconds=0.002))
    assert service.salus("cancel", "--force", service.jobs()["stopped"]["id"]).returncode == 0
    run.wait(timeout=20)
    os.close(terminal)
    assert service.jobs()["stopped"]["state"] == "cancelled"


def test_where_the_holder_and_the_next_one_are_stopped_a_third_goes_on(serve):
    service = serve(*ONE_LANE)
    names = [f"s{number}" for number in range(3)]
    stopped = [service.job("--name", name, *LARGE, iterations=300, seconds=0.002) for name in names]
    third = service.job("--name", "third", *LARGE, iterations=300, seconds=0.002)
    iterates(service, *names, "third")
    pids = [stop(service, name) for name in names]
    finish(third)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    finish(*stopped)
    assert {row["iterations"] for row in service.jobs().values()} == {300}


def test_jobs_that_are_stopped_and_continued_at_any_moment_lose_no_iteration(serve):
    service = serve("--policy", "rr", "--quantum", "0", "--capacity", "520MiB", "--stuck-after", "0s")
    rng = random.Random(5)
    names = [f"j{number}" for number in range(4)]
    jobs = [start_counting(service, name, 1500) for name in names]
    iterates(service, *names)
    for _ in range(6):
        pids = [pid for pid in (service.jobs()[name]["pid"] for name in rng.sample(names, 2)) if pid]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(rng.random())
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        time.sleep(rng.random() * 0.2)
    told(*jobs)
    assert [service.jobs()[name]["iterations"] for name in names] == [1500] * 4


def test_with_memory_in_the_lane_nobody_runs_beside_a_stopped_job_and_is_told_whom_it_waits_for(serve):
    service = serve("--policy", "rr", "--quantum", "0", "--capacity", "520MiB", "--stuck-after", "0s")
    stopped = start_with_arena(service, "stopped", 200)
    other = start_with_arena(service, "other", 400)
    for name in ("stopped", "other"):
        eventually(lambda name=name: service.jobs().get(name, {}).get("pid"), f"{name} is attached")
    (service.folder / "go").touch()
    iterates(service, "stopped", "other")
    pid = stop_while_it_holds(service, "stopped")
    rows = service.jobs()
    why = f"waits for job {rows['stopped']['id']}, which is stopped (Ctrl-Z)"
    eventually(lambda: why in (service.jobs()["other"]["wait_reason"] or ""), "ps says whom it waits for")
    before = service.jobs()["other"]["iterations"]
    time.sleep(1.0)
    assert service.jobs()["other"]["iterations"] == before, "it may go on at any moment"
    os.kill(pid, signal.SIGCONT)
    found = []
    for job in (stopped, other):
        output, errors = job.communicate(timeout=60)
        assert job.returncode == 0, errors
        found.append((output, errors))
    assert f"job {rows['other']['id']} {why}" in found[1][1]
    assert found[0][1].count("which is stopped") == 0


def test_a_stopped_job_with_memory_in_the_lane_is_cancelled_and_the_next_one_runs(serve):
    service = serve("--policy", "rr", "--quantum", "0", "--capacity", "520MiB", "--stuck-after", "0s")
    stopped = start_with_arena(service, "stopped", 100_000)
    other = start_with_arena(service, "other", 100)
    for name in ("stopped", "other"):
        eventually(lambda name=name: service.jobs().get(name, {}).get("pid"), f"{name} is attached")
    (service.folder / "go").touch()
    iterates(service, "stopped")
    stop_while_it_holds(service, "stopped")
    assert service.salus("cancel", service.jobs()["stopped"]["id"]).returncode == 0
    never_two_at_once(told(other))
    stopped.wait(timeout=20)
