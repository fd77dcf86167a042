"""Jobs that people change while they run: paused, resumed, with another weight, priority or name."""

from __future__ import annotations

import signal

import pytest

from salus.core.model import Phase
from salus.protocol.states import STATES
from tests.service.harness import eventually
from tests.service.test_users import as_other, needs_root, shared  # noqa: F401 (a fixture)


def iterations(service, name):
    return service.jobs()[name]["iterations"]


def grows(service, name):
    before = iterations(service, name)
    eventually(lambda: iterations(service, name) > before, f"{name} goes on")


def endless(service, name, *options):
    return service.job("--name", name, *options, iterations=1_000_000, seconds=0.005)


def test_a_paused_job_stands_still_while_its_neighbour_goes_on_and_resumes_where_it_was(serve):
    service = serve()
    for name in ("left", "right"):
        endless(service, name)
        service.when(name, "running", "ready")
    assert service.salus("pause", "left").stdout == "job 1 is paused; salus resume 1 continues it\n"
    row = service.when("left", "paused")
    assert row["paused_by"] == row["user"]
    assert row["wait_reason"] == f"paused by {row['user']}; salus resume 1 continues it"
    grows(service, "right")
    assert iterations(service, "left") == row["iterations"], "no lease while it is paused"
    assert service.salus("resume", "left").stdout == "job 1 goes on\n"
    grows(service, "left")
    assert service.jobs()["left"]["paused_by"] is None


def test_a_pause_and_other_changes_survive_a_restart_of_the_service(serve):
    service = serve()
    for name in ("left", "right"):
        endless(service, name)
        service.when(name, "running", "ready")
    assert service.salus("set", "1", "--weight", "3", "--priority", "-2", "--name", "renamed").returncode == 0
    assert service.salus("pause", "renamed").returncode == 0
    before = service.when("renamed", "paused")["iterations"]
    service.kill()
    service.start()
    row = service.when("renamed", "paused")
    assert (row["weight"], row["priority"], row["paused_by"]) == (3.0, -2, row["user"])
    grows(service, "right")
    assert iterations(service, "renamed") == before, "no lease after the restart either"
    assert service.salus("resume", "renamed").returncode == 0
    grows(service, "renamed")


def test_a_paused_job_can_be_cancelled(serve):
    service = serve()
    job = endless(service, "job")
    service.when("job", "running")
    service.salus("pause", "job")
    service.when("job", "paused")
    assert service.salus("cancel", "job").returncode == 0
    assert job.wait(timeout=60) == 128 + signal.SIGTERM
    assert service.jobs()["job"]["state"] == "cancelled"


def test_weights_count_from_when_they_are_set(serve):
    service = serve("--policy", "fair", "--capacity", "4GiB")
    for name in ("left", "right"):
        endless(service, name, "--ephemeral", "3GiB")
        service.when(name, "running", "ready")
    assert service.salus("set", "left", "--weight", "4").stdout == "job 1: weight 4\n"
    start = {name: row["gpu_time_s"] for name, row in service.jobs().items()}

    def gained():
        now = {name: row["gpu_time_s"] for name, row in service.jobs().items()}
        return {name: now[name] - start[name] for name in start}

    eventually(lambda: gained()["right"] > 0.5, "the lighter one ran for a while")
    more = gained()
    assert 2.5 < more["left"] / more["right"] < 6.5, more


def test_what_was_changed_is_in_the_journal_and_replays(serve):
    service = serve()
    endless(service, "job")
    service.when("job", "running")
    service.salus("set", "job", "--weight", "2")
    service.salus("pause", "job")
    service.when("job", "paused")
    service.salus("resume", "job")
    grows(service, "job")
    service.salus("cancel", "--force", "job")
    eventually(lambda: not service.jobs(everything=False), "the job ended")
    done = service.salus("replay", str(service.journals()[0]))
    assert done.returncode == 0, done.stderr


def test_setting_what_it_is_already_or_resuming_what_runs_is_told(serve):
    service = serve()
    endless(service, "job")
    service.when("job", "running")
    assert service.salus("set", "job", "--weight", "1").stdout == "job 1: nothing to change\n"
    done = service.salus("resume", "job")
    assert (done.returncode, done.stderr) == (2, "salus: job 1 is not paused\n")
    service.salus("pause", "job")
    assert service.salus("pause", "job").stdout == "job 1 is paused already\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("set", "1"), "nothing to set; give --weight, --priority or --name"),
        (("set", "1", "--weight", "0"), "--weight: 0.0 is out of range"),
        (("set", "1", "--name", ""), "--name: it is empty"),
        (("set", "1", "2", "--name", "x"), "--name: a name is for one job"),
        (("set", "--weight", "2"), "which job? give its number or its name"),
        (("pause",), "which job?"),
        (("pause", "1", "--all"), "give jobs or --all, not both"),
    ],
)
def test_what_cannot_be_set_is_one_line(serve, arguments, complaint):
    done = serve(start=False).salus(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr and done.stderr.count("\n") == 1


@needs_root
@pytest.mark.parametrize("message", ["SetJob('1', weight=5.0)", "PauseJob('1')", "ResumeJob('1')"])
def test_nobody_changes_another_users_job(shared, message):  # noqa: F811
    service = shared("--users", "all", "--visible")
    endless(service, "job")
    service.when("job", "running")
    job_id = service.jobs()["job"]["id"]
    asked = message.replace("'1'", repr(job_id))
    told = as_other(service, f"connection.request(msg.{asked})").stdout
    assert f"job {job_id} is another user's; only its owner and the administrator can" in told
    row = service.jobs()["job"]
    assert (row["weight"], row["state"], row["paused_by"]) == (1.0, "running", None)


def test_every_phase_of_a_job_is_a_state_that_ps_knows():
    assert {phase.value for phase in Phase} - {Phase.RESIDENT.value} <= set(STATES)
