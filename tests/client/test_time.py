"""What counts as a job's time on the device: iterations, and with a GPU what it does after the boundary."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from salus.client import lease as lease_module
from salus.client.arena import LEFT
from salus.client.lease import Lease
from salus.protocol.page import PAUSE_NS, Page, Word

MS = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 1000 * MS

    def __call__(self) -> int:
        return self.now


class Gpu:
    """Memory that can be left at once; the device needs 40 ms more when it is waited for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def will_yield(self) -> None:
        pass

    def leave(self, word: int, ticket: int, wants_more: bool) -> tuple[int, int]:
        self._clock.now += 40 * MS
        return LEFT, self._clock.now

    def pass_on(self, word: int, ticket: int, wants_more: bool) -> bool:
        return False


@pytest.fixture
def job(monkeypatch) -> Iterator[tuple[Lease, Page, Clock]]:
    clock = Clock()
    monkeypatch.setattr(lease_module, "_now_ns", clock)
    page, descriptor = Page.create()
    os.close(descriptor)
    lease = Lease(Path("/nowhere"), "1", "token")
    lease._words, lease._attached, lease._holding = page.words, True, True
    monkeypatch.setattr(lease, "_send", lambda _message: None)
    yield lease, page, clock
    lease._attached = False
    lease._words = memoryview(bytearray(4096)).cast("Q")
    page.close()


def iterate(lease: Lease, clock: Clock, launch_ms: int, then_ms: int) -> None:
    """The processor is done with an iteration long before the GPU is; then the script waits for its loss."""
    lease.begin()
    clock.now += launch_ms * MS
    lease.end()
    clock.now += then_ms * MS


def test_what_a_gpu_does_after_the_boundary_is_the_jobs_time(job: Any) -> None:
    lease, page, clock = job
    lease._memory = Gpu(clock)
    for _ in range(3):
        iterate(lease, clock, launch_ms=5, then_ms=45)
    assert page.used(clock.now) == (3, 150 * MS), "also when nobody has asked for the lease"
    lease.begin()
    assert page.used(clock.now) == (3, 150 * MS)


def test_time_ends_with_the_lease(job: Any) -> None:
    lease, page, clock = job
    lease._memory = Gpu(clock)
    iterate(lease, clock, launch_ms=5, then_ms=5)
    with lease._lock:
        assert lease._yield(wants_more=False)
    clock.now += 1000 * MS
    assert page.used(clock.now) == (1, 50 * MS), "40 of it while the device was waited for"
    lease._holding = True
    with lease._lock:
        assert lease._yield(wants_more=False)
    assert page.used(clock.now) == (1, 50 * MS), "a lease that was not used"


def test_of_a_long_pause_a_part_counts(job: Any) -> None:
    lease, page, clock = job
    lease._memory = Gpu(clock)
    iterate(lease, clock, launch_ms=5, then_ms=3_600_000)
    assert page.used(clock.now) == (1, PAUSE_NS + 5 * MS)
    lease.begin()
    assert page.used(clock.now) == (1, PAUSE_NS + 5 * MS)


def test_on_the_processor_an_iteration_is_over_when_it_ends(job: Any) -> None:
    lease, page, clock = job
    iterate(lease, clock, launch_ms=5, then_ms=45)
    iterate(lease, clock, launch_ms=5, then_ms=45)
    assert page.used(clock.now) == (2, 10 * MS)
    assert page.words[Word.BEGAN_NS] == 0


@pytest.mark.parametrize("works_on_ms", [0, 0.1, 30])
def test_a_script_whose_device_has_just_finished_has_a_moment_to_come_along(job: Any, works_on_ms: float) -> None:
    """It looks at its loss, long after the boundary; whoever waits begins to wait at that very moment."""
    lease, _, clock = job
    waits = [works_on_ms * MS]
    lease._memory = gpu = Gpu(clock)

    def wait() -> None:
        clock.now += int(waits.pop() if waits else 0)

    gpu.wait = wait  # type: ignore[attr-defined]
    iterate(lease, clock, launch_ms=5, then_ms=45)
    lease._wait_for_device()
    assert not lease._give_up_if_idle() and lease._holding
    clock.now += 2 * MS
    lease._wait_for_device()
    assert not lease._give_up_if_idle() and lease._holding
    clock.now += 2 * MS
    lease._wait_for_device()
    assert lease._give_up_if_idle() and not lease._holding, "but it sits there"
