"""Arenas that lie, break or let go of their connection: they hurt themselves alone."""

from __future__ import annotations

import array
import contextlib
import os
import signal
import socket
import sys
import time

import pytest

from salus.client.connection import ServiceConnection
from salus.protocol import messages as msg
from salus.protocol import slots
from salus.protocol.slots import Kind, Record
from tests.memory.test_lanes_across_processes import JOB, finish, start
from tests.service.harness import SOURCE, eventually

MEMORY = ("--persistent", "100MiB", "--ephemeral", "200MiB")
QUITTER = """
import os, sys, time
sys.path[:0] = [{source!r}, os.path.dirname({job!r})]
open({pid_file!r}, "w").write(str(os.getpid()))
sys.argv = ["x", {source!r}, "quitter", "0", "1", "/"]
exec(open({job!r}).read().split("def main")[0])
lease, memory = of_this_process(), HostMemory()
lease.attach(memory)
lease.begin()
block = Block(memory.arena, "lane", 2 * MIB, 7)
lease._connection.close()
time.sleep(600)
"""

CUT_OFF = """
import os, sys, threading, time
sys.path[:0] = [{source!r}, os.path.dirname({job!r})]
sys.argv = ["x", {source!r}, "cut off", "0", "1", "/"]
exec(open({job!r}).read().split("def main")[0])
lease, memory = of_this_process(), HostMemory()
lease.attach(memory)
def break_the_protocol():
    time.sleep(0.5)
    lease._connection.send(msg.Finished(0))
threading.Thread(target=break_the_protocol).start()
Block(memory.arena, "private", 200 * MIB, 7)
print("finished")
"""


def attach(service) -> tuple[ServiceConnection, ServiceConnection, socket.socket]:
    """A job with an arena, played here: its launcher, its process's connection and its channel."""
    launcher, worker = service.connect(), service.connect()
    job = launcher.request(msg.Register("played", ["x"], "/", persistent_bytes=1 << 20, ephemeral_bytes=4 << 20))
    worker.send(msg.Attach(job.job_id, job.token, arena=True))
    _, descriptors = worker.receive()
    page, event, channel, *batons = descriptors
    for descriptor in (page, event, *batons):
        os.close(descriptor)
    return launcher, worker, socket.socket(fileno=channel)


@pytest.mark.parametrize(
    "packet",
    [
        b"nonsense",
        b"\0" * 1000,
        slots.pack([Record(99)]),
        slots.pack([Record(Kind.PUBLISH, 0)]),
        slots.pack([Record(Kind.PUBLISH, 1 << 31)]),
        slots.pack([Record(Kind.TAKE, 5)]),
        slots.pack([Record(Kind.WANT, 0, 1 << 63, 1 << 63)]),
        slots.pack([Record(Kind.LEFT, 0, 0, 12345)]),
        slots.pack([Record(Kind.DROP, 77)] * slots.MOST_RECORDS),
    ],
)
def test_whatever_comes_on_the_channel_the_service_and_its_other_jobs_go_on(serve, packet):
    service = serve("--capacity", "520MiB")
    launcher, worker, channel = attach(service)
    before = service.descriptors()
    channel.send(packet)
    extra = os.open("/dev/null", os.O_RDONLY)
    with contextlib.suppress(BrokenPipeError):  # the service may have hung up by now
        channel.sendmsg(
            [slots.pack([Record(Kind.DROP, 1)])], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [extra]))]
        )
    os.close(extra)
    (service.folder / "go").touch()
    finish(service, start(service, "other", 30, 2, *MEMORY))
    eventually(lambda: service.descriptors() <= before + 1, "nothing it sent is kept")
    assert service.status()["policy"] == "fair"
    for end in (channel, worker, launcher):
        end.close()


def test_a_process_that_lost_its_connection_keeps_its_lane_until_it_is_dead(serve, tmp_path):
    service = serve("--policy", "rr", "--quantum", "0", "--capacity", "520MiB")
    script = tmp_path / "quitter.py"
    job = os.path.join(os.path.dirname(__file__), "arena_job.py")
    pid_file = tmp_path / "pid"
    script.write_text(QUITTER.format(source=str(SOURCE), job=job, pid_file=str(pid_file)))
    service.salus_in_background("run", "--name", "quitter", *MEMORY, "--", sys.executable, str(script))
    service.when("quitter", "running")
    (service.folder / "go").touch()
    filler = start(service, "filler", 30, 3, "--persistent", "50MiB", "--ephemeral", "200MiB")
    eventually(lambda: service.jobs()["quitter"]["pid"] is None, "its connection is gone")
    service.when("filler", "ready")
    time.sleep(0.5)
    assert service.jobs()["filler"]["iterations"] == 0, "the lane may still be in use"
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    finish(service, filler)


def test_a_job_that_is_cut_off_while_it_waits_for_memory_goes_on_unmanaged(serve):
    """It waits on a channel that the service keeps open as long as the job lives."""
    service = serve("--capacity", "256MiB", "--host-memory", "0")
    other = start(service, "other", 1, 2, "--persistent", "100MiB", "--ephemeral", "90MiB")
    eventually(lambda: service.jobs().get("other", {}).get("pid"), "the other job has its memory")
    cut_off = CUT_OFF.format(source=str(SOURCE), job=str(JOB))
    job = service.salus_in_background("run", "--", sys.executable, "-c", cut_off)
    output, errors = job.communicate(timeout=30)
    assert job.returncode == 0 and output == "finished\n", errors
    assert "unmanaged" in errors
    finish(service, other)
