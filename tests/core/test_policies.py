"""What each policy promises, seen through whole simulated histories and small ones."""

from __future__ import annotations

from itertools import pairwise

import pytest

from salus.core import events as ev
from salus.core.model import Footprint, Job, JobSpec
from salus.core.policies import Policy, build
from salus.core.policies.fair import OWED_S
from salus.errors import RequestRejected
from salus.simulate.engine import Hardware, Outcome, Simulation
from salus.simulate.trace import TraceJob
from tests.core.world import CLASSES, GIB, World, footprint, make_policy


def job(name: str, seconds: float, *, submit: float = 0.0, needs: Footprint | None = None, **more) -> TraceJob:
    iteration_s = more.pop("iteration_s", 0.1)
    return TraceJob(name, submit, round(seconds / iteration_s), iteration_s, needs or footprint(1, 2), **more)


def simulate(policy: str, *jobs: TraceJob, quantum_s: float = 1.0, host_bytes: int | None = None) -> Outcome:
    hardware = Hardware(1, 16 * GIB, quantum_s=quantum_s, switch_s=0.0, host_bytes=host_bytes)
    check = lambda scheduler: scheduler.validate()  # noqa: E731
    return Simulation(jobs, lambda: make_policy(policy), hardware, keep_segments=True, on_event=check).run()


def service(outcome: Outcome, until: float) -> dict[str, float]:
    """Seconds of the GPU that each job had by then; several that ran at the same time had equal parts of it."""
    had = dict.fromkeys((record.job.job_id for record in outcome.records), 0.0)
    running: set[str] = set()
    before = 0.0
    ends = [(segment.end_s, False, segment.job_id) for segment in outcome.segments]
    starts = [(segment.start_s, True, segment.job_id) for segment in outcome.segments]
    for at, begins, job_id in sorted(ends + starts):
        for other in running:
            had[other] += (min(at, until) - min(before, until)) / len(running)
        before = at
        (running.add if begins else running.discard)(job_id)
    return had


def occupied(outcome: Outcome, until: float) -> dict[str, float]:
    """Seconds for which each job ran by then, whoever ran beside it."""
    had = dict.fromkeys((record.job.job_id for record in outcome.records), 0.0)
    for segment in outcome.segments:
        had[segment.job_id] += max(0.0, min(segment.end_s, until) - segment.start_s)
    return had


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


WIDE = footprint(1, 13)
"""Two of these share one lane."""


@pytest.mark.parametrize("needs", [footprint(1, 2), WIDE], ids=["own lanes", "one lane"])
def test_fair_gives_one_two_four_as_one_two_four(needs):
    jobs = [job(name, 1000, needs=needs, weight=weight) for name, weight in (("a", 1), ("b", 2), ("c", 4))]
    had = service(simulate("fair", *jobs), until=700)
    assert had["b"] / had["a"] == pytest.approx(2, rel=0.05)
    assert had["c"] / had["a"] == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize("policy", ["fair", "fair:by=memory", "fair:by=user", "priority", "las", "rr"])
def test_lanes_do_not_wait_for_one_another_while_jobs_in_them_take_turns(policy):
    # Two lanes with two jobs each, which leave one another half of the GPU.
    jobs = [
        job(name, 100, needs=footprint(1, 5), iteration_s=iteration_s, utilization=0.5)
        for name, iteration_s in zip("abcd", (0.02, 0.021, 0.022, 0.023), strict=True)
    ]
    outcome = simulate(policy, *jobs, quantum_s=0.02)
    assert max(record.finished_s for record in outcome.records) < 205


def test_fair_holds_across_lanes_of_different_sizes():
    jobs = [job("alone", 1000, needs=footprint(1, 3))]
    jobs += [job(name, 1000, needs=footprint(1, 8)) for name in ("b", "c", "d")]
    had = service(simulate("fair", *jobs), until=600)
    assert jain(list(had.values())) > 0.99, "a job with a lane of its own pauses for those that share one"


