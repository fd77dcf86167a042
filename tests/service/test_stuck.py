"""A lease holder that passes no boundary holds nobody up but itself."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

from salus.core.model import Lease
from salus.protocol.page import JobState, Page, Word
from salus.service.report import Report
from salus.service.watch import Watch
from tests.service.harness import eventually, finish


def test_a_stopped_job_is_named_and_those_behind_it_go_elsewhere(serve):
    service = serve("--policy", "rr", "--quantum", "5ms", "--stuck-after", "0.5s", "--capacity", "1000MiB")
    # One lane for all: each needs more than half of what there is.
    small = ("--ephemeral", "600MiB")
    stopped = service.job("--name", "stopped", *small, iterations=100_000, seconds=0.005)
    eventually(lambda: service.jobs().get("stopped", {}).get("iterations", 0) > 10, "it runs")
    pid = service.jobs()["stopped"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    behind = service.job("--name", "behind", "--ephemeral", "300MiB", iterations=50, seconds=0.002)
    row = service.when("stopped", "stopped")
    assert f"salus cancel {row['id']}" in row["wait_reason"]
    finish(behind)
    os.kill(pid, signal.SIGCONT)
    service.when("stopped", "running", "ready")
    service.salus("cancel", row["id"])
    stopped.wait(timeout=10)


def test_under_a_policy_that_runs_one_at_a_time_a_stuck_one_does_not_count(serve):
    service = serve("--policy", "fifo", "--stuck-after", "0.5s", "--capacity", "1000MiB")
    first = service.job("--name", "first", "--ephemeral", "100MiB", iterations=100_000, seconds=0.005)
    eventually(lambda: service.jobs().get("first", {}).get("iterations", 0) > 10, "it runs")
    pid = service.jobs()["first"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    finish(service.job("--name", "second", "--ephemeral", "100MiB", iterations=50, seconds=0.002))
    os.kill(pid, signal.SIGCONT)
    service.salus("cancel", service.jobs()["first"]["id"])
    first.wait(timeout=10)


def test_a_holder_that_sits_and_is_to_make_room_is_told_also_where_everybody_has_a_lease():
    async def run() -> list[str]:
        told: list[str] = []
        cores, holders = {}, {}
        for name, lease, state in (
            ("sits", Lease.REVOKED, JobState.BETWEEN),
            ("wants", Lease.HELD, JobState.ITERATING),
        ):
            page, _ = Page.create()
            page.words[Word.STATE] = state
            worker = SimpleNamespace(send=lambda _, name=name: told.append(name))
            holders[name] = SimpleNamespace(
                job_id=name, page=page, report=Report(page, told.append), link=object(), passed=0, worker=worker
            )
            cores[name] = SimpleNamespace(lease=lease, competing=False, holds=True, ready=True, wanted=None)
        live: Any = SimpleNamespace(
            leases=SimpleNamespace(holders=holders, settle=lambda: None),
            jobs=holders,
            scheduler=SimpleNamespace(jobs=cores, queue=[]),
        )
        Watch(live).look_soon()
        deadline = asyncio.get_running_loop().time() + 5
        while not told and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        return told

    assert asyncio.run(run()) == ["sits"]
