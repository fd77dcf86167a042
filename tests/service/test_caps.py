"""Caps of users and groups: what is over one is refused with a line that names it, and holds for jobs that grow."""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path

import pytest

from salus.config.schema import Caps as CapsOfOne
from salus.config.schema import Limits
from salus.errors import RequestRejected
from salus.service import caps as caps_module
from salus.service.caps import Caps
from tests.service.harness import SOURCE, Service, eventually

GIB = 2**30
GROWS = Path(__file__).parent.parent / "memory" / "growing_job.py"
ME = pwd.getpwuid(os.getuid()).pw_name


def caps_for_me(**caps: float) -> Caps:
    return Caps(Limits(users={ME: CapsOfOne(**caps)}), lambda _keys: "/etc/salus/config.toml:7")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cap", "within", "over", "message"),
    [
        ({"weight": 4.0}, {"weight": 4.0}, {"weight": 1000.0},
         "weight 1000 is over the cap of 4 for user {me} (limits.users.{me}.weight in /etc/salus/config.toml:7); "
         "ask for 4 or less"),
        ({"priority": 0}, {"priority": 0}, {"priority": 5}, "priority 5 is over the cap of 0 for user {me} (limits."),
        ({"jobs": 2}, {"jobs": 2}, {"jobs": 3}, "user {me} has 2 jobs, running and waiting, and may have 2 at once "),
        ({"memory": 8 * GIB}, {"memory_bytes": 8 * GIB, "more_bytes": GIB},
         {"memory_bytes": 9 * GIB, "more_bytes": 3 * GIB},
         "3 GiB more is over the memory cap of 8 GiB for all jobs of user {me}, which have 6 GiB (limits."),
    ],
)  # fmt: skip
def test_what_is_over_a_cap_is_refused_with_the_cap_its_value_and_where_it_is_set(cap, within, over, message):
    caps = caps_for_me(**cap)
    caps.check(os.getuid(), **within)
    with pytest.raises(RequestRejected) as refusal:
        caps.check(os.getuid(), **over)
    assert message.format(me=ME) in str(refusal.value)
    assert "/etc/salus/config.toml:7" in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_user_s_own_cap_comes_before_that_of_a_group_and_that_before_everybody_s(monkeypatch):
    monkeypatch.setattr(caps_module, "groups_of", lambda _uid: [1, 2])
    monkeypatch.setattr(caps_module, "_group_name", {1: "students", 2: "staff"}.get)
    limits = Limits(
        CapsOfOne(weight=1, priority=1, jobs=1),
        users={ME: CapsOfOne(weight=9)},
        groups={"students": CapsOfOne(weight=2, priority=2), "staff": CapsOfOne(weight=3, priority=3)},
    )
    caps = Caps(limits)
    found = {cap: caps.of(os.getuid(), cap) for cap in ("weight", "priority", "jobs", "memory")}
    assert {cap: one and one.value for cap, one in found.items()} == {
        "weight": 9, "priority": 3, "jobs": 1, "memory": None,
    }  # fmt: skip
    assert found["priority"] and found["priority"].rule.startswith("limits.groups.staff.priority")


def test_without_caps_everything_is_allowed_and_everybody_has_the_same_share():
    caps = Caps()
    caps.check(os.getuid(), weight=1000, priority=10**6, jobs=10**6, memory_bytes=2**60)
    assert caps.share(os.getuid()) == 1.0 and caps.memory_refusal(os.getuid(), 2**60, 1) is None


def with_limits(serve, text: str, *options: str) -> Service:
    service: Service = serve(*options, start=False)
    Path(service.environment["SALUS_CONFIG"]).write_text(text)
    service.start()
    return service


def refused(service: Service, *options: str) -> str:
    done = service.salus("run", *options, "--", "true")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_job_over_a_cap_is_refused_by_the_service_and_one_within_runs(serve):
    service = with_limits(serve, '[limits]\nweight = 2\npriority = 0\njobs = 2\nmemory = "4GiB"\n')
    file = service.environment["SALUS_CONFIG"]
    assert f"the cap of 2 for user {ME} (limits.weight in {file}:2)" in refused(service, "--weight", "1000")
    assert f"(limits.priority in {file}:3)" in refused(service, "--priority", "1")
    assert f"(limits.memory in {file}:5)" in refused(service, "--persistent", "5GiB")
    jobs = [service.salus("submit", "--persistent", "1GiB", "--", "sleep", "600").stdout.strip() for _ in range(2)]
    assert f"has 2 jobs, running and waiting, and may have 2 at once (limits.jobs in {file}:4)" in refused(service)
    changed = service.salus("set", jobs[0], "--weight", "1000")
    assert changed.returncode == 2 and "weight 1000 is over the cap of 2" in changed.stderr
    assert service.salus("set", jobs[0], "--weight", "2").returncode == 0
    service.salus("cancel", jobs[0])
    eventually(lambda: len(service.jobs(everything=False)) == 1, "one has ended")
    assert "which have 1 GiB" in refused(service, "--persistent", "3.5GiB")
    done = service.salus("run", "--weight", "2", "--persistent", "2GiB", "--", "true")
    assert done.returncode == 0, done.stderr
    service.salus("cancel", "--force", jobs[1])


def test_a_job_that_grows_beyond_the_memory_cap_gets_its_own_out_of_memory_error_and_its_user_is_told(serve):
    service = with_limits(serve, '[limits]\nmemory = "100MiB"\n', "--capacity", "1GiB")
    finished, refused = (
        service.salus("run", "--", sys.executable, str(GROWS), str(SOURCE), blocks, "0") for blocks in ("3", "14")
    )
    assert (finished.returncode, finished.stdout) == (0, "finished\n"), finished.stderr
    assert refused.returncode != 0 and "finished" not in refused.stdout
    assert "is out of memory" in refused.stderr and "over the memory cap of 100 MiB" in refused.stderr
    assert service.salus("run", "--", "true").returncode == 0, "nothing is left of it"
