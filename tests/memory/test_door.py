"""A process waits for memory before it makes its context on a GPU; the contexts here are made up (`with_nvml`)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.memory.test_lanes_across_processes import JOB
from tests.service.harness import SOURCE, Service, eventually, finish

CONTEXT_MIB = 512


@pytest.fixture
def serve_with(serve, monkeypatch) -> Callable[[str], Service]:
    monkeypatch.setenv("SALUS_TEST_CONTEXT_MIB", str(CONTEXT_MIB))
    return lambda capacity: serve("--policy", "fifo", "--capacity", capacity, module="tests.service.with_nvml")


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
    service = serve_with("2000MiB")
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
