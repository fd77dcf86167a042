"""What a job is held to need, from what it says and what is seen of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from salus.core import actions as act
from salus.core import events as ev
from salus.core.model import Footprint, GpuConfig, JobSpec, Phase
from salus.core.policies.fair import Fair
from salus.core.scheduler import Scheduler
from salus.protocol import messages as msg
from salus.protocol.page import Page, Word
from salus.service.job import LiveJob
from salus.service.live import Live
from salus.service.report import Report
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
    job.report = Report(job.page, lambda _: None)
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


class Driven:
    """A core, `Sizes`, and of `Live` what concerns the memory of jobs; the clock is ours."""

    admit = Live.admit

    def __init__(self, config: GpuConfig) -> None:
        self.scheduler = Scheduler(config, Fair())
        self.device = SimpleNamespace(gpu=None)
        self.pager = SimpleNamespace(host_takes_all=lambda: True)
        self.leases = SimpleNamespace(settle=lambda: None)
        self.may_not_grow = lambda _uid, _more_bytes: None
        self.jobs: dict[str, LiveJob] = {}
        self.sizes = Sizes(self, None)  # type: ignore[arg-type]
        self._isolate = lambda *_: None
        self._loop = SimpleNamespace(call_soon=lambda call, *args: self._soon.append((call, args)))
        self._now, self._soon, self._answers = 0.0, [], []

    def arrive(self, job_id: str, *sizes: int, ready: bool = True) -> LiveJob:
        self.jobs[job_id] = job = LiveJob(
            job_id, "token", 0, msg.Register("job", ["python"], "/"), "key", 0.0, None, self  # type: ignore[arg-type]
        )  # fmt: skip
        job.measured = True
        job.link = SimpleNamespace(  # type: ignore[assignment]
            wanted=None, suspended=False, enter_lane=lambda _: None, close=lambda: None,
            set_quota=lambda *has: has >= (job.link.wanted or has) and setattr(job.link, "wanted", None),
        )  # fmt: skip
        self.handle(ev.JobArrived(JobSpec(job_id, Footprint(*sizes))))
        if ready:
            self.handle(ev.JobReady(job_id))
        return job

    def leave(self, job_id: str) -> None:
        del self.jobs[job_id]
        self.handle(ev.JobLeft(job_id))

    def handle(self, event: Any) -> None:
        for action in self.scheduler.handle(event, self._now):
            match action:
                case act.AdmitJob(job_id) | act.AllowGrowth(job_id):
                    self.admit(self.jobs[job_id])  # type: ignore[arg-type]
                case act.CloseLane(lane_id):
                    self._answers.append(ev.LaneReleased(lane_id))
                case act.PageOut(job_id):
                    self._answers.append(ev.PageOutFinished(job_id))
                case act.PageIn(job_id):
                    self._answers.append(ev.PageInFinished(job_id))
        while self._soon:
            call, args = self._soon.pop(0)
            call(*args)

    def go_on(self, seconds: float) -> None:
        until = self._now + seconds
        while self._now < until:
            self._now += 0.1
            event = self._answers.pop(0) if self._answers else ev.TimerFired()
            self.handle(event)
            if isinstance(event, ev.PageInFinished | ev.PageOutFinished):
                self.sizes.wanted(self.jobs[event.job_id])  # as `Pager.paged` does


def driven(config: GpuConfig, story: Callable[[Driven], None]) -> None:
    async def run() -> None:
        live = Driven(config)
        story(live)
        for job in live.jobs.values():
            job.close()

    asyncio.run(run())


def test_a_job_that_runs_with_less_than_was_seen_of_it_and_asks_for_more_is_known_to_wait():
    """Or all others would wait for the end of an iteration that does not come to it."""

    def story(live: Driven) -> None:
        job = live.arrive("1", 2 * GIB, GIB)
        live.arrive("2", 2 * GIB, GIB)
        core = live.scheduler.jobs["1"]
        live.handle(ev.FootprintChanged("1", Footprint(2 * GIB, GIB, 3 * GIB)))
        assert core.holds and core.wanted is not None and not core.stalled
        job.link.wanted = (2 * GIB, 2 * GIB)
        live.sizes.wanted(job)
        assert core.stalled
        assert core.wanted.covers(Footprint(2 * GIB, 2 * GIB, 3 * GIB))

    driven(GpuConfig(8 * GIB, host_bytes=64 * GIB), story)


def test_one_that_loses_its_lane_while_it_loads_gets_its_memory_when_there_is_some():
    def story(live: Driven) -> None:
        live.arrive("runs", 100, 100)
        loads = live.arrive("loads", 50, 100, ready=False)
        loads.link.wanted = (112, 0)
        live.sizes.wanted(loads)
        assert live.scheduler.jobs["loads"].wanted is not None
        live.arrive("waits", 60, 80)
        # Idle, as far as the core knows, it has to leave its lane meanwhile.
        for left in ("runs", "waits"):
            live.go_on(4)
            live.leave(left)
        live.go_on(4)
        assert loads.link.wanted is None, "it is alone and still waits in its allocation"

    driven(GpuConfig(400, host_bytes=4 * GIB, idle_patience_s=2.0), story)


def test_one_on_the_host_that_more_was_seen_of_and_that_asks_for_memory_wants_to_come_back():
    def story(live: Driven) -> None:
        live.arrive("other", 96, 96, 200)
        job = live.arrive("seen", 64, 48, ready=False)
        live.handle(ev.FootprintChanged("seen", Footprint(64, 48, 340)))
        live.go_on(4)
        core = live.scheduler.jobs["seen"]
        assert core.phase is Phase.PAGED_OUT and core.wanted is not None
        job.link.wanted = (128, 0)
        live.sizes.wanted(job)
        live.go_on(1)
        live.leave("other")
        live.go_on(4)
        assert job.link.wanted is None, "it is alone and still waits in its allocation"

    driven(GpuConfig(600, host_bytes=70), story)
