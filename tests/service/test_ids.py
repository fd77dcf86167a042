"""No two jobs that a person can see have the same id, whichever services gave them out."""

from __future__ import annotations

import os
import time

from salus.protocol.messages import Register
from salus.records import Records
from salus.registry import FILE, Numbers, Registry, outputs
from salus.service.storage import Limits, tidy_records


def give_out(registry: Registry, count: int) -> list[int]:
    asked = Register("a", ["true"], "/")
    return [int(registry.add("t", os.getuid(), asked, time.time(), os.getpid(), "host")) for _ in range(count)]


def test_a_service_for_several_users_and_a_users_own_never_give_out_the_same_id(tmp_path):
    own = Registry(tmp_path / "own.sqlite", "/own")
    shared = Registry(tmp_path / "shared.sqlite", "/shared", numbers=Numbers.SHARED)
    assert give_out(own, 20) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 18, 19, 21, 22]
    assert give_out(shared, 3) == [10, 20, 30]
    own.close(), shared.close()


def test_a_list_that_goes_on_in_the_other_way_gives_out_no_id_again(tmp_path):
    """The same user may run a service for others one day and for themselves the next."""
    given: list[int] = []
    for numbers in (Numbers.OWN, Numbers.SHARED, Numbers.OWN, Numbers.SHARED):
        registry = Registry(tmp_path / FILE, "/run", numbers=numbers)
        given += give_out(registry, 2)
        registry.close()
    assert given == [1, 2, 10, 20, 21, 22, 30, 40]


def test_an_id_is_not_given_out_again_when_its_job_was_refused_or_forgotten(tmp_path):
    registry = Registry(tmp_path / FILE, "/run")
    (first,) = give_out(registry, 1)
    registry.remove(str(first))
    assert give_out(registry, 1) == [first + 1]
    registry.close()


def row(job_id: str, **more) -> dict:
    return {"id": job_id, "state": "running", "finished_at": None, "exit_code": None, **more}


def test_what_a_launcher_kept_is_read_together_with_the_users_own_list(tmp_path):
    own, kept = Registry(tmp_path / FILE, "/own"), Registry(tmp_path / "kept.sqlite", None)
    give_out(own, 1)
    kept.keep("10", "secret", os.getuid(), Register("theirs", ["true"], "/"), os.getpid())
    kept.keep("20", "secret", os.getuid(), Register("theirs", ["true"], "/"), os.getpid())
    records = Records([own, kept])
    assert [record.row["id"] for record in records.all()] == ["1", "10", "20"]
    assert records.find("10").row["state"] == "unmanaged" and records.find("30") is None
    records.cancelled("10")
    records.finish("10", "secret", -15)
    records.finish("20", "wrong", 3)
    assert records.find("10").row["state"] == "cancelled" and records.find("20").row["exit_code"] is None
    own.close(), kept.close()


def test_of_a_job_that_a_stopped_service_lost_the_kept_record_knows_the_end(tmp_path):
    kept = Registry(tmp_path / "kept.sqlite", None)
    for job_id in ("10", "20", "30"):
        kept.keep(job_id, "secret", os.getuid(), Register("theirs", ["true"], "/"), os.getpid())
    kept.finish("10", "secret", 7)
    kept.finish("30", "secret", 0)
    service = [row("10", state="lost"), row("20"), row("40")]
    records = Records([kept])
    everything = {one["id"]: (one["state"], one["exit_code"]) for one in records.beside(service, True)}
    assert everything == {
        "10": ("failed", 7), "20": ("running", None), "30": ("done", 0), "40": ("running", None),
    }  # fmt: skip
    assert [one["id"] for one in records.beside(service, False)] == ["20", "40"]
    kept.close()


def test_a_kept_record_of_an_older_job_with_the_same_id_gives_way(tmp_path):
    """An administrator may have thrown the machine's list away, and its numbers began anew."""
    kept = Registry(tmp_path / "kept.sqlite", None)
    for name in ("old", "new"):
        kept.keep("10", name, os.getuid(), Register(name, ["true"], "/"), os.getpid())
        kept.finish("10", name, 0)
    (record,) = Records([kept]).all()
    assert record.row["name"] == "new"
    kept.close()


def test_output_of_a_job_in_a_service_of_others_is_known_to_run_and_its_record_is_counted(tmp_path):
    """Whatever removes old output from the user's folder must not take it from a job that writes there."""
    kept = Registry(tmp_path / "kept-here.sqlite", "/theirs")
    for job_id in ("10", "20"):
        kept.keep(job_id, "t", os.getuid(), Register("a", ["true"], "/", log=f"/log-{job_id}"), os.getpid())
    kept.finish("20", "t", 0)
    assert {path: output.runs for path, output in outputs(tmp_path).items()} == {"/log-10": True, "/log-20": False}
    kept.close()
    own = Registry(tmp_path / FILE, "/own")
    own.finish(own.add("t", os.getuid(), Register("b", ["true"], "/"), time.time(), os.getpid(), "host"), "t", 0)
    own.close()
    (tidied,) = tidy_records(tmp_path, Limits(keep_s=0))
    assert (tidied.removed, tidied.kept) == (2, 1), "the job that runs stays"
