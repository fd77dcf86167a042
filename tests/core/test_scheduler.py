"""Events in, actions out: what happens to jobs, told one case at a time."""

from __future__ import annotations

import pytest

from salus.core import actions as act
from salus.core import events as ev
from salus.core.admission import WaitReason
from salus.core.model import GpuConfig, JobSpec, Phase
from salus.core.policies import Policy
from salus.core.scheduler import Scheduler
from salus.errors import InvariantBroken, RequestRejected
from tests.core.world import GIB, World, footprint, make_policy


def kinds(actions: list[act.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_a_job_that_fits_is_accepted_admitted_and_granted_a_lease():
    world = World()
    needs = footprint(1, 4)
    assert world.arrive("a", needs) == [
        act.AcceptJob("a"),
        act.OpenLane(1, 4 * GIB, 0),
        act.AdmitJob("a", 1, needs),
        act.GrantLease("a", 1),
    ]


def test_a_job_larger_than_the_gpu_is_refused_at_once_with_the_numbers():
    world = World(capacity=16)
    (refusal,) = world.arrive("a", footprint(4, 12, 1))
    assert refusal == act.RefuseJob(
        "a",
        "needs 4 GiB persistent + 12 GiB ephemeral + 1 GiB internal = 17 GiB, the whole device has 16 GiB; "
        "ask for less (--persistent, --ephemeral), or serve with more (--capacity)",
    )
    assert world.scheduler.jobs == {}


def test_a_job_that_does_not_fit_yet_waits_and_knows_why_and_where_in_the_queue():
    world = World(policy="fifo")
    world.arrive("a", footprint(8, 8))
    world.arrive("b", footprint(4, 4))
    world.arrive("c", footprint(1, 1))
    waiting = world.scheduler.explain("c")
    assert (waiting.reason, waiting.position, waiting.queue_length) == (WaitReason.MEMORY, 2, 2)
    assert waiting.text == "needs 1 GiB and a lane of 1 GiB; 0 B of 16 GiB are free"
    assert world.scheduler.explain("a") is None


def test_a_job_that_needs_no_lane_is_told_of_none():
    world = World(policy="fifo")
    world.arrive("a", footprint(15, 0))
    world.arrive("b", footprint(3, 0))
    assert world.scheduler.explain("b").text == "needs 3 GiB; 1 GiB of 16 GiB are free"


def test_a_job_is_between_iterations_only_once_it_has_done_one():
    world = World()
    world.arrive("a", footprint(1, 1), ready=False)
    assert world.scheduler.explain("a").text == "it has not begun to iterate"
    world.send(ev.JobReady("a"))
    world.iterate("a")
    world.idle("a")
    waiting = world.scheduler.explain("a")
    assert (waiting.reason, waiting.text) == (WaitReason.IDLE, "between iterations: it does not ask to run")


def test_two_jobs_in_one_lane_take_turns_and_in_two_lanes_run_at_once():
    world = World(policy="rr")
    world.arrive("a", footprint(1, 10))
    world.arrive("b", footprint(1, 10))
    assert world.running() == ["a"]
    for runner, other in (("a", "b"), ("b", "a"), ("a", "b")):
        # The first lease began before there was anybody else; the timer catches it.
        if not world.places[runner].revoked:
            world.fire_timer()
        world.iterate(runner)
        if runner in world.running():
            world.fire_timer()
            world.iterate(runner)
        assert world.running() == [other]
    apart = World(policy="rr")
    apart.arrive("a", footprint(1, 4))
    apart.arrive("b", footprint(1, 4))
    assert apart.running() == ["a", "b"]


def test_a_lease_is_not_revoked_before_its_quantum_is_over():
    world = World(policy="fair", quantum_s=0.02)
    world.arrive("a", footprint(1, 10))
    world.arrive("b", footprint(1, 10))
    assert world.timer_s == pytest.approx(0.02)
    world.iterate("a", gpu_time_s=0.01)
    assert "RevokeLease" not in kinds(world.send(ev.TimerFired()))
    world.iterate("a", gpu_time_s=0.01)
    assert "RevokeLease" in kinds(world.fire_timer())
    assert world.running() == ["a"], "it runs on to its boundary"
    world.iterate("a", gpu_time_s=0.005)
    assert world.running() == ["b"]


def test_a_job_that_goes_idle_gives_its_lane_to_the_next_one_at_once():
    world = World(policy="fifo")
    world.arrive("a", footprint(1, 10))
    world.arrive("b", footprint(1, 10))
    assert world.idle("a") == [act.GrantLease("b", 1)]
    world.send(ev.JobReady("a"))
    assert world.places["b"].revoked, "the oldest goes first again"


def test_when_a_job_leaves_the_next_one_takes_its_memory_over():
    world = World(policy="fifo")
    world.arrive("a", footprint(2, 12))
    world.arrive("b", footprint(6, 8))
    assert kinds(world.leave("a")) == ["CloseLane", "SetTimer"]
    assert world.running() == [], "the memory is not free until the lane has been released"
    assert kinds(world.answer()) == ["OpenLane", "AdmitJob", "GrantLease"]
    assert world.running() == ["b"]


def test_a_job_behind_another_in_a_lane_gets_a_lane_of_its_own_when_memory_becomes_free():
    world = World(policy="pack")
    world.arrive("a", footprint(1, 6))
    world.arrive("b", footprint(1, 6))
    world.arrive("c", footprint(1, 6))
    assert world.lane_of("c") == world.lane_of("a")
    world.leave("b")
    actions = world.answer()
    assert kinds(actions) == ["LeaveLane", "OpenLane", "AdmitJob", "GrantLease"]
    assert world.running() == ["a", "c"]


def test_an_idle_job_that_was_paged_out_comes_back_when_it_wants_to_run_not_before():
    world = World(policy="fifo")
    world.arrive("a", footprint(10, 2))
    world.idle("a")
    world.arrive("b", footprint(10, 2))
    assert world.running() == [], "somebody who just stopped for a moment is not thrown out"
    world.fire_timer()
    assert world.scheduler.jobs["a"].phase is Phase.PAGING_OUT
    world.answer_all()
    assert world.running() == ["b"]
    world.idle("b")
    world.now += 100
    world.fire_timer()
    assert world.scheduler.jobs["a"].phase is Phase.PAGED_OUT
    world.send(ev.JobReady("a"))
    world.answer_all()
    assert world.running() == ["a"]


def test_overtaking_ends_before_a_large_job_starves():
    world = World(policy="pack")
    world.arrive("runs", footprint(1, 4))
    world.arrive("large", footprint(10, 6))
    for number in range(200):
        world.arrive(f"small{number}", footprint(0, 2))
        world.leave(f"small{number}")
        world.answer_all()
    assert world.scheduler.jobs["large"].overtaken <= 64
    world.arrive("late", footprint(0, 2))
    assert world.scheduler.explain("late").reason is WaitReason.ORDER
    world.leave("runs")
    world.answer_all()
    assert "large" in world.running()


def test_a_job_of_another_user_never_joins_the_lane():
    world = World()
    world.arrive("mine", footprint(1, 10), owner=1)
    world.arrive("theirs", footprint(1, 8), owner=2)
    assert world.lane_of("theirs") is None
    world.arrive("mine too", footprint(1, 8), owner=1)
    assert world.lane_of("mine too") == world.lane_of("mine")


def test_changing_the_policy_takes_effect_at_once():
    world = World(policy="fifo")
    world.arrive("long", footprint(1, 10), length_s=100)
    world.arrive("short", footprint(1, 10), length_s=1)
    assert world.running() == ["long"]
    world.send(ev.PolicyChanged(make_policy("srtf")))
    world.iterate("long")
    assert world.running() == ["short"]


def test_what_cannot_be_true_is_rejected_and_changes_nothing():
    world = World()
    world.arrive("a", footprint(1, 1))
    for event in (
        ev.JobReady("nobody"),
        ev.JobArrived(JobSpec("a", footprint(1, 1))),
        ev.PageOutFinished("a"),
        ev.PageInFinished("a"),
        ev.IterationFinished("a", gpu_time_s=-1),
    ):
        with pytest.raises(RequestRejected):
            world.scheduler.handle(event, world.now)
        world.scheduler.validate()
    world.idle("a")
    with pytest.raises(RequestRejected, match="gives up a lease"):
        world.scheduler.handle(ev.IterationFinished("a", 0.1, yielded=True), world.now)
    with pytest.raises(RequestRejected, match="without a lease"):
        world.scheduler.handle(ev.MemoryWanted("a", footprint(2, 2)), world.now)
    with pytest.raises(RequestRejected, match="not after the last event"):
        world.scheduler.handle(ev.TimerFired(), world.now - 1)


def test_a_broken_invariant_is_found_and_carries_the_story_of_the_job():
    world = World()
    world.arrive("a", footprint(1, 1))
    world.scheduler.jobs["a"].lane = None
    with pytest.raises(InvariantBroken) as caught:
        world.scheduler.validate()
    assert any("GrantLease" in line for line in caught.value.story)
    assert "GrantLease" in str(caught.value)


@pytest.mark.parametrize("change", [{"capacity_bytes": 0}, {"capacity_bytes": 1, "quantum_s": -1}])
def test_settings_that_make_no_sense_are_refused(change):
    with pytest.raises(ValueError, match=r"must|cannot"):
        GpuConfig(**change)


def test_an_empty_scheduler_has_nothing_to_do():
    scheduler = Scheduler(GpuConfig(1024), make_policy("fair"))
    assert scheduler.handle(ev.TimerFired(), 0.0) == []
    scheduler.validate()


def test_a_crowd_of_idle_jobs_that_were_displaced_keeps_nobody_out_of_the_queue():
    world = World(policy="pack")
    for number in range(20):
        name = f"idle{number:02}"
        world.arrive(name, footprint(12, 1))
        world.now += 2
        world.send(ev.TimerFired())
        world.answer_all()
        assert name in world.running(), "those before it are idle and give their memory up"
        world.idle(name)
    world.arrive("large", footprint(10, 2))
    world.now += 2
    world.send(ev.TimerFired())
    world.answer_all()
    world.arrive("small", footprint(0.1, 0.1))
    assert world.running() == ["large", "small"]
    assert world.scheduler.explain("idle00").reason is WaitReason.IDLE
    assert world.scheduler.queue == []


@pytest.mark.parametrize("policy", ["las", "srtf"])
def test_a_policy_that_goes_by_service_is_asked_again_while_one_runs_and_another_waits_for_memory(policy):
    world = World(policy=policy)
    world.arrive("runs", footprint(10, 2))
    world.iterate("runs", gpu_time_s=1.0)
    world.arrive("waits", footprint(10, 2))
    for _ in range(300):
        world.answer_all()
        for name in world.running():
            world.iterate(name, gpu_time_s=1.0)
        if world.timer_s is not None and world.timer_s <= world.now:
            world.fire_timer()
        if world.scheduler.jobs["waits"].iterations_done:
            return
    raise AssertionError("it was never asked again")


def test_a_victim_too_large_for_the_host_does_not_hide_one_that_is_not():
    world = World(policy="srtf", host_bytes=8 * GIB)
    world.arrive("large", footprint(9, 0.5), length_s=1000)
    world.arrive("medium", footprint(4, 0.5), length_s=900)
    world.arrive("short", footprint(3, 0.5), length_s=1)
    world.iterate("medium" if "medium" in world.running() else "large")
    world.answer_all()
    assert "short" in world.running()


def test_two_jobs_that_cannot_be_helped_do_not_hide_a_third_that_can():
    world = World(policy="pack", host_bytes=0)
    world.arrive("idle", footprint(1, 8), owner=0)
    world.idle("idle")
    for name in ("big1", "big2"):
        world.arrive(name, footprint(15, 0.5), owner=1)
    world.arrive("small", footprint(1, 7.5), owner=1)
    world.now += 10
    world.send(ev.TimerFired())
    world.answer_all()
    assert world.running() == ["small"]


def test_numbers_that_are_none_are_turned_away():
    world = World()
    world.arrive("a", footprint(1, 1))
    nan, inf = float("nan"), float("inf")
    for value in (nan, inf):
        with pytest.raises(ValueError, match="weight"):
            JobSpec("b", footprint(1, 1), weight=value)
        with pytest.raises(ValueError, match="length"):
            JobSpec("b", footprint(1, 1), length_s=value)
        with pytest.raises(RequestRejected, match="cannot be"):
            world.scheduler.handle(ev.IterationFinished("a", value), world.now)
        with pytest.raises(RequestRejected, match="utilization"):
            world.scheduler.handle(ev.UtilizationMeasured("a", value), world.now)
        with pytest.raises(RequestRejected, match="not after"):
            world.scheduler.handle(ev.TimerFired(), value)
    with pytest.raises(RequestRejected, match="no job"):
        world.scheduler.handle(ev.JobReady("nobody"), 1e9)
    assert world.scheduler.handle(ev.TimerFired(), 5.0) == [], "a rejected event does not move the clock"


def test_a_policy_from_outside_cannot_put_a_job_on_the_gpu_that_is_not_ready():
    class Careless(Policy):
        def choose(self, firsts, moment):
            return list(world.scheduler.jobs.values())

    world = World()
    world.send(ev.PolicyChanged(Careless()))
    world.arrive("ready", footprint(1, 1))
    world.arrive("idle", footprint(1, 1), ready=False)
    assert world.running() == ["ready"]


def test_a_policy_that_fails_on_a_job_leaves_nothing_of_it_behind():
    class Picky(Policy):
        def memory_order(self, job):
            return job.remaining_s

    world = World()
    world.send(ev.PolicyChanged(Picky()))
    world.arrive("runs", footprint(10, 4), length_s=1)
    world.arrive("waits", footprint(10, 4), length_s=1)
    with pytest.raises(TypeError):
        world.scheduler.handle(ev.JobArrived(JobSpec("unknown", footprint(1, 1))), world.now)
    assert set(world.scheduler.jobs) == {"runs", "waits"}
    world.scheduler.validate()


def test_memory_that_others_use_is_not_given_out_and_is_there_again_when_they_are_gone():
    world = World(policy="fifo", capacity=16)
    world.send(ev.OutsideMemoryChanged(10 * GIB))
    assert "AdmitJob" not in kinds(world.arrive("a", footprint(4, 4)))
    assert world.scheduler.explain("a").text == "needs 4 GiB and a lane of 4 GiB; 6 GiB of 16 GiB are free"
    assert "AdmitJob" in kinds(world.send(ev.OutsideMemoryChanged(2 * GIB)))
    # Others take more than is left: who runs goes on, and nobody new gets in.
    world.send(ev.OutsideMemoryChanged(15 * GIB))
    assert world.running() == ["a"]
    world.arrive("b", footprint(0, 1))
    assert world.scheduler.explain("b").text.endswith("0 B of 16 GiB are free")
    world.send(ev.OutsideMemoryChanged(0))
    assert world.lane_of("b") is not None
    with pytest.raises(RequestRejected):
        world.send(ev.OutsideMemoryChanged(-1))


def test_while_one_comes_in_the_last_that_can_run_stays_but_not_for_ever():
    world = World(policy="rr:patience=10", capacity=10, quantum_s=1.0)
    for job_id in "abcd":
        world.arrive(job_id, footprint(4, 2))

    def go_on(seconds: float = 0.1) -> None:
        for job_id in world.running():
            world.iterate(job_id)
        world.now += seconds
        if world.timer_s is not None and world.timer_s <= world.now:
            world.fire_timer()

    def next_answer() -> ev.Event:
        while not world.answers:
            go_on()
        return world.answers[0]

    while not isinstance(next_answer(), ev.PageInFinished):
        world.answer()
    came = world.now
    while world.now < came + 0.8:
        go_on()
        assert world.running() and len(world.answers) == 1, "two wait, and the one that computes is not displaced"
    while len(world.answers) == 1:
        go_on()
    assert isinstance(world.answers[1], ev.PageOutFinished), "the one that comes in was stopped: nobody waits for it"
    assert world.now < came + 3


@pytest.mark.parametrize(("capacity", "needs"), [(12, footprint(4, 2)), (16, footprint(4.3, 1.2, 0.5))])
def test_while_a_newcomer_loads_its_model_the_last_that_can_run_stays(capacity, needs):
    """In lanes of their own, or in one for all."""
    world = World(policy="fair:patience=1", capacity=capacity, quantum_s=0.02)
    for job_id in "abcd":
        world.arrive(job_id, needs)
    while world.lane_of("c") is None and world.lane_of("d") is None:
        world.go_on(loads="cd")
        assert world.now < 5
    came, busy = world.now, []
    while world.now < came + 5:
        world.go_on(loads="cd")
        busy.append(bool(world.running()))
        assert world.lane_of("a") or world.lane_of("b"), "one of the first two goes on"
    assert sum(busy) > 0.9 * len(busy)


def test_while_a_newcomer_loads_its_model_one_that_can_compute_comes_before_another_newcomer():
    world = World(policy="fair:patience=1", capacity=12, quantum_s=0.02)
    for job_id in "abcd":
        world.arrive(job_id, footprint(4, 2))
    while world.lane_of("c") is None:
        world.go_on(loads="cd")
        assert world.now < 5
    world.answer_all()
    out, computes = ("a", "b") if world.lane_of("a") is None else ("b", "a")
    assert world.lane_of(computes) and world.lane_of("d") is None, "one computes, one loads, two wait"
    world.leave(computes)
    world.go_on(loads="cd")
    assert world.lane_of(out) and world.lane_of("d") is None
    world.go_on(loads="cd")
    assert world.running() == [out], "while the newcomer still loads"


@pytest.mark.parametrize("every_s", [1000.0, 5.0])
@pytest.mark.parametrize(
    ("policy", "at_most_s"), [("priority", 1.0), ("srtf", 1.0), ("fair:patience=1", 12.0), ("rr:patience=1", 12.0)]
)
def test_newcomers_that_load_keep_nobody_else_out(policy, at_most_s, every_s):
    """What is urgent does not wait for them at all, and others not for ever, however many of them come."""
    world = World(policy, capacity=16, quantum_s=0.02)
    world.arrive("first", footprint(8, 4), length_s=1000.0)
    for _ in range(20):
        world.go_on()
    newcomers: list[str] = []
    came = last = world.now - 1000.0
    while "urgent" not in world.places or not world.scheduler.jobs["urgent"].iterations_done:
        if world.now - last >= every_s:
            last = world.now
            newcomers.append(f"newcomer {len(newcomers)}")
            world.arrive(newcomers[-1], footprint(0.1, 0.1), ready=False, length_s=1000.0)
        if "urgent" not in world.places:
            came = world.now
            world.arrive("urgent", footprint(8, 4), priority=5, length_s=1.0)
        world.go_on(loads=newcomers)
        assert world.now < came + at_most_s


def test_those_that_load_are_not_displaced_at_once_because_nobody_computes():
    world = World(policy="fair:patience=1", capacity=12)
    for job_id in "abc":
        world.arrive(job_id, footprint(4, 2))
    for _ in range(8):
        world.go_on(loads="abc")
    assert world.lane_of("a") and world.lane_of("b") and not world.lane_of("c")
