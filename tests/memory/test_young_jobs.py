"""Jobs that wait for memory before their first iteration: a lease comes for which they have not asked.

Whoever waits for its first memory is held to want the device, so that room is made for it; with its memory it gets a
lease, which it fetches when it comes to iterate. Meanwhile it may want yet more, and be paged out with that lease.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from salus.service.replay import lines
from tests.memory.test_hostile import CUT_OFF
from tests.memory.test_lanes_across_processes import JOB, finish, start
from tests.service.harness import SOURCE, Service, eventually

BEGINNING = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[1])
from host_memory import MIB, HostMemory
from salus.client.lease import of_this_process
from salus.protocol.page import Word
lease, memory = of_this_process(), HostMemory()
"""
FILLS = """
assert lease.attach(memory)
memory.arena.alloc("private", 280 * MIB)
while not os.path.exists(sys.argv[2]):
    threading.Event().wait(0.02)
print("finished")
"""
YOUNG = """
assert lease.attach(memory)
memory.arena.alloc("private", 16 * MIB)
memory.arena.alloc("private", 60 * MIB)  # more than it declared
lease.begin()
lease.end()
print("finished")
"""
GIVEN_UP = """
told, looks, look = threading.Event(), [], lease._wait_for_device
def slow_look():
    if lease._words[Word.CONTENDED]:
        looks.append(1)
        if len(looks) == 2:  # in a moment the helper gives up the lease that nobody fetched
            told.set()
            time.sleep(float(sys.argv[2]))
    look()
lease._wait_for_device = slow_look
assert lease.attach(memory)
memory.arena.alloc("private", 16 * MIB)
told.wait()
memory.arena.alloc("private", 60 * MIB)
lease.begin()
lease.end()
print("finished")
"""


def start_script(service: Service, name: str, sizes: tuple[str, str], script: str, *arguments: str):
    memory = ("--persistent", sizes[0], "--ephemeral", sizes[1])
    command = [sys.executable, "-c", BEGINNING + script, str(JOB.parent), *arguments]
    return service.salus_in_background("run", "--name", name, *memory, "--", *command)


def came_back(service: Service, job_id: str) -> dict[str, Any] | None:
    """As what, since the service was last started."""
    events = [line["event"] for line in lines(service.journals()[-1])]
    back = (event for event in events if event["kind"] == "JobReturned" and event["job"]["job_id"] == job_id)
    return next(back, None)


@pytest.fixture
def full(serve):
    """A service with a job that leaves next to nothing free until the file `end` is there, and cannot be paged out."""
    service = serve(
        "--policy", "rr:patience=0.2", "--quantum", "5ms", "--capacity", "330MiB", "--host-memory", "100MiB"
    )  # fmt: skip
    start_script(service, "fills", ("280MiB", "45MiB"), FILLS, str(service.folder / "end"))
    eventually(lambda: service.jobs().get("fills", {}).get("persistent_bytes", 0) >= 280 << 20, "it is full")
    return service


@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_a_lease_that_comes_back_with_the_memory_is_fetched(full, restarts):
    young = start_script(full, "young", ("20MiB", "20MiB"), YOUNG)
    job_id = full.when("young", "paged-out")["id"]
    for _ in range(restarts):
        full.kill()
        full.start()
        eventually(lambda: full.jobs()["young"]["state"] != "returning", "it is back")
        returned = eventually(lambda: came_back(full, job_id), "that is in the journal")
        assert returned["footprint"]["persistent_bytes"] >= 76 << 20, "it comes back with what it waits for"
    (full.folder / "end").touch()
    output, errors = young.communicate(timeout=20)
    assert output == "finished\n", errors


@pytest.mark.parametrize("after_s", [0.01, 0.5])
def test_one_whose_helper_gives_that_lease_up_while_it_is_paged_out_gets_another(full, after_s):
    """Before or after it went: what is given up is the lease that it had, and not the one that comes next."""
    young = start_script(full, "young", ("20MiB", "20MiB"), GIVEN_UP, str(after_s))
    full.when("young", "running")
    full.job("--name", "other", "--persistent", "2MiB", "--ephemeral", "10MiB", iterations=3000, seconds=0.001)
    full.when("young", "paged-out")
    time.sleep(2 * after_s)
    (full.folder / "end").touch()
    output, errors = young.communicate(timeout=20)
    assert output == "finished\n" and "unmanaged" not in errors, errors


def test_one_that_is_cut_off_while_its_helper_waits_too_goes_on(serve):
    """The main thread waits for memory, and the helper for the main thread: neither would hear of it by itself."""
    service = serve("--capacity", "256MiB", "--host-memory", "0")
    other = start(service, "other", 1, 2, "--persistent", "100MiB", "--ephemeral", "90MiB")
    eventually(lambda: service.jobs().get("other", {}).get("pid"), "the other job has its memory")
    slow = """
class Slow(HostMemory):
    def listen(self):
        time.sleep(0.2)  # it comes after the main thread
        return super().listen()
lease, memory = of_this_process(), Slow()
"""
    script = CUT_OFF.format(source=str(SOURCE), job=str(JOB))
    assert "lease, memory = of_this_process(), HostMemory()" in script
    script = script.replace("lease, memory = of_this_process(), HostMemory()", slow)
    job = service.salus_in_background("run", "--", sys.executable, "-c", script)
    output, errors = job.communicate(timeout=30)
    assert job.returncode == 0 and output == "finished\n", errors
    finish(service, other)
