"""Who descends from whom, and signals that reach only the process they are meant for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from salus import processes
from tests.service.harness import eventually

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]
PARENT = [
    sys.executable,
    "-c",
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "time.sleep(600)",
]


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started = []

    def one(command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command, env={**os.environ, **environment}))
        return started[-1]

    yield one
    for process in started:
        # (Those that are apart, too.)
        for child in [one for one in processes.everything().values() if one.parent == process.pid]:
            processes.send(child, signal.SIGKILL)
        process.kill()
        process.wait()


def test_what_descends_from_a_process_is_listed_parents_first(start):
    parent = start(PARENT)
    (child,) = eventually(lambda: processes.below(parent.pid), "it has a child")
    assert child.parent == parent.pid
    ours = [process.pid for process in processes.below(os.getpid())]
    assert ours.index(parent.pid) < ours.index(child.pid)


def test_what_is_apart_is_not_listed_nor_what_it_starts(start):
    apart = start(PARENT, SALUS_APART="1")
    eventually(lambda: len([p for p in processes.everything().values() if p.parent == apart.pid]) == 1, "it is up")
    assert apart.pid not in [process.pid for process in processes.below(os.getpid())]
    assert processes.below(os.getpid()) == []


def test_the_processes_of_a_job_are_found_by_its_token_and_their_children_by_their_parents(start):
    parent = start(["env", "SALUS_TOKEN=secret", *PARENT])
    # The child has an environment of its own.
    orphan = start([sys.executable, "-c", "import os, sys; os.execve(sys.argv[1], sys.argv[1:], {})", *SLEEPS])
    found = eventually(lambda: (found := processes.of_job("secret")) and len(found) == 2 and found, "both are up")
    assert found[0].pid == parent.pid and found[1].parent == parent.pid
    also = processes.of_job("secret", processes.look_at(orphan.pid))
    assert {process.pid for process in also} == {*(process.pid for process in found), orphan.pid}
    assert processes.of_job("another") == []


def test_a_signal_reaches_no_process_that_was_given_the_number_later(start):
    process = start(SLEEPS)
    there = processes.look_at(process.pid)
    assert not processes.send(replace(there, began=there.began - 1), signal.SIGKILL)
    assert process.poll() is None
    assert processes.send(there, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not processes.send(there, signal.SIGKILL)


def test_a_process_that_has_ended_and_is_not_asked_about_is_none(start):
    process = start(SLEEPS)
    process.kill()
    eventually(lambda: processes.look_at(process.pid) is None, "it has ended")
    assert processes.began(process.pid) == 0


def test_only_what_is_stopped_is_resumed(start):
    process = start(SLEEPS)
    process.send_signal(signal.SIGSTOP)
    stopped = eventually(lambda: (p := processes.look_at(process.pid)).state == processes.STOPPED and p, "it stops")
    processes.resume(stopped)
    eventually(lambda: processes.look_at(process.pid).state != processes.STOPPED, "it goes on")