def test_fair_lets_a_newcomer_share_at_once_without_making_up_for_the_past():
    jobs = [job("old", 1000, needs=WIDE), job("new", 1000, needs=WIDE, submit=300)]
    outcome = simulate("fair", *jobs)
    had = {name: value - service(outcome, 300)[name] for name, value in service(outcome, 500).items()}
    assert had["old"] == pytest.approx(had["new"], rel=0.03)


def test_fair_by_memory_equalizes_memory_times_time():
    small, large = footprint(1, 2), footprint(3, 6)
    had = occupied(simulate("fair:by=memory", job("small", 900, needs=small), job("large", 900, needs=large)), 600)
    assert had["small"] * 3 == pytest.approx(had["large"] * 9, rel=0.05)


def test_fair_gives_back_what_a_job_fell_behind_by_while_others_had_the_memory():
    # What cannot be paged leaves room for one or two of the large ones at a time.
    sizes = [footprint(0.05, 0.03, 1.2), footprint(0.15, 0.07, 1.2), footprint(0.3, 0.1, 1.2), footprint(0.6, 0.2, 1.2)]
    jobs = [job(f"{n}", 30, needs=sizes[n % 4], iteration_s=0.02, utilization=0.5) for n in range(12)]
    outcome = simulate("fair:by=memory,patience=1", *jobs, quantum_s=0.1)
    had, before = occupied(outcome, 60), occupied(outcome, 10)
    parts = [(had[one.job_id] - before[one.job_id]) * one.footprint.total_bytes for one in jobs]
    assert jain(parts) > 0.97
    assert sum(record.paged_out for record in outcome.records) > 100, "or nothing was shown"


def test_fair_owes_something_to_those_who_waited_for_memory_and_nothing_to_those_who_had_nothing_to_do():
    policy = make_policy("fair")
    kept_out, idle, runs = (
        Job(JobSpec(name, footprint(1, 2)), arrival, 0.0, footprint(1, 2), True, None)
        for arrival, name in enumerate(("kept out", "idle", "runs"))
    )

    def mark(one):
        return policy.lease_order(one)[0]

    for one in (kept_out, idle, runs):
        policy.on_arrived(one)
        policy.on_ready(one)
    policy.on_competing(runs)
    policy.on_served(runs, 3.0, 1)
    policy.on_ready(idle)
    for one in (kept_out, idle):
        policy.on_competing(one)
    assert mark(idle) == mark(runs) == 3.0
    assert mark(kept_out) == 0.0
    # But not for hours.
    policy.on_resting(kept_out)
    policy.on_served(runs, 10_000.0, 1)
    policy.on_served(idle, 10_000.0, 1)
    policy.on_competing(kept_out)
    assert mark(kept_out) == mark(runs) - OWED_S


def test_jobs_that_have_not_run_get_memory_as_they_came_under_fair_and_in_no_other_order():
    policy = make_policy("fair")
    runs, first, second = (
        Job(JobSpec(name, footprint(1, 2)), arrival, 0.0, footprint(1, 2), True, None)
        for arrival, name in enumerate(("runs", "first", "second"))
    )
    policy.on_arrived(runs)
    policy.on_competing(runs)
    for one in (first, second):
        policy.on_served(runs, 3.0, 1)
        policy.on_arrived(one)
    before = [policy.memory_order(one) for one in (first, second)]
    assert before == sorted(before)
    policy.on_served(runs, 3.0, 1)
    policy.on_ready(first)
    assert [policy.memory_order(one) for one in (first, second)] == before, "who is ready first is no matter"
    assert policy.lease_order(first) > policy.lease_order(second)


def test_nobody_is_displaced_for_what_another_gives_up_anyway():
    small = job("small", 200, needs=footprint(0.5, 0.5), iteration_s=0.02)
    large = [job(f"large {n}", 30, needs=footprint(9, 2), iteration_s=0.02) for n in range(8)]
    outcome = simulate("fair:patience=1", small, *large, quantum_s=0.1)
    turns = sorted((one.start_s, one.end_s) for one in outcome.segments if one.job_id == "small" and one.start_s < 200)
    longest = max(after[0] - before[1] for before, after in pairwise(turns))
    assert longest <= OWED_S + 1, "those that come back are owed no more"
    assert sum(service(outcome, 200).values()) == pytest.approx(200, rel=0.02), "and the GPU is never idle"


