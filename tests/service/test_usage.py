"""The account of usage: right across days and restarts, bounded, with the jobs that run, and each user's own."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
import time
from types import SimpleNamespace
from typing import Any

import pytest

from salus.core.model import Footprint, Job, JobSpec, Phase
from salus.service import usage
from salus.service.usage import Account, Book, bytes_on_gpu
from tests.service.harness import eventually, finish

GIB = 2**30


def core_job(attained_s: float = 0.0, gib: int = 1) -> Job:
    footprint = Footprint(gib * GIB, 0)
    core = Job(JobSpec("1", footprint), 1, 0.0, footprint, True, None, phase=Phase.RESIDENT, lane=1)
    core.attained_s = attained_s
    return core


def live_job(job_id: str = "1", uid: int = 0, name: str = "a", submitted_at: float = 5.0) -> Any:
    return SimpleNamespace(job_id=job_id, uid=uid, asked=SimpleNamespace(name=name), submitted_at=submitted_at)


@pytest.fixture
def book(tmp_path):
    made = Book(tmp_path / usage.FILE)
    yield made
    made.close()


def on_day(monkeypatch: pytest.MonkeyPatch, day: str) -> None:
    monkeypatch.setattr(usage, "day_of", lambda _moment: day)


def test_what_a_job_uses_goes_to_the_day_on_which_it_uses_it(book, monkeypatch):
    account, job, core = Account(book), live_job(), core_job()
    on_day(monkeypatch, "2026-11-01")
    account.look(job, core, 0.0)
    core.attained_s = 3.0
    account.look(job, core, 10.0)
    on_day(monkeypatch, "2026-11-02")
    core.attained_s = 7.5
    account.look(job, core, 30.0)
    account.write(30.0)
    assert [(row["day"], row["gpu_time_s"], row["memory_byte_s"] / GIB) for row in book.sums(["day"])] == [
        ("2026-11-01", 3.0, 10.0),
        ("2026-11-02", 4.5, 20.0),
    ]
    (row,) = book.sums(["job"], since="2026-11-02")
    assert (row["job"], row["gpu_time_s"]) == ("1", 4.5)


def test_after_a_crash_what_a_job_had_meanwhile_is_counted_once(book):
    job, core = live_job(), core_job()
    first = Account(book)
    first.look(job, core, 0.0)
    core.attained_s = 4.0
    first.look(job, core, 1.0)
    first.write(1.0)
    core.attained_s = 5.0
    first.look(job, core, 2.0)  # and the service is killed before it writes that down
    second = Account(book)
    second.look(job, core_job(attained_s=6.0), 0.0)
    second.write(1.0)
    (row,) = book.sums(["job"])
    assert row["gpu_time_s"] == 6.0


def test_a_job_whose_process_begins_anew_keeps_what_was_counted_before(book):
    account, job = Account(book), live_job()
    account.look(job, core_job(attained_s=0.0), 0.0)
    one = core_job()
    account.look(job, one, 0.0)
    one.attained_s = 4.0
    account.look(job, one, 1.0)
    another = core_job()
    account.look(job, another, 2.0)
    another.attained_s = 3.0
    account.look(job, another, 3.0)
    account.write(3.0)
    assert book.sums(["job"])[0]["gpu_time_s"] == 7.0


def test_another_job_of_the_same_number_is_another_job(book):
    account = Account(book)
    for submitted_at in (5.0, 6.0):
        job, core = live_job(submitted_at=submitted_at), core_job()
        account.look(job, core, 0.0)
        core.attained_s = 2.0
        account.look(job, core, 1.0)
        account.forget_job("1")
        account.write(1.0)
    assert [row["gpu_time_s"] for row in book.sums(["job"])] == [2.0, 2.0]


def test_memory_counts_while_it_is_on_the_gpu():
    footprint = Footprint(4, 2, 1)
    core = Job(JobSpec("1", footprint), 1, 0.0, footprint, True, None, context_bytes=1)
    expected = {Phase.WAITING: 1, Phase.RESIDENT: 7, Phase.PARKED: 5, Phase.PAGED_OUT: 1, Phase.PAGING_IN: 7}
    for phase, size in expected.items():
        core.phase, core.lane = phase, 1 if phase in (Phase.RESIDENT, Phase.PAGING_IN) else None
        assert bytes_on_gpu(core) == size, phase


def test_a_disk_that_is_full_for_a_while_loses_nothing(book, monkeypatch):
    account, job, core = Account(book), live_job(), core_job()
    account.look(job, core, 0.0)
    core.attained_s = 2.0
    account.look(job, core, 1.0)

    def full(_rows: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(book, "add", full)
        account.write(1.0)
    account.write(10.0)
    assert book.sums(["user"])[0]["gpu_time_s"] == 2.0


def test_the_oldest_days_go_first_and_a_dry_run_removes_nothing(book, monkeypatch):
    monkeypatch.setattr(usage, "MOST_ROWS", 3)
    book.add([(f"2026-11-{day:02}", job, 1.0, 0, "a", 1.0, 1.0, 1.0) for day in range(1, 6) for job in (1, 2)])
    assert book.forget(float("-inf"), dry_run=True)[0] == 6 and len(book.sums(["day", "job"])) == 10
    gone, _, kept, _ = book.forget(float("-inf"))
    assert (gone, kept) == (6, 4)
    assert {row["day"] for row in book.sums(["day"])} == {"2026-11-04", "2026-11-05"}
    book.forget(time.mktime((2026, 11, 5, 12, 0, 0, 0, 0, -1)))
    assert {row["day"] for row in book.sums(["day"])} == {"2026-11-05"}


def test_a_user_s_own_rows_are_found_by_the_user(book):
    book.add([("2026-11-01", 1, 1.0, 1001, "a", 1.0, 1.0, 1.0), ("2026-11-01", 2, 1.0, 1002, "b", 5.0, 1.0, 5.0)])
    (row,) = book.sums(["user"], uid=1002)
    assert (row["gpu_time_s"], row["jobs"]) == (5.0, 1)
    assert len(book.sums(["user"])) == 2
    assert book.sums(["job"], since="2026-11-02") == []


def listed(service, *options: str) -> list[dict]:
    done = service.salus("usage", "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def total(rows: list[dict]) -> float:
    return sum(row["gpu_time_s"] for row in rows)


def test_usage_agrees_with_ps_also_of_jobs_that_run_and_after_the_service_was_killed_and_has_ended(serve):
    service = serve("--capacity", "4GiB")
    assert listed(service) == [] and "no usage yet" in service.salus("usage").stdout
    finish(service.job("--name", "short", "--persistent", "1GiB", iterations=30, seconds=0.005))
    long = service.job("--name", "long", iterations=100_000, seconds=0.005)
    eventually(lambda: {row["name"]: row for row in listed(service, "--by", "job")}.get("long", {}).get("gpu_time_s"),
               "the running job is in the account")  # fmt: skip
    before = {row["name"]: row["gpu_time_s"] for row in listed(service, "--by", "job")}
    service.kill()
    service.start()
    eventually(lambda: service.jobs().get("long", {}).get("state") == "running", "it is back")
    service.salus("cancel", service.jobs()["long"]["id"])
    long.wait(timeout=20)
    service.when("long", "cancelled")
    rows = {row["name"]: row for row in listed(service, "--by", "job")}
    jobs = service.jobs()
    for name in ("short", "long"):
        assert rows[name]["gpu_time_s"] == pytest.approx(jobs[name]["gpu_time_s"], abs=1e-6), name
        assert rows[name]["gpu_time_s"] >= before[name]
        assert rows[name]["job"] == jobs[name]["id"]
    assert rows["short"]["memory_byte_s"] > 0
    expected = total(list(rows.values()))
    for by in ("user", "day", "user,day"):
        assert total(listed(service, "--by", by, "--since", "2d")) == pytest.approx(expected)
    service.process.terminate()
    service.process.communicate()
    assert total(listed(service)) == pytest.approx(expected), "also without a service"
    table = list(csv.DictReader(io.StringIO(service.salus("usage", "--by", "job", "--csv").stdout)))
    assert sum(float(row["gpu_hours"]) for row in table) == pytest.approx(expected / 3600)
    assert service.salus("usage", "--by", "job").stdout.splitlines()[-1].startswith("total")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--by", "colour"), "--by: 'colour' is not understood; expected user, day or job"),
        (("--since", "yesterday"), "--since: 'yesterday' is not understood; write it like 7d or 2026-11-01"),
        (("--since", "2026-13-01"), "--since: there is no day 2026-13-01"),
        (("--json", "--csv"), "leave one of them out"),
    ],
)
def test_what_is_not_understood_is_one_clear_line(serve, options, complaint):
    done = serve(start=False).salus("usage", *options)
    assert done.returncode == 2 and complaint in done.stderr and done.stderr.count("\n") == 1


def test_an_account_that_cannot_be_used_is_one_clear_line(serve):
    service = serve(start=False)
    folder = service.folder / "state"
    folder.mkdir(mode=0o700)
    (folder / usage.FILE).write_bytes(b"this is no database" * 100)
    done = service.salus("usage")
    assert done.returncode == 2 and "move the file away" in done.stderr and done.stderr.count("\n") == 1
