"""A process waits for memory before it makes its context on a GPU; the contexts here are made up (`with_nvml`)."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from salus.client.connection import ServiceConnection
from salus.protocol import messages as msg
from tests.memory.test_lanes_across_processes import JOB
from tests.service.harness import SOURCE, Service, eventually, finish

CONTEXT_MIB = 512


@pytest.fixture
def serve_with(serve) -> Callable[[str], Service]:
    def start(capacity: str) -> Service:
        options = ("--policy", "fifo", "--capacity", capacity)
        service = serve(*options, module="tests.service.with_nvml", start=False)
        service.environment["SALUS_TEST_CONTEXT_MIB"] = str(CONTEXT_MIB)
        service.start()
        return service

    return start


@pytest.fixture
def service(serve_with) -> Service:
    """Room for one job, with its context, and for no other context beside it."""
    return serve_with("1300MiB")


def start(service: Service, name: str, iterations: int = 20) -> tuple[subprocess.Popen[str], Path]:
    """And the file that it waits for before it trains."""
    go = service.folder / f"go-{name}"
    command = [sys.executable, str(JOB.parent / "training_job.py"), str(SOURCE), str(go), "8", "4", str(iterations)]
    sizes = ("--persistent", "400MiB", "--ephemeral", "200MiB")
    return service.salus_in_background("run", "--name", name, *sizes, "--", *command), go


def line_of(process: subprocess.Popen[str]) -> str:
    """The next one that it says, or less if nothing comes. (What a file object has read ahead, select misses.)"""
    assert process.stdout is not None
    descriptor, line = process.stdout.fileno(), b""
    while not line.endswith(b"\n") and select.select([descriptor], [], [], 20)[0]:
        byte = os.read(descriptor, 1)
        if not byte:
            break
        line += byte
    return line.decode().strip()


def is_there(service: Service, name: str) -> bool:
    row = service.jobs().get(name)
    return row is not None and bool(row["pid"])


def has_been_let_in(service: Service, name: str) -> bool:
    """Then its process has mapped the page that it shares with the service."""
    pid = service.jobs()[name]["pid"]
    return "/memfd:salus" in Path(f"/proc/{pid}/maps").read_text()


def test_the_context_of_one_that_waits_is_not_made_before_it_has_memory(service):
    first, go = start(service, "first")
    eventually(lambda: is_there(service, "first"), "the first is there")
    second, go_too = start(service, "second")
    eventually(lambda: is_there(service, "second"), "the second waits")
    row = service.jobs()["second"]
    assert row["state"] == "waiting" and row["position"] == 1
    assert has_been_let_in(service, "first") and not has_been_let_in(service, "second")
    go_too.touch()
    go.touch()
    finish(first, second)
    assert {row["iterations"] for row in service.jobs().values()} == {20}


def test_where_there_is_room_for_it_the_context_is_made_while_the_job_waits_for_memory(serve_with):
    service = serve_with("1750MiB")
    first, go = start(service, "first")
    eventually(lambda: is_there(service, "first"), "the first is there")
    second, go_too = start(service, "second")
    eventually(lambda: is_there(service, "second") and has_been_let_in(service, "second"), "the second is let in")
    assert service.jobs()["second"]["state"] == "waiting"
    third, go_third = start(service, "third")
    eventually(lambda: is_there(service, "third"), "the third waits")
    assert not has_been_let_in(service, "third"), "with its context nobody could run"
    for file in (go, go_too, go_third):
        file.touch()
    finish(first, second, third)


def test_one_that_is_killed_at_the_door_is_gone_and_in_nobodys_way(service):
    first, go = start(service, "first")
    eventually(lambda: is_there(service, "first"), "the first is there")
    second, _ = start(service, "second")
    third, go_third = start(service, "third")
    eventually(lambda: is_there(service, "second") and is_there(service, "third"), "both wait")
    service.salus("cancel", service.jobs()["second"]["id"])
    assert second.wait(timeout=20) == 143
    go_third.touch()
    go.touch()
    finish(first, third)


def test_a_service_that_is_started_again_finds_who_waits_at_the_door(service):
    first, go = start(service, "first", 40)
    eventually(lambda: is_there(service, "first"), "the first is there")
    second, go_too = start(service, "second")
    eventually(lambda: is_there(service, "second"), "the second waits")
    service.kill()
    service.start()
    eventually(lambda: is_there(service, "first") and is_there(service, "second"), "both are back")
    assert service.jobs()["second"]["state"] == "waiting"
    go_too.touch()
    go.touch()
    finish(first, second)


def test_a_service_that_ends_says_so_to_who_waits_at_the_door(service):
    _, go = start(service, "first")
    eventually(lambda: is_there(service, "first"), "the first is there")
    second, _ = start(service, "second")
    eventually(lambda: is_there(service, "second"), "the second waits")
    assert service.process is not None
    service.process.terminate()
    _, errors = second.communicate(timeout=30)
    assert "the service" in errors and "unpack" not in errors
    go.touch()


INTERRUPTED = """
import signal, sys
sys.path[:0] = sys.argv[1:3]
from host_memory import HostMemory
from salus.client.lease import of_this_process

