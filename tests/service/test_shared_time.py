"""Jobs in different lanes have the device at the same time, and its time is shared out among them."""

from __future__ import annotations

import asyncio
import sys

import pytest

from salus.core.model import GpuConfig
from salus.plugins import load_policy
from salus.protocol import messages as msg
from salus.protocol.page import Page, Word
from salus.service.devices import Device
from salus.service.history import History
from salus.service.job import LiveJob
from salus.service.live import Live
from salus.service.registry import Registry
from tests.service.harness import SOURCE, eventually

MS = 1_000_000


def test_what_holders_used_at_the_same_time_is_no_more_than_the_time_that_passed(tmp_path, monkeypatch):
    async def reported(used_ms: dict[str, int], besides: str | None) -> tuple[dict[str, float], float]:
        history, registry = History(tmp_path / "history.db"), Registry(tmp_path / "jobs.db")
        live = Live(Device(GpuConfig(1 << 30)), load_policy("fair"), None, history, registry, lambda: None)
        told: dict[str, float] = {}
        monkeypatch.setattr(live, "decide", lambda event: told.update({event.job_id: event.gpu_time_s}))
        for job_id, used in used_ms.items():
            job = LiveJob(job_id, "token", 0, msg.Register("job", ["python"], "/"), "key", 0.0, None, live)
            job.page, _ = Page.create()
            job.page.words[Word.BUSY_NS] = used * MS
            live.jobs[job_id] = live.holders[job_id] = job
        own = live._report_others(live.jobs[besides] if besides else None)
        return told, own[1]

    both = asyncio.run(reported({"1": 10, "2": 10}, None))
    assert both == ({"1": pytest.approx(0.005), "2": pytest.approx(0.005)}, 0.0)
    uneven = asyncio.run(reported({"1": 30, "2": 10}, "1"))
    assert uneven == ({"2": pytest.approx(0.0075)}, pytest.approx(0.0225))
    assert asyncio.run(reported({"1": 10, "2": 0}, "1")) == ({}, pytest.approx(0.010))


def test_shares_are_equal_also_where_one_has_a_lane_to_itself(serve):
    """Two lanes, three jobs: what each gets of the device is the same though one could run all the time."""
    service = serve("--policy", "fair", "--capacity", "800MiB")
    script = service.folder / "job.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(SOURCE)!r})\n"
        "from salus.client.lease import of_this_process\n"
        "lease = of_this_process()\n"
        # One core is the device: two that run at the same time are half as fast.
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "while True:\n"
        "    lease.begin()\n"
        "    sum(range(300_000))\n"
        "    lease.end()\n"
    )
    for name in "abc":
        service.salus_in_background(
            "run", "--name", name, "--persistent", "10MiB", "--ephemeral", "350MiB", "--", sys.executable, str(script)
        )
    eventually(lambda: len([1 for row in service.jobs().values() if row["iterations"] > 50]) == 3, "all run")
    assert sorted(row["lane"] for row in service.jobs().values()) in ([1, 1, 2], [1, 2, 2])
    before = {name: row["iterations"] for name, row in service.jobs().items()}
    eventually(lambda: service.jobs()["a"]["iterations"] > before["a"] + 200, "a while has passed")
    parts = [row["iterations"] - before[name] for name, row in service.jobs().items()]
    assert max(parts) / min(parts) < 1.25, parts
