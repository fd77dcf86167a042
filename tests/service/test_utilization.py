"""How busy a job keeps the GPU, and what is made of it."""

from __future__ import annotations

import asyncio
import sqlite3
from types import SimpleNamespace
from typing import Any

import pytest

from salus.core.model import GpuConfig
from salus.plugins import load_policy
from salus.protocol import messages as msg
from salus.protocol.page import Page, Word
from salus.registry import Registry
from salus.service.devices import Device
from salus.service.gpu import Gpu, Nvml
from salus.service.history import History, PastRun
from salus.service.job import LiveJob
from salus.service.live import Live
from salus.service.mps import Mps
from salus.service.report import Report
from salus.service.utilization import (
    ENOUGH_LOOKS,
    FIRST_LOOKS,
    SLOWER,
    SMALLEST_SHARE,
    Activity,
    Alone,
    Measured,
    Turn,
    share_for,
)

GPU = Gpu("GPU-1", 0, "one", 80 << 30, 0)


@pytest.mark.parametrize("sms", [0.0, 0.001, 0.01, 0.03, 0.1, 0.2, 0.5, 1.0])
def test_with_its_share_a_job_is_hardly_slower_even_at_worst(sms):
    share = share_for(sms)
    part = 1.0 if share is None else share / 100
    assert (1 - sms) + sms / part <= 1 + SLOWER + 1e-9
    assert share is None or SMALLEST_SHARE <= share < 100


def test_shares_are_small_for_those_who_need_little_and_none_for_those_who_need_all():
    assert share_for(0.0) == SMALLEST_SHARE
    assert share_for(0.02) == 50
    assert share_for(0.78) is None


def test_the_first_seconds_do_not_count():
    measured = Measured()
    for _ in range(FIRST_LOOKS):
        measured.add(Activity(1.0, 1.0))
    for _ in range(ENOUGH_LOOKS - 1):
        measured.add(Activity(0.5, 0.1))
    assert measured.mean() is None
    measured.add(Activity(0.5, 0.1))
    assert measured.mean() == Activity(0.5, pytest.approx(0.1))


def test_only_one_that_had_the_gpu_to_itself_and_worked_was_alone():
    alone = Alone()
    looks = [
        (Turn("1", 1, 5), False),  # since when is not known
        (Turn("1", 1, 9), True),
        (Turn("1", 1, 9), False),  # it sat there
        (Turn("1", 2, 12), False),  # somebody else ran in between
        (None, False),
        (Turn("1", 2, 20), False),
        (Turn("2", 2, 30), False),
        (Turn("2", 2, 31), True),
    ]
    for turn, expected in looks:
        assert alone.look(turn) is expected, turn


def a_live(folder: Any, history: History, mps: bool) -> Live:
    live = Live(
        Device(GpuConfig(8 << 30), GPU), load_policy("fair"), None, history, Registry(folder / "jobs.db"), lambda: None
    )
    live.mps = Mps(folder, "GPU-1") if mps else None
    return live


def a_job(live: Live, sm_share: int | None = None) -> LiveJob:
    asked = msg.Register("job", ["python"], "/", sm_share=sm_share)
    job = LiveJob("1", "token", 0, asked, "key", 0.0, None, live)
    job.worker = SimpleNamespace(pid=7)  # type: ignore[assignment]
    job.page, job.page_descriptor = Page.create()
    job.report = Report(job.page, lambda _: None)
    live.jobs["1"] = live.leases.holders["1"] = job
    return job