def stop(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, stop)
signal.alarm(1)
lease = of_this_process()
try:
    lease.attach(HostMemory())
except KeyboardInterrupt as error:
    kept = error  # as a notebook does
print("interrupted", flush=True)
print("attached" if lease.attach(HostMemory()) else "unmanaged", flush=True)
"""


def test_one_that_was_interrupted_at_the_door_may_ask_again(service):
    first, go = start(service, "first")
    eventually(lambda: is_there(service, "first"), "the first is there")
    command = [sys.executable, "-c", INTERRUPTED, str(SOURCE), str(JOB.parent)]
    sizes = ("--persistent", "400MiB", "--ephemeral", "200MiB")
    second = service.salus_in_background("run", "--name", "second", *sizes, "--", *command)
    assert line_of(second) == "interrupted"
    go.touch()
    output, errors = second.communicate(timeout=30)
    assert output == "attached\n", errors
    finish(first)


def registered(service: Service, name: str, persistent_mib: int) -> tuple[ServiceConnection, msg.Registered]:
    connection = ServiceConnection(service.socket)
    asked = msg.Register(name, ["x", name], "/", persistent_bytes=persistent_mib << 20, ephemeral_bytes=0)
    return connection, connection.request(asked)


AT_THE_DOOR = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from salus.client.connection import ServiceConnection
from salus.errors import SalusError
from salus.protocol import messages as msg

connection = ServiceConnection(Path(sys.argv[2]), None)
connection.send(msg.Attach(sys.argv[3], sys.argv[4], arena=True))
print("asked", flush=True)
try:
    connection.receive()
    print("let in", flush=True)
except SalusError as error:
    print(error, flush=True)
if "hangs up" in sys.stdin.readline():
    connection.close()
    print("hung up", flush=True)
sys.stdin.readline()
"""


def at_the_door(service: Service, job: msg.Registered) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", AT_THE_DOOR, str(SOURCE), str(service.socket), job.job_id, job.token]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    service.started.append(process)
    assert line_of(process) == "asked"
    return process


def test_nothing_is_left_of_a_job_that_ends_just_when_it_is_let_in(service):
    assert service.process is not None
    before = 0
    for number in range(6):
        first, _ = registered(service, f"first{number}", 700)
        second, job = registered(service, f"second{number}", 700)
        process = at_the_door(service, job)
        eventually(lambda name=f"second{number}": is_there(service, name), "it waits")
        # Both at once: the one ends, so that the other would be let in, and that one ends.
        os.kill(service.process.pid, signal.SIGSTOP)
        for launcher in (first, second):
            launcher.send(msg.Finished(0))
        os.kill(service.process.pid, signal.SIGCONT)
        for launcher in (first, second):
            # (A connection that was not told to wait for ever gives up after ten seconds.)
            while not isinstance(launcher.receive()[0], msg.Done):
                pass
            launcher.close()
        process.kill()
        process.wait()
        before = before or service.descriptors()
    eventually(lambda: service.descriptors() <= before + 2, "its descriptors are closed")


def test_another_process_of_a_job_is_told_that_one_uses_the_device_and_not_kept_waiting(serve_with):
    service = serve_with("2100MiB")
    launcher, _ = registered(service, "large", 1000)
    other, job = registered(service, "other", 700)
    first = at_the_door(service, job)
    assert line_of(first) == "let in"
    assert service.jobs()["other"]["state"] == "waiting"
    assert first.stdin is not None
    first.stdin.write("hangs up\n")
    first.stdin.flush()
    assert line_of(first) == "hung up"
    second = at_the_door(service, job)
    assert "from another process already" in line_of(second)
    for process in (first, second):
        process.kill()
    for connection in (launcher, other):
        connection.close()
