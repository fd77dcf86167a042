"""Commands that take several jobs, by number or name; and which jobs `ps` lists, in which columns and order."""

from __future__ import annotations

import json

import pytest

from tests.service.harness import eventually


def submit(service, name, *command):
    return service.salus("submit", "--name", name, "--", *(command or ("sleep", "600"))).stdout.strip()


@pytest.fixture
def jobs(serve):
    """A service with five jobs: three sweeps, and two of the same name."""
    service = serve()
    for name in ("sweep-1", "sweep-2", "sweep-3", "twin", "twin"):
        submit(service, name)
    yield service
    service.salus("cancel", "--all", "--yes", "--force")
    eventually(lambda: not service.jobs(everything=False), "all jobs ended")


def states(service):
    with service.connect() as connection:
        return {row["id"]: row["state"] for row in connection.jobs(everything=True)}


def test_several_jobs_are_cancelled_by_number_and_name_and_what_fails_is_a_line_of_its_own(jobs):
    done = jobs.salus("cancel", "1", "nothing", "twin", "sweep-2", "1")
    assert done.stdout == "job 1 was told to end\njob 2 was told to end\n"
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first == "salus: there is no job nothing; salus ps --all lists those there are"
    assert second.startswith("salus: several jobs are called twin: 4 (")
    assert second.endswith("; give the number of the one you mean")
    eventually(lambda: states(jobs)["1"] == states(jobs)["2"] == "cancelled", "both ended")
    again = jobs.salus("cancel", "sweep-1")
    assert (again.returncode, again.stderr) == (2, "salus: job 1 has ended already\n")


def test_cancel_all_ends_ones_own_jobs_and_asks_where_it_can(jobs):
    refused = jobs.salus("cancel", "--all")
    assert refused.returncode == 2
    assert refused.stderr == (
        "salus: --all: 5 jobs (1, 2, 3, 4, 5) would be ended; add --yes where nobody can be asked\n"
    )
    assert len(jobs.jobs(everything=False)) == 4, "five jobs, two of one name"
    assert jobs.salus("cancel", "--all", "--yes").stdout.count("was told to end") == 5
    eventually(lambda: not jobs.jobs(everything=False), "all jobs ended")
    assert jobs.salus("cancel", "--all").stdout == "no jobs of yours are running\n"


def test_wait_for_several_ends_with_the_status_of_the_first_that_failed(serve):
    service = serve()
    good = submit(service, "good", "true")
    submit(service, "bad", "sh", "-c", "exit 3")
    worse = submit(service, "worse", "sh", "-c", "exit 4")
    done = service.salus("wait", good, "bad", worse)
    assert done.returncode == 3
    assert done.stderr == "salus: job 2 (bad) ended with status 3\nsalus: job 3 (worse) ended with status 4\n"
    assert service.salus("wait", "good").returncode == 0
    missing = service.salus("wait", "good", "nothing")
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1


def test_wait_all_waits_for_what_runs(serve):
    service = serve()
    assert service.salus("wait", "--all").returncode == 0
    submit(service, "bad", "sh", "-c", "sleep 10; exit 3")
    submit(service, "good", "sleep", "1")
    assert service.salus("wait", "--all").returncode == 3
    assert not service.jobs(everything=False)


def test_logs_of_several_jobs_say_whose_each_part_is(serve):
    service = serve()
    for name in ("one", "two"):
        submit(service, name, "echo", f"hello from {name}")
    assert service.salus("wait", "one", "two").returncode == 0
    expected = "==> job 1 (one) <==\nhello from one\n\n==> job 2 (two) <==\nhello from two\n"
    assert service.salus("logs", "one", "2").stdout == expected
    assert service.salus("logs", "-f", "one", "2").stdout == expected
    assert service.salus("logs", "two").stdout == "hello from two\n"


def test_a_job_that_runs_is_meant_rather_than_an_ended_one_of_the_same_name(serve):
    service = serve()
    submit(service, "train", "true")
    service.salus("wait", "train")
    submit(service, "train", "sleep", "600")
    assert service.salus("cancel", "--force", "train").stdout == "job 2 was killed\n"


def test_ps_lists_what_was_asked_for(jobs):
    jobs.salus("cancel", "--force", "1")
    eventually(lambda: states(jobs)["1"] == "cancelled", "job 1 ended")

    def ids(*options):
        done = jobs.salus("ps", "--json", *options)
        assert done.returncode == 0, done.stderr
        return [row["id"] for row in json.loads(done.stdout)]

    assert ids() == ["2", "3", "4", "5"]
    assert ids("--name", "sweep-*") == ["2", "3"]
    assert ids("--name", "twin", "--mine") == ["4", "5"]
    assert ids("--state", "cancelled") == ["1"], "who asks for ended jobs means them"
    assert ids("--last", "2") == ["4", "5"]
    assert ids("--user", "nobody-of-this-name") == []
    assert ids("--sort", "-id") == ["5", "4", "3", "2"]
    assert ids("--all", "--sort", "name")[:3] == ["1", "2", "3"]
    assert jobs.salus("ps", "--user", "nobody-of-this-name").stdout == "no such jobs\n"


def test_ps_shows_the_columns_that_were_chosen_in_their_order(jobs):
    done = jobs.salus("ps", "--columns", "name,weight,priority,pid,elapsed,command,id")
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["name", "weight", "priority", "pid", "elapsed", "command", "id"]
    assert lines[1].split() == ["sweep-1", "1", "0", "sleep", "600", "1"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("ps", "--columns", "id,nme"), "--columns: there is no column 'nme'; there are: id, name, user"),
        (("ps", "--sort", "-size"), "--sort: there is no column 'size'; there are: id"),
        (("ps", "--state", "nix"), "--state: there is no state 'nix'; there are: returning, waiting"),
        (("cancel",), "which job? give its number or its name, several of them, or --all"),
        (("cancel", "1", "--all"), "give jobs or --all, not both"),
    ],
)
def test_what_is_not_known_is_named_together_with_what_is(serve, arguments, complaint):
    done = serve(start=False).salus(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr and done.stderr.count("\n") == 1


def test_the_shell_completes_names_states_and_columns(jobs):
    def completed(*words):
        jobs.environment |= {
            "_SALUS_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(["salus", *words]),
            "COMP_CWORD": str(len(words)),
        }
        return jobs.salus().stdout.split()

    assert completed("pause", "sweep") == ["sweep-1", "sweep-2", "sweep-3"]
    assert completed("cancel", "1", "tw") == [], "no name that two jobs have"
    assert completed("ps", "--state", "pau") == ["pausing", "paused"] or completed("ps", "--state", "pau") == [
        "paused",
        "pausing",
    ]
    assert completed("ps", "--columns", "id,wei") == ["id,weight"]
    for name in ("_SALUS_COMPLETE", "COMP_WORDS", "COMP_CWORD"):
        del jobs.environment[name]
