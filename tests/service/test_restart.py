"""The service is killed and started again: it finds its jobs, and they go on."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from salus.protocol import messages as msg
from tests.memory.test_lanes_across_processes import JOB, SITS, start
from tests.service.harness import SOURCE, eventually, finish

HELPERS = str(JOB.parent)
MEMORY = ("--persistent", "100MiB", "--ephemeral", "200MiB")


def iterations(service) -> dict[str, int]:
    return {row["name"]: row["iterations"] for row in service.jobs().values()}


def test_jobs_come_back_with_their_names_their_counts_and_their_turns(serve):
    service = serve("--policy", "fair", "--quantum", "5ms")
    jobs = [service.job("--name", name, iterations=400, seconds=0.005) for name in ("a", "b", "c")]
    eventually(lambda: len(iterations(service)) == 3 and min(iterations(service).values()) > 30, "all of them run")
    before = iterations(service)
    ids = {row["name"]: row["id"] for row in service.jobs().values()}
    service.kill()
    service.start()
    eventually(lambda: all(row["state"] != "returning" for row in service.jobs().values()), "they are back")
    assert {row["name"]: row["id"] for row in service.jobs().values()} == ids
    assert all(iterations(service)[name] >= before[name] for name in before)
    new = service.job("--name", "new", iterations=10, seconds=0.001)
    finish(*jobs, new)
    rows = service.jobs()
    assert {name: row["iterations"] for name, row in rows.items()} == {"a": 400, "b": 400, "c": 400, "new": 10}
    assert all(row["exit_code"] == 0 for row in rows.values())
    assert rows["new"]["id"] not in ids.values()
    service.process.terminate()
    service.process.wait(timeout=10)
    replayed = service.salus("replay", str(service.journals()[-1]))
    assert replayed.returncode == 0, replayed.stderr


def test_whoever_holds_the_lease_does_not_even_pause(serve):
    service = serve()
    job = service.job("--name", "alone", iterations=400, seconds=0.005)
    eventually(lambda: iterations(service).get("alone", 0) > 30, "it runs")
    service.kill()
    time.sleep(0.5)
    service.start()
    eventually(lambda: iterations(service).get("alone", 0) > 30, "it is back")
    # About a hundred in the half second without a service; it is one process that waits for nobody.
    assert iterations(service)["alone"] > 60
    finish(job)


def test_while_there_is_no_service_nobody_but_the_holder_runs(serve):
    service = serve("--policy", "rr", "--quantum", "0")
    jobs = [service.job("--name", name, iterations=200, seconds=0.005) for name in ("a", "b")]
    eventually(lambda: len(iterations(service)) == 2 and min(iterations(service).values()) > 20, "both run")
    service.kill()
    time.sleep(0.2)
    assert all(job.poll() is None for job in jobs)
    service.start()
    finish(*jobs)


def test_a_job_that_ended_meanwhile_is_not_waited_for(serve):
    service = serve()
    job = service.job("--name", "short", iterations=60, seconds=0.005)
    eventually(lambda: iterations(service).get("short", 0) > 20, "it runs")
    service.kill()
    finish(job)
    service.start()
    eventually(lambda: service.status()["jobs"] == 0, "it is known to have ended", timeout_s=10)


def test_a_job_that_was_killed_meanwhile_is_gone(serve):
    service = serve()
    job = service.job("--name", "victim", iterations=10_000, seconds=0.005)
    eventually(lambda: iterations(service).get("victim", 0) > 20, "it runs")
    pid = service.jobs()["victim"]["pid"]
    service.kill()
    os.kill(pid, signal.SIGKILL)
    job.wait(timeout=10)
    service.start()
    eventually(lambda: service.status()["jobs"] == 0, "it is known to have ended", timeout_s=10)


def test_a_service_that_ends_on_purpose_leaves_nothing_to_come_back_to(serve):
    service = serve()
    job = service.job("--name", "free", iterations=300, seconds=0.005)
    eventually(lambda: iterations(service).get("free", 0) > 20, "it runs")
    service.process.terminate()
    service.process.wait(timeout=10)
    service.start()
    assert service.status()["jobs"] == 0
    finish(job)


def test_a_service_that_is_killed_again_while_they_come_back_is_waited_for_too(serve):
    service = serve("--policy", "rr", "--quantum", "0")
    jobs = [service.job("--name", name, iterations=300, seconds=0.005) for name in ("a", "b", "c")]
    eventually(lambda: len(iterations(service)) == 3 and min(iterations(service).values()) > 20, "all run")
    for pause_s in (0.0, 0.02, 0.05, 0.1):
        service.kill()
        service.start()
        time.sleep(pause_s)
    for job in jobs:
        errors = job.communicate(timeout=60)[1]
        assert job.returncode == 0 and "unmanaged" not in errors, errors
    eventually(lambda: service.status()["jobs"] == 0, "all have ended")


def test_one_that_was_stopped_comes_back_late(serve):
    service = serve("--policy", "rr", "--quantum", "0")
    jobs = [service.job("--name", name, iterations=300, seconds=0.005) for name in ("a", "b")]
    eventually(lambda: len(iterations(service)) == 2 and min(iterations(service).values()) > 20, "both run")
    pid = service.jobs()["a"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    service.kill()
    service.start()
    eventually(lambda: service.jobs()["b"]["iterations"] > 60, "the other one goes on without it")
    os.kill(pid, signal.SIGCONT)
    finish(*jobs)


@pytest.mark.parametrize("kills", [1, 3])
def test_memory_is_kept_through_restarts(serve, kills, monkeypatch):
    monkeypatch.setenv("ARENA_JOB_PRIVATE_MIB", "64")
    monkeypatch.setenv("ARENA_JOB_ITERATION_S", "0.005")
    service = serve("--policy", "rr", "--quantum", "0", "--capacity", "700MiB", "--host-memory", "2GiB")
    memory = ("--persistent", "110MiB", "--ephemeral", "120MiB")
    jobs = [start(service, f"j{seed}", 900, seed, *memory) for seed in (1, 2, 3)]
    for seed in (1, 2, 3):
        eventually(lambda seed=seed: service.jobs().get(f"j{seed}", {}).get("pid"), "it is attached")
    (service.folder / "go").touch()
    for number in range(kills):
        least = 20 * (number + 1)
        eventually(lambda least=least: min(iterations(service).values(), default=0) > least, "all of them run")
        service.kill()
        service.start()
    for job in jobs:
        errors = job.communicate(timeout=60)[1]
        assert job.returncode == 0, errors
        assert "unmanaged" not in errors
    eventually(lambda: service.status()["jobs"] == 0, "all have ended")
    status = service.status()
    assert status["free_bytes"] == status["capacity_bytes"]
    assert status["lane_chunks"] == 0


def test_an_import_of_torch_is_not_needed_to_come_back(serve):
    """The bare interpreter that has only the client."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import salus.client.again, salus.client.lease"
    service = serve(start=False)
    done = service.salus("run", "--", sys.executable, "-S", "-c", code, str(SOURCE))
    assert done.returncode == 0, done.stderr