def test_what_is_seen_of_a_job_decides_its_share_the_next_time(tmp_path):
    async def shares() -> list[int | None]:
        history = History(tmp_path / "history.db")
        live = a_live(tmp_path, history, mps=True)
        job = a_job(live)
        jobs = [job]
        found = [live.sizes.sm_share(job)]
        assert job.page is not None
        for number in range(FIRST_LOOKS + ENOUGH_LOOKS + 2):
            job.page.words[Word.ITERATIONS] = 10 * number
            # In between, somebody outside has the GPU open too.
            live.sizes.activity_seen(Activity(0.3, 0.02), {7: 100, **({8: 1} if number == 1 else {})})
        live.sizes.activity_seen(Activity(1.0, 1.0), {7: 100, 8: 1})
        assert job.activity is not None and job.activity.mean() is None, "two looks were not its own"
        for number in range(50, 60):
            job.page.words[Word.ITERATIONS] = 10 * number
            live.sizes.activity_seen(Activity(0.3, 0.02), {7: 100})
        job.final = dict.fromkeys(("persistent_bytes", "ephemeral_bytes", "internal_bytes"), 1)
        core: Any = SimpleNamespace(iterations_done=10, attained_s=1.0)
        live.sizes.remember(job, core, 0)
        found.append(live.sizes.sm_share(job))
        # A run with that share measures nothing new, and what is known stays known.
        job.sm_share = found[-1]
        live.sizes.remember(job, core, 0)
        jobs += [a_job(live, sm_share=15), a_job(live)]
        found += [live.sizes.sm_share(job), live.sizes.sm_share(jobs[1])]
        live.mps = None
        found.append(live.sizes.sm_share(jobs[2]))
        for made in jobs:
            made.close()
        history.close()
        return found

    assert asyncio.run(shares()) == [None, 50, 50, 15, None]


def test_a_history_from_before_is_gone_on_with(tmp_path):
    old = sqlite3.connect(tmp_path / "history.db")
    old.execute(
        "CREATE TABLE runs (command_key TEXT, name TEXT, finished_at REAL, exit_code INTEGER, iterations INTEGER, "
        "gpu_time_s REAL, persistent_bytes INTEGER, ephemeral_bytes INTEGER, internal_bytes INTEGER)"
    )
    old.execute("INSERT INTO runs VALUES ('key', 'job', 1.0, 0, 5, 2.0, 1, 2, 3)")
    old.commit()
    old.close()
    history = History(tmp_path / "history.db")
    assert history.last("key") == PastRun(5, 2.0, 1, 2, 3)
    history.add("key", "job", 0, PastRun(5, 2.0, 1, 2, 3, 0.5, 0.1))
    assert history.last("key") == PastRun(5, 2.0, 1, 2, 3, 0.5, 0.1)
    history.close()


class Counters:
    """As much of NVML as is asked for; the counters of a GPU go up."""

    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self, has_counters: bool, broken: bool = False) -> None:
        self._has, self._broken, self.samples, self.freed = has_counters, broken, 0, 0

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlGpmQueryDeviceSupport(self, _handle):
        return SimpleNamespace(isSupportedDevice=self._has)

    def nvmlDeviceGetUtilizationRates(self, _handle):
        return SimpleNamespace(gpu=40)

    def nvmlGpmSampleAlloc(self):
        self.samples += 1
        return self.samples

    def nvmlGpmSampleGet(self, _handle, _sample):
        pass

    def nvmlGpmSampleFree(self, _sample):
        self.freed += 1

    def c_nvmlGpmMetricsGet_t(self):
        return SimpleNamespace(metrics=[SimpleNamespace(), SimpleNamespace()])

    def nvmlGpmMetricsGet(self, asked):
        for metric in asked.metrics:
            metric.nvmlReturn = int(self._broken)
            metric.value = 0.0 if self._broken else {1: 90.0, 2: 30.0}[metric.metricId]


def test_a_gpu_with_counters_tells_more_than_one_without():
    nvml = Nvml()
    nvml._nvml = counters = Counters(has_counters=True)
    assert nvml.activity(GPU) is None, "since when is not known"
    assert nvml.activity(GPU) == Activity(0.9, 0.3) and nvml.activity(GPU) == Activity(0.9, 0.3)
    assert counters.samples - counters.freed == 1, "samples are given back"
    nvml._nvml = Counters(has_counters=False)
    assert nvml.activity(GPU) == Activity(0.4, 0.4)
    nvml._nvml = object()
    assert nvml.activity(GPU) is None
    nvml._nvml, nvml._samples = Counters(has_counters=True, broken=True), {}
    assert [nvml.activity(GPU), nvml.activity(GPU)] == [None, None], "what cannot be read is not nothing"
