"""Several GPUs: where a job goes, and that nobody waits while a GPU stands idle."""

from __future__ import annotations

import pytest

from salus.core import events as ev
from salus.core.actions import AdmitJob, GrantLease, RefuseJob
from salus.core.model import Footprint, GpuConfig, JobSpec
from salus.core.placement import Cluster
from salus.core.scheduler import Scheduler
from salus.errors import RequestRejected
from tests.core.world import GIB, footprint, make_policy


def cluster(*capacities: int, policy: str = "fifo") -> Cluster:
    return Cluster([Scheduler(GpuConfig(capacity * GIB), make_policy(policy)) for capacity in capacities])


def arrive(cluster: Cluster, name: str, needs: Footprint, **more) -> int:
    gpu = more.pop("gpu", None)
    cluster.arrive(JobSpec(name, needs, **more), 0.0, gpu)
    cluster.handle(ev.JobReady(name), 0.0)
    return cluster.gpu_of(name)


def test_jobs_spread_over_the_gpus_that_have_room():
    both = cluster(16, 16)
    assert [arrive(both, name, footprint(1, 8)) for name in "ab"] == [0, 1]


def test_a_job_goes_to_a_gpu_it_fits_on():
    mixed = cluster(8, 40)
    assert arrive(mixed, "large", footprint(2, 20)) == 1
    assert arrive(mixed, "small", footprint(1, 4)) == 0


def test_a_job_too_large_for_all_of_them_is_refused():
    (placed,) = cluster(8, 16).arrive(JobSpec("huge", footprint(2, 20)), 0.0)
    assert isinstance(placed.action, RefuseJob)


def test_a_job_that_names_a_gpu_goes_there_and_stays_there():
    both = cluster(16, 16)
    assert arrive(both, "a", footprint(1, 14), gpu=1) == 1
    assert arrive(both, "b", footprint(1, 14), gpu=1) == 1
    assert arrive(both, "c", footprint(1, 14)) == 0
    both.handle(ev.JobLeft("c"), 1.0)
    assert both.gpu_of("b") == 1
    with pytest.raises(RequestRejected, match="no GPU 2; there are 2"):
        arrive(both, "d", footprint(1, 1), gpu=2)


def test_work_is_balanced_by_its_declared_length():
    both = cluster(16, 16)
    arrive(both, "long", footprint(8, 8), length_s=1000)
    arrive(both, "short", footprint(8, 8), length_s=10)
    assert arrive(both, "next", footprint(8, 8), length_s=10) == 1


def test_a_gpu_that_runs_out_of_work_takes_a_waiting_job_over():
    both = cluster(16, 16)
    for name in ("a", "b", "c", "d"):
        arrive(both, name, footprint(8, 8))
    waiting = [name for name in ("c", "d") if both.gpu_of(name) == 0]
    done = both.handle(ev.JobLeft("b"), 1.0)
    done += both.handle(ev.LaneReleased(1), 1.0, gpu=1)
    assert both.schedulers[1].jobs
    first_taken = both.handle(ev.JobLeft(next(iter(both.schedulers[1].jobs))), 2.0)
    first_taken += both.handle(ev.LaneReleased(2), 2.0, gpu=1)
    orders = [placed.action for placed in first_taken if placed.gpu == 1]
    assert any(isinstance(order, AdmitJob) and order.job_id in waiting for order in orders)
    assert any(isinstance(order, GrantLease) for order in orders)
    for scheduler in both.schedulers:
        scheduler.validate()


def test_events_of_unknown_jobs_and_of_no_gpu_are_rejected():
    both = cluster(16, 16)
    with pytest.raises(RequestRejected, match="no job nobody"):
        both.handle(ev.JobReady("nobody"), 0.0)
    with pytest.raises(RequestRejected, match="number of the GPU"):
        both.handle(ev.TimerFired(), 0.0)
    arrive(both, "a", footprint(1, 1))
    with pytest.raises(RequestRejected, match="already"):
        arrive(both, "a", footprint(1, 1))


def test_a_waiting_job_that_is_refused_is_forgotten_here_too():
    both = cluster(16, 16)
    for name in ("a", "b", "c"):
        arrive(both, name, footprint(8, 8))
    (placed,) = both.handle(ev.FootprintChanged("c", footprint(30, 1)), 1.0)
    assert isinstance(placed.action, RefuseJob)
    with pytest.raises(RequestRejected, match="no job c"):
        both.gpu_of("c")
    both.arrive(JobSpec("c", footprint(1, 1)), 1.0)


def test_a_pinned_job_at_the_head_of_the_queue_does_not_hide_those_behind_it():
    both = cluster(16, 16)
    arrive(both, "a", footprint(8, 8), gpu=0)
    arrive(both, "b", footprint(8, 8), gpu=1)
    arrive(both, "pinned", footprint(8, 8), gpu=0)
    arrive(both, "free", footprint(8, 8), length_s=5.0)
    if both.gpu_of("free") == 1:
        both.handle(ev.JobLeft("a"), 1.0)
        both.handle(ev.LaneReleased(1), 1.0, gpu=0)
    else:
        both.handle(ev.JobLeft("b"), 1.0)
        both.handle(ev.LaneReleased(1), 1.0, gpu=1)
        assert both.gpu_of("free") == 1
    assert both.gpu_of("pinned") == 0


def test_a_gpu_takes_over_as_many_as_fit_with_what_was_measured_of_them():
    both = cluster(16, 16)
    arrive(both, "a", footprint(8, 8), gpu=0)
    arrive(both, "b", footprint(8, 8), gpu=1)
    for number in range(6):
        arrive(both, f"small{number}", footprint(4, 4), length_s=10.0)
    both.handle(ev.FootprintChanged("small0", footprint(1, 1)), 0.5)
    waiting = {0: [], 1: []}
    for number in range(6):
        waiting[both.gpu_of(f"small{number}")].append(f"small{number}")
    both.handle(ev.JobLeft("b"), 1.0)
    both.handle(ev.LaneReleased(1), 1.0, gpu=1)
    for name in waiting[1]:
        both.handle(ev.JobLeft(name), 2.0)
        for lane in range(2, 12):
            both.handle(ev.LaneReleased(lane), 2.0, gpu=1)
    assert len(both.schedulers[1].jobs) >= 2
    moved = both.schedulers[both.gpu_of("small0")].jobs["small0"] if "small0" in waiting[0] else None
    assert moved is None or moved.footprint == footprint(1, 1)
    for scheduler in both.schedulers:
        scheduler.validate()