def test_round_robin_equalizes_iterations_not_time():
    jobs = [job("quick", 300, needs=WIDE, iteration_s=0.1), job("slow", 300, needs=WIDE, iteration_s=0.3)]
    had = service(simulate("rr", *jobs, quantum_s=0.0), until=200)
    assert had["quick"] / 0.1 == pytest.approx(had["slow"] / 0.3, rel=0.05)


def test_fifo_runs_the_oldest_alone_to_its_end():
    outcome = simulate("fifo", job("a", 10), job("b", 5, submit=1), job("c", 5, submit=2))
    assert [(s.job_id, s.start_s, s.end_s) for s in outcome.segments] == [
        ("a", 0, pytest.approx(10)),
        ("b", pytest.approx(10), pytest.approx(15)),
        ("c", pytest.approx(15), pytest.approx(20)),
    ]


def test_pack_runs_all_that_fit_at_once_and_the_others_in_the_order_of_arrival():
    jobs = [job(name, 10, needs=footprint(1, 6), utilization=0.4) for name in ("a", "b")]
    jobs += [job("c", 10, needs=footprint(1, 6), utilization=0.4), job("d", 10, needs=footprint(1, 6), utilization=0.4)]
    started = {record.job.job_id: record.started_s for record in simulate("pack", *jobs).records}
    assert (started["a"], started["b"]) == (0, 0)
    assert started["c"] == started["d"] == pytest.approx(10)


def test_srtf_lets_a_short_job_run_before_a_long_one_that_came_first():
    outcome = simulate("srtf", job("long", 100, needs=WIDE), job("short", 5, needs=WIDE, submit=10))
    ends = {record.job.job_id: record.finished_s for record in outcome.records}
    assert ends["short"] == pytest.approx(15, abs=0.2)
    assert ends["long"] == pytest.approx(105, abs=0.2)


def test_srtf_pages_a_long_job_out_for_a_short_one_that_could_run_alone():
    outcome = simulate(
        "srtf", job("long", 100, needs=footprint(10, 4)), job("short", 5, needs=footprint(10, 4), submit=10)
    )
    records = {record.job.job_id: record for record in outcome.records}
    assert records["long"].paged_out == 1
    assert records["short"].jct_s < 8
    assert records["long"].jct_s < 110


def test_srtf_takes_a_job_of_unknown_length_to_be_as_long_as_it_has_run():
    world = World(policy="srtf")
    world.arrive("known", footprint(1, 13), length_s=50)
    world.arrive("unknown", footprint(1, 13))
    world.iterate("known")
    assert world.running() == ["unknown"], "it starts out short"
    for _ in range(60):
        if "unknown" in world.running():
            world.iterate("unknown", gpu_time_s=1.0)
            world.fire_timer()
    assert world.running() == ["known"], "and gives way when it turns out not to be"


def test_srtf_fills_what_the_shortest_leaves_idle_and_with_fill_off_does_not():
    jobs = [job("a", 10, utilization=0.5), job("b", 20, utilization=0.7), job("c", 30, utilization=0.4)]
    started = {record.job.job_id: record.started_s for record in simulate("srtf", *jobs).records}
    assert started == {"a": 0, "b": pytest.approx(10), "c": 0}
    started = {record.job.job_id: record.started_s for record in simulate("srtf:fill=off", *jobs).records}
    assert started == {"a": 0, "b": pytest.approx(10), "c": pytest.approx(30)}


def test_a_job_of_unknown_utilization_is_not_run_beside_another():
    started = {r.job.job_id: r.started_s for r in simulate("srtf", job("a", 10), job("b", 20, utilization=0.1)).records}
    assert started == {"a": 0, "b": pytest.approx(10)}


def test_priority_is_strict_preemptive_and_fair_inside_a_level():
    jobs = [job("low", 100, needs=WIDE), job("high", 20, needs=WIDE, submit=10, priority=5)]
    jobs.append(job("high too", 20, needs=WIDE, submit=10, priority=5))
    outcome = simulate("priority", *jobs)
    at_ten, at_thirty = service(outcome, 10.1), service(outcome, 30)
    assert at_thirty["low"] - at_ten["low"] < 1.2
    assert at_thirty["high"] == pytest.approx(at_thirty["high too"], abs=1.2)


