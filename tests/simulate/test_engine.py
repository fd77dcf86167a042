"""The simulated GPU: what an iteration, a neighbour, a switch and a page-in cost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from salus.core.model import Footprint
from salus.plugins import load_policy
from salus.simulate.engine import Hardware, Outcome, Simulation
from salus.simulate.metrics import percentile, summarize
from salus.simulate.trace import TraceJob
from salus.simulate.workloads import CATALOGUE, generate

GB = 10**9
SMALL, WIDE = Footprint(GB, GB), Footprint(GB, 12 * GB)


def run(policy: str, *jobs: TraceJob, **hardware) -> Outcome:
    settings = {"gpus": 1, "memory_bytes": 16 * GB, "quantum_s": 1.0, "switch_s": 0.0, **hardware}
    return Simulation(jobs, lambda: load_policy(policy), Hardware(**settings), keep_segments=True).run()


def ends(outcome: Outcome) -> dict[str, float]:
    return {record.job.job_id: record.finished_s for record in outcome.records}


def test_a_job_alone_takes_its_own_time():
    outcome = run("fifo", TraceJob("a", 5.0, 100, 0.1, SMALL, utilization=0.3))
    assert ends(outcome)["a"] == pytest.approx(15)
    assert outcome.busy_s == pytest.approx(3)


@pytest.mark.parametrize(("utilization", "slower"), [(0.5, 1.0), (0.8, 1.6), (None, 2.0)])
def test_jobs_in_parallel_lanes_slow_each_other_down_once_the_gpu_is_full(utilization, slower):
    jobs = [TraceJob(name, 0.0, 100, 0.1, SMALL, utilization=utilization) for name in "ab"]
    assert ends(run("pack", *jobs)) == {name: pytest.approx(10 * slower) for name in "ab"}


@pytest.mark.parametrize(("side_by_side", "slower"), [(0.8, 2.0), (2.0, 1.0)])
def test_what_jobs_get_done_side_by_side_is_the_hardwares(side_by_side, slower):
    jobs = [TraceJob(name, 0.0, 100, 0.1, SMALL, utilization=0.8) for name in "ab"]
    assert ends(run("pack", *jobs, side_by_side=side_by_side)) == {name: pytest.approx(10 * slower) for name in "ab"}
    assert ends(run("fifo", *jobs, side_by_side=side_by_side))["a"] == pytest.approx(10), "alone it makes no difference"


def test_a_neighbour_that_leaves_lets_the_other_speed_up_again():
    jobs = [TraceJob("a", 0.0, 100, 0.1, SMALL), TraceJob("b", 0.0, 10, 0.1, SMALL)]
    assert ends(run("pack", *jobs)) == {"b": pytest.approx(2), "a": pytest.approx(11)}


def test_a_switch_happens_at_the_end_of_an_iteration():
    jobs = [TraceJob("long", 0.0, 100, 3.0, WIDE), TraceJob("short", 4.0, 1, 1.0, WIDE)]
    outcome = run("srtf", *jobs, quantum_s=0.0)
    assert ends(outcome)["short"] == pytest.approx(7), "the second iteration of the long job ends at 6"


def test_a_switch_costs_what_it_is_set_to():
    jobs = [TraceJob(name, 0.0, 10, 1.0, WIDE) for name in "ab"]
    outcome = run("rr", *jobs, quantum_s=0.0, switch_s=0.25)
    holders = [segment.job_id for segment in outcome.segments]
    switches = sum(before != after for before, after in pairwise(holders))
    assert switches >= 17, "nearly every boundary is a switch"
    assert max(ends(outcome).values()) == pytest.approx(20 + switches * 0.25)


def test_paging_takes_its_bytes_over_the_rate():
    jobs = [
        TraceJob("long", 0.0, 100, 1.0, Footprint(10 * GB, GB)),
        TraceJob("short", 10.0, 1, 1.0, Footprint(10 * GB, GB)),
    ]
    outcome = run("srtf", *jobs, quantum_s=0.0, page_bytes_per_s=GB)
    assert ends(outcome)["short"] == pytest.approx(10 + 1 + 10 + 1, abs=1.1)
    assert ends(outcome)["long"] == pytest.approx(ends(outcome)["short"] + 10 + 89, abs=1.1)


def test_iterations_in_which_nothing_is_decided_are_not_stepped_through():
    events = 0

    def count(_scheduler):
        nonlocal events
        events += 1

    jobs = [TraceJob("a", 0.0, 10**9, 0.001, SMALL), TraceJob("b", 0.0, 10**9, 0.001, SMALL)]
    Simulation(jobs, lambda: load_policy("pack"), Hardware(1, 16 * GB), on_event=count).run()
    assert events < 30


def test_the_same_trace_gives_the_same_history():
    jobs = generate(60, seed=3)
    first, second = (run("fair", *jobs, quantum_s=30.0, memory_bytes=16 * 2**30) for _ in range(2))
    assert first.segments == second.segments


def test_queuing_is_the_time_to_the_first_iteration():
    summary = summarize(run("fifo", TraceJob("a", 0.0, 10, 1.0, SMALL), TraceJob("b", 4.0, 10, 1.0, SMALL)))
    assert summary.avg_queuing_s == pytest.approx((0 + 6) / 2)
    assert summary.avg_jct_s == pytest.approx((10 + 16) / 2)
    assert summary.makespan_s == pytest.approx(20)
    assert summary.utilization == pytest.approx(1)


def test_percentiles_are_values_that_occurred():
    assert percentile([float(value) for value in range(1, 101)], 0.95) == 95
    assert percentile([7.0], 0.95) == 7


def test_the_catalogue_has_the_paper_s_workloads_and_all_fit_its_card():
    assert len(CATALOGUE) == 45
    for workload in CATALOGUE.values():
        total = workload.persistent_bytes + workload.ephemeral_bytes
        assert total < 16 * GB, workload.name
        assert workload.persistent_bytes <= 0.85 * GB, "the paper: 0.1 to 0.8 GB"


def test_a_generated_trace_is_reproducible_and_its_durations_have_a_heavy_tail():
    assert generate(50, seed=1) == generate(50, seed=1) != generate(50, seed=2)
    durations = sorted(job.duration_s for job in generate(5000, seed=1))
    assert sum(durations[-500:]) > 0.4 * sum(durations), "a tenth of the jobs is nearly half of the work"


needs = st.builds(Footprint, st.integers(0, 8 * GB), st.integers(0, 8 * GB))
jobs_strategy = st.lists(
    st.tuples(st.floats(0, 50), st.integers(1, 40), st.floats(0.05, 3), needs, st.floats(0, 1), st.integers(0, 2)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    jobs_strategy,
    st.sampled_from("fifo pack fair fair:by=memory rr srtf srtf:fill=off priority las".split()),
    st.sampled_from([0.0, 0.5, 5.0]),
    st.integers(1, 3),
)
def test_every_job_of_every_trace_finishes_and_no_sooner_than_it_could(listed, policy, quantum_s, gpus):
    jobs = [
        TraceJob(f"j{n}", submit, iterations, iteration_s, memory, utilization, priority=priority)
        for n, (submit, iterations, iteration_s, memory, utilization, priority) in enumerate(listed)
    ]
    hardware = Hardware(gpus, 16 * GB, quantum_s=quantum_s)
    check = lambda scheduler: scheduler.validate()  # noqa: E731
    outcome = Simulation(jobs, lambda: load_policy(policy), hardware, on_event=check).run()
    for record in outcome.records:
        assert record.jct_s >= record.job.duration_s * (1 - 1e-6)
    work = sum(job.duration_s * (1.0 if job.utilization is None else job.utilization) for job in jobs)
    assert outcome.busy_s == pytest.approx(work, rel=1e-3, abs=0.1), "no work is lost and none is done twice"
