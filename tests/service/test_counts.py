"""What a job did is known also where no service was there at its end: `ps --all` shows its real counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from salus.client.counts import Counts, publish
from salus.protocol.page import JobState, Page, Word
from tests.service.harness import Service, eventually

MS = 1_000_000


@pytest.fixture
def service(serve) -> Service:
    made: Service = serve(start=False)
    made.environment["SALUS_RECONNECT_S"] = "0.3"
    made.start()
    return made


def over(service: Service, job: subprocess.Popen[str], status: int = 0) -> dict[str, Any]:
    """What `ps --all` says of the only job there was."""
    _, errors = job.communicate(timeout=100)
    assert job.returncode == status, errors
    (row,) = json.loads(service.salus("ps", "--all", "--json").stdout)
    return row


def begun(service: Service, more: int = 20) -> int:
    rows = service.jobs()
    return rows["a"]["iterations"] if rows and rows["a"]["iterations"] > more else 0


def test_a_job_that_ended_after_its_service_was_killed_has_its_real_counts(service):
    job = service.job("--name", "a", iterations=300, seconds=0.01)
    eventually(lambda: begun(service), "it runs")
    service.kill()
    row = over(service, job)
    assert (row["state"], row["iterations"]) == ("done", 300)
    assert row["gpu_time_s"] >= 2.9 and row["ran_s"] >= 2.9


def test_a_job_that_ended_after_its_service_was_stopped_has_its_real_counts(service):
    job = service.job("--name", "a", iterations=300, seconds=0.01)
    eventually(lambda: begun(service), "it runs")
    service.process.terminate()
    service.process.communicate()
    row = over(service, job)
    assert (row["state"], row["iterations"]) == ("done", 300)
    assert row["gpu_time_s"] >= 2.9


def test_a_job_that_ended_between_two_services_has_its_real_counts(serve):
    service = serve()
    job = service.job("--name", "a", iterations=100, seconds=0.01)
    eventually(lambda: begun(service), "it runs")
    process = service.jobs()["a"]["pid"]
    service.kill()
    eventually(
        lambda: not Path(f"/proc/{process}/fd").exists() or not os.listdir(f"/proc/{process}/fd"), "it has ended"
    )
    service.start()
    row = over(service, job)
    assert (row["state"], row["iterations"]) == ("done", 100)
    assert row["gpu_time_s"] >= 0.95


def test_a_job_that_ends_before_it_gives_up_on_its_killed_service_has_its_real_counts(serve):
    service = serve()
    job = service.job("--name", "a", iterations=100, seconds=0.01)
    eventually(lambda: begun(service), "it runs")
    service.kill()
    assert over(service, job)["iterations"] == 100


def test_a_job_whose_process_was_killed_has_the_counts_that_it_showed_last(service):
    job = service.job("--name", "a", iterations=100_000, seconds=0.002)
    before = eventually(lambda: begun(service), "it runs")
    (pid,) = [row["pid"] for row in service.jobs().values()]
    service.kill()
    said = job.stderr.readline()
    assert "goes on unmanaged" in said, said
    eventually(lambda: cpu_ticks(pid) > 150, "it computes on")
    os.kill(pid, 9)
    row = over(service, job, 128 + 9)
    assert row["state"] == "failed" and row["iterations"] > before


def cpu_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[11])


def test_counts_of_two_services_that_were_killed_are_one_sum(service):
    service.environment["SALUS_RECONNECT_S"] = "30"
    job = service.job("--name", "a", iterations=400, seconds=0.01)
    before = eventually(lambda: begun(service), "it runs")
    service.kill()
    service.start()
    eventually(lambda: begun(service, before + 20), "it is back")
    service.kill()
    row = over(service, job)
    assert row["iterations"] == 400
    assert row["gpu_time_s"] >= 3.9


def test_processes_that_a_job_had_one_after_the_other_are_counted_together(service):
    command = f"{sys.executable} {service.job_file} 50 0.002 && {sys.executable} {service.job_file} 200 0.01"
    job = service.salus_in_background("run", "--name", "a", "--", "bash", "-c", command)
    eventually(lambda: begun(service, 60), "the second one runs")
    service.kill()
    row = over(service, job)
    assert row["iterations"] == 250
    assert row["gpu_time_s"] >= 2.0


# The page.


@pytest.fixture
def page():
    made, descriptor = Page.create()
    yield made, descriptor
    made.close()


def test_time_that_was_not_shared_out_yet_is_the_job_s_own(page):
    made, descriptor = page
    words = made.words
    words[Word.ITERATIONS], words[Word.BUSY_NS] = 7, 100 * MS
    words[Word.ATTAINED_NS], words[Word.NOTED_NS] = 30 * MS, 60 * MS
    counts = Counts.on([descriptor], 3, 1000 * MS)
    assert counts is not None
    assert counts.now() == {"iterations": 10, "gpu_time_s": 0.07, "ran_s": 1.1}


def test_a_page_that_is_none_is_no_reason_to_fail():
    reading, writing = os.pipe()
    assert Counts.on([reading, writing], 0, 0) is None
    assert Counts.on([], 0, 0) is None
    with pytest.raises(OSError, match="Bad file"):
        os.close(reading)


def test_an_unmanaged_process_shows_its_counts_and_nothing_else(page):
    made, descriptor = page
    os.close(descriptor)
    made.words[Word.STATE], made.words[Word.BEGAN_NS] = JobState.ITERATING, 1
    made.words[Word.REVOKE] = 1
    counted = memoryview(bytearray(4096)).cast("Q")
    counted[Word.ITERATIONS], counted[Word.BUSY_NS], counted[Word.STATE] = 9, 50 * MS, JobState.BETWEEN
    publish(counted, made.words)
    assert made.used(10**18) == (9, 50 * MS)
    assert made.words[Word.REVOKE] == 1