def test_priority_takes_the_memory_of_less_urgent_jobs():
    jobs = [job("low", 50, needs=footprint(10, 4)), job("high", 5, needs=footprint(10, 4), submit=10, priority=1)]
    records = {record.job.job_id: record for record in simulate("priority", *jobs).records}
    assert records["high"].queuing_s < 2.5


def test_las_serves_newcomers_first_without_knowing_any_length():
    jobs = [job("old", 300, needs=WIDE), job("new", 20, needs=WIDE, submit=100)]
    records = {record.job.job_id: record for record in simulate("las", *jobs).records}
    assert records["new"].jct_s < 23


@pytest.mark.parametrize("policy", ["fair:patience=60", "fair:by=user,patience=60", "rr:patience=60", "las"])
def test_nobody_starves_behind_jobs_that_hardly_ever_end(policy):
    jobs = [job(f"j{number}", 3000, needs=footprint(7, 2)) for number in range(6)]
    outcome = simulate(policy, *jobs)
    assert max(record.queuing_s for record in outcome.records) < 1000, "without displacing, the last waits 6,000 s"


@pytest.mark.parametrize("policy", sorted(CLASSES))
def test_every_policy_says_in_one_line_what_it_does(policy):
    line = (CLASSES[policy].__doc__ or "").splitlines()[0]
    assert 10 < len(line) < 100


@pytest.mark.parametrize("policy", [*sorted(CLASSES), "fair:by=user", "fair:by=user-memory", "priority:by=user"])
@pytest.mark.parametrize("quantum_s", [0.0, 1.0, 60.0])
def test_every_policy_finishes_a_crowd_of_jobs_of_all_sizes(policy, quantum_s):
    sizes = [(1, 3), (3, 12), (6, 2), (0.2, 0.5), (2, 7), (9, 6), (0, 0), (5, 5)]
    jobs = [
        job(
            f"j{n:02}",
            5 + n * 7 % 40,
            submit=n * 1.5,
            iteration_s=0.5,
            needs=footprint(*sizes[n % len(sizes)]),
            priority=n % 3,
            owner=n % 4 // 2,
        )
        for n in range(24)
    ]
    outcome = simulate(policy, *jobs, quantum_s=quantum_s)
    assert len(outcome.records) == 24


def test_an_unknown_policy_lists_those_there_are():
    with pytest.raises(RequestRejected, match="no policy 'fare'; there are: fair, fifo, las, pack, priority, rr"):
        build("fare", CLASSES)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("fair:by=colour", r"by='colour' is not understood; expected time\|memory\|user\|user-memory \(who shares"),
        ("fair:speed=9", r"fair has no parameter 'speed'; it takes: by=time\|memory\|user\|user-memory .*patience="),
        ("fifo:fill=on", r"fifo has no parameter 'fill'; it takes: none"),
        ("fair:by", r"'by' is not understood; write parameters as name=value"),
        ("fair:patience=soon", r"expected a number above 0"),
        ("fair:patience=0", r"expected a number above 0"),
    ],
)
def test_a_wrong_parameter_is_explained_by_name(spec, complaint):
    with pytest.raises(RequestRejected, match=complaint):
        build(spec, CLASSES)


def test_a_policy_writes_itself_as_a_user_would():
    assert str(build("fair:by=memory,patience=60", CLASSES)) == "fair:by=memory,patience=60"
    assert str(build("srtf", CLASSES)) == "srtf"


def test_a_policy_of_ten_lines_works():
    class SmallestFirst(Policy):
        """The smallest model first."""

        def memory_order(self, job):
            return job.footprint.persistent_bytes

    world = World()
    world.send(ev.PolicyChanged(SmallestFirst()))
    world.arrive("large", footprint(6, 10))
    world.arrive("medium", footprint(4, 10))
    world.arrive("small", footprint(2, 10))
    assert [waiting.job_id for waiting in world.scheduler.queue] == ["small", "medium"]
    world.leave("large")
    world.answer_all()
    assert world.running() == ["small"]