def test_a_process_that_never_heard_that_it_is_attached_asks_again(serve):
    """The service was killed after it had written down who uses the device, and before its answer was read."""
    service = serve()
    with service.connect() as launcher, service.connect() as worker:
        job = launcher.request(msg.Register("x", ["x"], "/"))
        worker.send(msg.Attach(job.job_id, job.token))
        eventually(lambda: service.jobs()["x"]["pid"], "it is attached")
        # Before they are closed: the service would take that for the end of the job.
        service.kill()
    service.start()
    with service.connect() as worker:
        worker.send(msg.Attach(job.job_id, job.token))
        answer, descriptors = worker.receive()
        for descriptor in descriptors:
            os.close(descriptor)
        assert isinstance(answer, msg.Attached)


def test_one_that_waits_for_its_first_memory_comes_back_without_any(serve):
    service = serve("--policy", "fifo", "--capacity", "350MiB")
    jobs = [start(service, name, 20, seed, *MEMORY) for seed, name in enumerate("ab", 1)]
    eventually(lambda: len(rows := service.jobs()) == 2 and all(row["pid"] for row in rows.values()), "both are there")
    waits = [name for name, row in service.jobs().items() if row["state"] == "waiting"]
    assert len(waits) == 1
    free = service.status()["free_bytes"]
    service.kill()
    service.start()
    eventually(lambda: all(row["state"] != "returning" for row in service.jobs().values()), "they are back")
    assert service.status()["free_bytes"] == free and service.jobs()[waits[0]]["state"] == "waiting"
    (service.folder / "go").touch()
    finish(*jobs)


def test_what_is_on_the_host_is_known_however_often_the_service_is_killed(serve):
    service = serve("--policy", "fair", "--capacity", "400MiB", "--host-memory", "2GiB")
    service.salus_in_background("run", "--name", "sits", "--", sys.executable, "-c", SITS, HELPERS, "600")
    eventually(lambda: service.jobs().get("sits", {}).get("iterations"), "it has run")
    command = [sys.executable, f"{HELPERS}/growing_job.py", str(SOURCE), "14", "0"]
    loads = service.salus_in_background("run", "--name", "loads", "--", *command)
    eventually(lambda: service.jobs()["sits"]["paged_out_bytes"], "room is made for the other")
    finish(loads)
    for _ in range(2):
        service.kill()
        service.start()
        eventually(lambda: service.jobs()["sits"]["state"] != "returning", "it is back")
    assert service.status()["paged_out_bytes"] >= 200 << 20
