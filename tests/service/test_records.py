"""Jobs that have ended, and those that go on without their service: known to commands and to the next service."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from salus import processes
from salus.errors import NoService
from salus.protocol.messages import Register
from salus.registry import FILE, KEPT, Registry, open_registry
from tests.service.harness import eventually

SPEAKS = [sys.executable, "-u", "-c", "print('hello'); import sys; sys.exit(3)"]


def listed(service, *options) -> list[dict]:
    done = service.salus("ps", "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_machine_where_nothing_runs_has_no_jobs(serve):
    service = serve(start=False)
    for options in ((), ("--all",)):
        done = service.salus("ps", *options)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("no jobs")
        assert listed(service, *options) == []


def test_a_submitted_job_is_known_after_its_service_has_ended_and_to_the_next_one(serve):
    service = serve(start=False)
    job_id = service.salus("submit", "--name", "night", "--", *SPEAKS).stdout.strip()
    assert service.salus("wait", job_id).returncode == 3
    eventually(lambda: not service.socket.exists(), "the service ended")
    assert service.salus("ps").stdout.startswith("no jobs;")
    for _ in range(2):
        (row,) = listed(service, "--all")
        assert (row["id"], row["name"], row["state"], row["exit_code"]) == (job_id, "night", "failed", 3)
        assert row["finished_at"] >= row["submitted_at"]
        assert service.salus("wait", job_id).returncode == 3
        assert service.salus("logs", "-f", job_id).stdout == "hello\n"
        again = service.salus("cancel", job_id)
        assert again.returncode == 2 and again.stderr == f"salus: job {job_id} has ended already\n"
        if service.process is None:
            service.start()
    later = service.salus("submit", "--", "true").stdout.strip()
    assert int(later) > int(job_id)


@pytest.mark.parametrize("next_one", [False, True])
def test_a_job_that_goes_on_without_its_service_can_be_seen_waited_for_and_ended(serve, next_one):
    service = serve()
    ids = [service.salus("submit", "--name", name, "--", "sleep", "600").stdout.strip() for name in "ab"]
    service.process.terminate()
    service.process.communicate()
    if next_one:
        service.start()
    assert [(row["id"], row["state"]) for row in listed(service)] == [(job_id, "unmanaged") for job_id in ids]
    waits = [service.salus_in_background("wait", job_id) for job_id in ids]
    follows = service.salus_in_background("logs", "-f", ids[0])
    assert service.salus("cancel", ids[0]).stdout == f"job {ids[0]} was told to end\n"
    assert service.salus("cancel", "--force", ids[1]).stdout == f"job {ids[1]} was killed\n"
    assert [wait.wait(timeout=20) for wait in waits] == [128 + signal.SIGTERM, 128 + signal.SIGKILL]
    assert follows.wait(timeout=20) == 0
    assert [(row["state"], row["exit_code"]) for row in listed(service, "--all")] == [
        ("cancelled", -15),
        ("cancelled", -9),
    ]


def test_who_waits_for_a_job_waits_on_when_the_service_ends(serve):
    service = serve()
    job_id = service.salus("submit", "--", "sh", "-c", "sleep 2; exit 5").stdout.strip()
    wait = service.salus_in_background("wait", job_id)
    time.sleep(0.5)
    service.process.terminate()
    assert wait.wait(timeout=20) == 5


def test_who_waits_for_a_job_waits_on_when_the_service_is_killed(serve):
    service = serve()
    service.environment["SALUS_RECONNECT_S"] = "0.3"
    job_id = service.salus("submit", "--", "sh", "-c", "sleep 2; exit 5").stdout.strip()
    wait = service.salus_in_background("wait", job_id)
    time.sleep(0.5)
    service.kill()
    assert wait.wait(timeout=20) == 5


def test_a_connection_that_is_reset_is_a_service_that_is_gone(serve):
    with serve().connect() as connection:
        reset = SimpleNamespace(
            recvmsg=_reset, shutdown=lambda _: None, close=connection._sock.close, detach=connection._sock.detach
        )
        connection._sock = reset
        with pytest.raises(NoService):
            connection.receive()


def _reset(*_: object) -> None:
    raise ConnectionResetError


def test_a_job_that_has_given_up_on_a_killed_service_is_not_taken_for_ended_by_the_next(serve):
    service = serve()
    service.environment["SALUS_RECONNECT_S"] = "0.2"
    job_id = service.salus("submit", "--", "sh", "-c", "sleep 7; exit 6").stdout.strip()
    service.kill()
    time.sleep(1.0)
    service.start()
    wait = service.salus_in_background("wait", job_id)
    # As long as the service gives those from before to come back, and longer.
    eventually(lambda: [row["state"] for row in listed(service)] == ["unmanaged"], "it is left to itself")
    assert wait.wait(timeout=20) == 6
    (row,) = listed(service, "--all")
    assert (row["state"], row["exit_code"]) == ("failed", 6)


def kill_both(job: subprocess.Popen[str]) -> None:
    """`salus run` and its keeper; of their job only the command dies with them."""
    (keeper,) = [process.pid for process in processes.below(job.pid) if process.parent == job.pid]
    os.kill(job.pid, signal.SIGSTOP)
    os.kill(keeper, signal.SIGKILL)
    job.kill()
    job.wait()


def test_an_unmanaged_job_whose_launcher_was_killed_can_be_ended(serve):
    service = serve()
    command = f"{sys.executable} {service.job_file} 100000 0.005; exit 1"
    job = service.salus_in_background("run", "--name", "a", "--", "bash", "-c", command)
    row = service.when("a", "running")
    service.process.terminate()
    service.process.communicate()
    kill_both(job)
    (listing,) = listed(service)
    assert listing["state"] == "unmanaged"
    assert service.salus("cancel", row["id"]).stdout == f"job {row['id']} was told to end\n"
    assert not listed(service), "it has ended"
    (listing,) = listed(service, "--all")
    assert listing["state"] == "lost"
    assert service.salus("wait", row["id"]).returncode == 1


def test_a_job_whose_launcher_was_killed_is_lost_and_says_so(serve):
    service = serve()
    job = service.salus_in_background("run", "--", "sleep", "600")
    (row,) = eventually(lambda: listed(service), "the job is there")
    eventually(lambda: len(processes.below(job.pid)) > 1, "its command runs")
    service.process.terminate()
    service.process.communicate()
    kill_both(job)
    (row,) = listed(service, "--all")
    assert (row["state"], row["exit_code"]) == ("lost", None)
    done = service.salus("wait", row["id"])
    assert done.returncode == 1 and "is not known" in done.stderr


def test_a_job_that_ends_while_its_killed_service_is_away_is_not_waited_for_by_the_next(serve):
    service = serve()
    service.environment["SALUS_RECONNECT_S"] = "0.3"
    job_id = service.salus("submit", "--", "sh", "-c", "sleep 1; exit 4").stdout.strip()
    service.kill()
    assert service.salus("wait", job_id).returncode == 4
    service.start()
    (row,) = listed(service, "--all")
    assert (row["state"], row["exit_code"]) == ("failed", 4)


def a_row(job_id: str, **more) -> dict:
    return {"id": job_id, "state": "running", "finished_at": None, "exit_code": None, **more}


def add(registry: Registry, token: str = "secret", launcher: int = 0) -> str:
    asked = Register("a", ["true"], "/")
    job_id = registry.add(token, os.getuid(), asked, time.time(), launcher or os.getpid(), "host")
    registry.describe(a_row(job_id))
    return job_id


def test_services_that_share_a_folder_know_their_own_jobs(tmp_path):
    ours, theirs = (Registry(tmp_path / FILE, f"/run/{name}") for name in ("ours", "theirs"))
    first, second = add(ours), add(theirs)
    assert [saved.job_id for saved in ours.running()] == [first]
    assert [record.row["id"] for record in ours.all()] == [first]
    theirs.describe(a_row(second) | {"state": "done", "finished_at": 2.0, "exit_code": 0})
    assert [record.row["id"] for record in ours.all()] == [first, second], "what has ended is everybody's"
    ours.close(), theirs.close()


def test_only_the_jobs_own_launcher_says_how_it_ended_and_only_once(tmp_path):
    registry = Registry(tmp_path / FILE, "/run/a")
    job_id = add(registry)
    registry.release(job_id)
    (record,) = registry.unmanaged()
    assert record.goes_on and record.launcher == os.getpid()
    registry.finish(job_id, "another", 1)
    assert registry.unmanaged()
    registry.finish(job_id, "secret", 7)
    registry.finish(job_id, "secret", 0)
    (record,) = registry.ended()
    assert (record.row["state"], record.row["exit_code"]) == ("failed", 7)
    assert not registry.unmanaged()
    registry.close()


def test_a_process_that_was_given_the_number_of_a_launcher_is_not_taken_for_it(tmp_path):
    registry = Registry(tmp_path / FILE, "/run/a")
    job_id = add(registry)
    registry.release(job_id)
    assert registry.unmanaged()
    registry._db.execute("UPDATE jobs SET launcher_began = launcher_began - 1")
    (record,) = registry.ended()
    assert record.row["state"] == "lost"
    registry.attached(job_id, os.getpid())
    (record,) = registry.unmanaged()
    assert (record.launcher, record.worker) == (0, os.getpid()), "its own process is there all the same"
    registry.close()


def test_what_is_lost_counts_as_ended_and_what_was_not_described_is_shown_all_the_same(tmp_path):
    registry = Registry(tmp_path / FILE, "/run/a")
    job_id = registry.add("secret", 0, Register("a", ["true"], "/", log="/log"), 5.0, 2**22 + 1, "host")
    registry.release(job_id)
    registry.trim()
    (record,) = registry.ended()
    assert (record.row["state"], record.row["name"], record.row["log"]) == ("lost", "a", "/log")
    assert registry._db.execute("SELECT finished_at FROM jobs").fetchone() == (5.0,), "so that it goes some day"
    registry.close()


def test_two_that_open_a_new_list_at_once_both_can(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from salus.registry import Registry\n"
        "time.sleep(max(0, float(sys.argv[2]) - time.time())); Registry(Path(sys.argv[1])).close()"
    )
    for number in range(4):
        command = [sys.executable, "-c", code, str(tmp_path / f"{number}.sqlite"), str(time.time() + 0.7)]
        both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        assert [one.communicate()[1] for one in both] == ["", ""]


def test_a_list_of_an_older_version_is_brought_up_to_date(tmp_path):
    old = sqlite3.connect(tmp_path / FILE)
    old.execute(
        "CREATE TABLE jobs (job_id INTEGER PRIMARY KEY AUTOINCREMENT, token TEXT NOT NULL, uid INTEGER NOT NULL, "
        "asked TEXT NOT NULL, submitted_at REAL NOT NULL, launcher INTEGER NOT NULL, worker INTEGER NOT NULL DEFAULT 0)"
    )
    old.commit()
    old.close()
    registry = Registry(tmp_path / FILE, "/run/a")
    assert [saved.job_id for saved in registry.running()] == [] and add(registry) == "1"
    assert [saved.job_id for saved in registry.running()] == ["1"]
    registry.close()


def test_of_those_that_have_ended_the_last_ones_are_kept(tmp_path):
    registry = Registry(tmp_path / FILE, "/run/a")
    running = add(registry)
    ended = [add(registry) for _ in range(KEPT + 3)]
    for job_id in ended:
        registry.describe(a_row(job_id) | {"state": "done", "finished_at": 1.0})
    registry.trim()
    assert [record.row["id"] for record in registry.ended()] == ended[3:]
    assert [saved.job_id for saved in registry.running()] == [running]
    registry.close()


def test_a_list_that_cannot_be_read_is_one_clear_line(serve):
    service = serve(start=False)
    folder = Path(service.environment["SALUS_STATE_DIR"])
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes(b"this is no database" * 100)
    done = service.salus("ps")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert FILE in done.stderr and "move the file away" in done.stderr


def test_where_nothing_has_run_nothing_is_made(tmp_path):
    with open_registry(tmp_path / "state", tmp_path / "socket") as registry:
        assert registry is None
    assert not (tmp_path / "state").exists()
