"""What a job is held to need, from what it says and what is seen of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from salus.core import events as ev
from salus.core.model import Footprint, GpuConfig, JobSpec
from salus.core.policies.fair import Fair
from salus.core.scheduler import Scheduler
from salus.protocol import messages as msg
from salus.protocol.page import Page, Word
from salus.service.job import LiveJob
from salus.service.sizes import NOTABLE_BYTES, Sizes

GIB = 1 << 30


def after_page_out(needed: int, private: int, declared: int | None, **other: Any) -> int | None:
    """The persistent memory that the core is told of, of a job that it holds to need 6 GiB; None: nothing."""
    told: list[Any] = []
    core = SimpleNamespace(
        footprint=Footprint(6 * GIB, 2 * GIB, GIB),
        spec=SimpleNamespace(footprint=Footprint(declared or 0, 0)),
        wanted=other.get("wanted"),
    )
    live: Any = SimpleNamespace(
        device=SimpleNamespace(gpu=None), scheduler=SimpleNamespace(jobs={"1": core}), handle=told.append
    )
    job = LiveJob("1", "token", 0, msg.Register("job", ["python"], "/"), "key", 0.0, None, live)
    job.page, job.page_descriptor = Page.create()
    job.link = SimpleNamespace(suspended=other.get("suspended", False), close=lambda: None)  # type: ignore[assignment]
    job.page.words[Word.NEEDED_BYTES], job.page.words[Word.PRIVATE_BYTES] = needed, private

    async def run() -> None:
        Sizes(live, None).went_out(job)  # type: ignore[arg-type]

    asyncio.run(run())
    job.close()
    if not told:
        return None
    (event,) = told
    assert isinstance(event, ev.FootprintChanged)
    assert (event.footprint.ephemeral_bytes, event.footprint.internal_bytes) == (2 * GIB, GIB)
    return event.footprint.persistent_bytes


@pytest.mark.parametrize(
    ("needed", "private", "declared", "left"),
    [
        (5 * GIB, 4 * GIB, None, 5 * GIB),
        (4 * GIB, 5 * GIB, None, 5 * GIB),
        (4 * GIB, 4 * GIB, 5 * GIB, 5 * GIB),
        (6 * GIB - NOTABLE_BYTES // 2, 4 * GIB, None, None),
        (7 * GIB, 4 * GIB, None, None),
    ],
)
def test_a_job_comes_back_from_the_host_with_what_it_needed_or_is_known_to_need(needed, private, declared, left):
    assert after_page_out(needed, private, declared) == left


def test_one_that_waits_for_more_or_was_stopped_halfway_is_not_held_to_need_less():
    assert after_page_out(GIB, GIB, None) == GIB
    assert after_page_out(GIB, GIB, None, wanted=Footprint(7 * GIB, 2 * GIB)) is None
    assert after_page_out(GIB, GIB, None, suspended=True) is None


def test_a_job_that_runs_with_less_than_was_seen_of_it_and_asks_for_more_is_known_to_wait():
    """Or all others would wait for the end of an iteration that does not come to it."""
    scheduler = Scheduler(GpuConfig(8 * GIB, host_bytes=64 * GIB), Fair())
    for job_id in ("1", "2"):
        scheduler.handle(ev.JobArrived(JobSpec(job_id, Footprint(2 * GIB, GIB))), 0.0)
    for job_id in ("1", "2"):
        scheduler.handle(ev.JobReady(job_id), 0.0)
    core = scheduler.jobs["1"]
    scheduler.handle(ev.FootprintChanged("1", Footprint(2 * GIB, GIB, 3 * GIB)), 1.0)
    assert core.holds and core.wanted is not None and not core.stalled

    def handle(event: Any) -> None:
        scheduler.handle(event, 2.0)

    live: Any = SimpleNamespace(
        device=SimpleNamespace(gpu=None),
        scheduler=scheduler,
        handle=handle,
        leases=SimpleNamespace(settle=lambda: None),
    )
    job = LiveJob("1", "token", 0, msg.Register("job", ["python"], "/"), "key", 0.0, None, live)
    job.link = SimpleNamespace(wanted=(2 * GIB, 2 * GIB), close=lambda: None)  # type: ignore[assignment]
    job.measured = True

    async def run() -> None:
        Sizes(live, None).wanted(job)  # type: ignore[arg-type]

    asyncio.run(run())
    assert core.stalled
    assert core.wanted.covers(Footprint(2 * GIB, 2 * GIB, 3 * GIB))
    job.close()
