"""`fair:by=user`: users share first, and then the jobs of each user."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from salus.core import events as ev
from salus.core.model import Job, JobSpec
from salus.core.order import Group, OrderedJobs, group_key
from salus.core.policies.base import lease_entry
from salus.core.policies.fair import OWED_S
from tests.core.test_policies import WIDE, job, occupied, service, simulate
from tests.core.world import World, footprint, make_policy

ALICE, BOB, CAROL = 1001, 1002, 1003
SMALL = footprint(1, 2)


def of_user(had: dict[str, float], name: str) -> float:
    """Jobs are called after their users."""
    return sum(value for job_id, value in had.items() if job_id.startswith(name))


def jobs_of(name: str, owner: int, count: int, seconds: float = 1000, **more) -> list:
    return [job(f"{name}{number}", seconds, owner=owner, **more) for number in range(count)]


def test_three_jobs_of_one_user_and_one_of_another_give_each_user_half():
    jobs = jobs_of("alice", ALICE, 3) + jobs_of("bob", BOB, 1)
    had = service(simulate("fair:by=user", *jobs, quantum_s=0.1), until=600)
    assert of_user(had, "alice") == pytest.approx(300, rel=0.02)
    assert had["bob0"] == pytest.approx(300, rel=0.02)
    for number in range(3):
        assert had[f"alice{number}"] == pytest.approx(100, rel=0.05), "the user's jobs share what the user gets"


def test_users_who_must_take_turns_with_the_memory_have_half_each_however_often_a_user_switches_among_own_jobs():
    """Room for one lane, and lanes are not shared between users. Her jobs displace one another all the time."""
    jobs = jobs_of("alice", ALICE, 3, needs=WIDE) + jobs_of("bob", BOB, 1, needs=WIDE)
    had = service(simulate("fair:by=user,patience=1", *jobs, quantum_s=0.1), until=600)
    assert of_user(had, "alice") == pytest.approx(had["bob0"], rel=0.02)
    assert sum(had.values()) > 570, "little is lost to paging"
    assert min(had.values()) > 40


def test_by_jobs_the_same_three_jobs_have_three_quarters():
    jobs = jobs_of("alice", ALICE, 3) + jobs_of("bob", BOB, 1)
    had = service(simulate("fair", *jobs, quantum_s=0.1), until=600)
    assert of_user(had, "alice") == pytest.approx(450, rel=0.02), "or the test above shows nothing"


def test_a_weight_counts_among_the_jobs_of_its_user_alone():
    jobs = [
        job("alice heavy", 1000, owner=ALICE, weight=1000),
        job("alice light", 1000, owner=ALICE, weight=500),
        job("bob", 1000, owner=BOB, weight=0.01),
    ]
    had = service(simulate("fair:by=user", *jobs, quantum_s=0.1), until=600)
    assert had["bob"] == pytest.approx(300, rel=0.02)
    assert had["alice heavy"] / had["alice light"] == pytest.approx(2, rel=0.05)


def test_users_share_by_their_weights():
    jobs = jobs_of("alice", ALICE, 1, user_weight=3.0) + jobs_of("bob", BOB, 4)
    had = service(simulate("fair:by=user", *jobs, quantum_s=0.1), until=400)
    assert had["alice0"] / of_user(had, "bob") == pytest.approx(3, rel=0.02)


def test_by_user_and_memory_users_have_the_same_memory_times_time():
    small, large = footprint(0.5, 1), footprint(2, 4)
    jobs = jobs_of("alice", ALICE, 2, needs=small) + jobs_of("bob", BOB, 1, needs=large)
    had = occupied(simulate("fair:by=user-memory", *jobs, quantum_s=0.1), until=600)
    assert of_user(had, "alice") * 1.5 == pytest.approx(had["bob0"] * 6, rel=0.03)


def test_a_user_who_comes_back_shares_at_once_and_does_not_make_up_for_the_time_away():
    early = jobs_of("bob early", BOB, 1, seconds=10)
    late = jobs_of("bob late", BOB, 2, submit=300)
    outcome = simulate("fair:by=user", *jobs_of("alice", ALICE, 1), *early, *late, quantum_s=0.1)
    before, after = service(outcome, 300), service(outcome, 500)
    assert before["alice0"] == pytest.approx(290, abs=1)
    assert after["alice0"] - before["alice0"] == pytest.approx(100, rel=0.03)
    assert of_user(after, "bob late") == pytest.approx(100, rel=0.03)


def test_a_user_does_not_get_more_by_ending_jobs_and_starting_others():
    """Each newcomer starts level with the jobs of its own user, not with other users' jobs."""
    stream = [job(f"bob{number}", 0.5, owner=BOB, submit=number * 0.5, iteration_s=0.5) for number in range(400)]
    outcome = simulate("fair:by=user", *jobs_of("alice", ALICE, 1, iteration_s=0.1), *stream, quantum_s=0.1)
    had = service(outcome, 200)
    assert had["alice0"] == pytest.approx(100, rel=0.02)
    assert sum(had.values()) == pytest.approx(200, rel=0.01), "and the GPU is never idle"


def test_a_user_who_pauses_leaves_the_whole_gpu_to_others():
    world = World(policy="fair:by=user")
    for name, owner in (("alice1", ALICE), ("alice2", ALICE), ("bob", BOB)):
        world.arrive(name, SMALL, owner=owner)
    for _ in range(20):
        world.go_on(0.0)
    world.idle("bob")
    before = {name: world.scheduler.jobs[name].attained_s for name in world.places}
    for _ in range(50):
        world.go_on(0.0)
        assert world.running(), "somebody is ready"
    assert world.scheduler.jobs["alice1"].attained_s > before["alice1"]
    world.send(ev.JobReady("bob"))
    before = {name: world.scheduler.jobs[name].attained_s for name in world.places}
    for _ in range(400):
        world.go_on(0.0)
    had = {name: world.scheduler.jobs[name].attained_s - before[name] for name in world.places}
    assert had["bob"] == pytest.approx(had["alice1"] + had["alice2"], rel=0.05), "bob has no credit and no debt"


def test_a_user_whose_jobs_wait_for_memory_takes_it_from_their_own_jobs():
    """Room for two: one of alice's three, and bob's. Hers take turns, and his is never moved."""
    needs = footprint(6, 1)
    jobs = jobs_of("alice", ALICE, 3, needs=needs) + jobs_of("bob", BOB, 1, needs=needs)
    outcome = simulate("fair:by=user,patience=5", *jobs, quantum_s=0.1)
    had = service(outcome, 600)
    records = {record.job.job_id: record for record in outcome.records}
    assert had["bob0"] == pytest.approx(300, rel=0.05)
    assert min(had[f"alice{number}"] for number in range(3)) > 80
    assert sum(records[f"alice{number}"].paged_out for number in range(3)) > 20
    assert records["bob0"].paged_out <= 1, "while alice has the memory of two jobs, bob's comes in once"


def test_a_user_without_memory_gets_some_from_a_user_who_has_all():
    needs = footprint(6, 1)
    jobs = jobs_of("alice", ALICE, 4, needs=needs) + jobs_of("bob", BOB, 1, needs=needs, submit=50)
    outcome = simulate("fair:by=user,patience=20", *jobs, quantum_s=0.1)
    (bob,) = (record for record in outcome.records if record.job.job_id == "bob0")
    assert bob.queuing_s < 25
    had, before = service(outcome, 400), service(outcome, 100)
    assert had["bob0"] - before["bob0"] == pytest.approx(150, rel=0.05)


def test_priority_by_user_is_strict_and_gives_users_of_one_level_equal_parts():
    jobs = [job("carol low", 1000, owner=CAROL)]
    jobs += jobs_of("alice", ALICE, 3, priority=1) + jobs_of("bob", BOB, 1, priority=1)
    had = service(simulate("priority:by=user", *jobs, quantum_s=0.1), until=400)
    assert had["carol low"] < 1
    assert of_user(had, "alice") == pytest.approx(had["bob0"], rel=0.02)


def test_what_is_owed_to_a_user_who_was_kept_out_of_memory_is_bounded():
    policy = make_policy("fair:by=user")
    alices, bobs = (
        Job(JobSpec(name, SMALL, owner=owner), number, 0.0, SMALL, True, None)
        for number, (name, owner) in enumerate((("a", ALICE), ("b", BOB)))
    )
    for one in (alices, bobs):
        policy.on_arrived(one)
        one.asks = True
        policy.on_ready(one)
    policy.on_competing(alices)
    for _ in range(10):
        policy.on_served(alices, 1000.0, 1)
    policy.on_competing(bobs)
    behind = group_key(policy.group(alices))[1] - group_key(policy.group(bobs))[1]
    assert behind == OWED_S


def test_the_mark_of_a_user_outlives_the_jobs_as_long_as_it_matters_and_no_longer():
    policy = make_policy("fair:by=user")

    def play(name: str, owner: int, served_s: float) -> Job:
        one = Job(JobSpec(name, SMALL, owner=owner), 1, 0.0, SMALL, True, None)
        policy.on_arrived(one)
        policy.on_ready(one)
        policy.on_competing(one)
        policy.on_served(one, served_s, 1)
        return one

    stays = play("stays", ALICE, 1.0)
    leaves = play("leaves", BOB, 100.0)
    policy.on_resting(leaves)
    policy.on_left(leaves)
    back = play("back", BOB, 0.0)
    assert group_key(policy.group(back)) > group_key(policy.group(stays)), "bob is ahead still"
    policy.on_resting(back)
    policy.on_left(back)
    policy.on_served(stays, 1000.0, 1)
    for number in range(50):
        one = play(f"guest{number}", 2000 + number, 0.0)
        policy.on_resting(one)
        policy.on_left(one)
    assert len(policy._users[0]._marks) <= 3, "users who are gone are forgotten"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=30),
    st.permutations(range(4)),
    st.lists(st.integers(0, 29), max_size=10),
)
def test_the_places_of_grouped_jobs_are_those_of_the_list(listed, keys, gone):
    groups = [Group(key) for key in keys]
    ordered = OrderedJobs()
    jobs = [Job(JobSpec(f"{n}", SMALL), n, 0.0, SMALL, True, None) for n in range(len(listed))]
    for one, (group, key) in zip(jobs, listed, strict=True):
        ordered.put(one, key, groups[group])
    for number in gone:
        if number < len(jobs):
            ordered.discard(jobs[number])
    expected = list(_brute_force(groups, [(one, *part) for one, part in zip(jobs, listed, strict=True)], ordered))
    assert list(ordered) == expected and len(ordered) == len(expected)
    assert [ordered.position(one) for one in expected] == list(range(1, len(expected) + 1))
    assert ordered.head(5) == expected[:5]
    first = ordered.first_entry()
    assert (first and first[2]) == (expected[0] if expected else None)
    besides = {one.job_id for one in expected[:1]}
    second = ordered.first_entry(besides)
    same_group = [one for one in expected if one.job_id not in besides]
    assert (second is None) == (not same_group)


def _brute_force(groups: list[Group], jobs: list[tuple[Job, int, int]], kept: OrderedJobs) -> Iterable[Job]:
    """Job by job: its place in its group counts first, then the group."""
    ranked = []
    for group in range(len(groups)):
        members = sorted((key, one.arrival) for one, at, key in jobs if at == group and one in kept)
        ranked += [(members.index((key, one.arrival)), groups[group].key, one.arrival, one)
                   for one, at, key in jobs if at == group and one in kept]  # fmt: skip
    return [one for *_, one in sorted(ranked, key=lambda entry: entry[:3])]


def test_a_user_who_submits_many_jobs_moves_no_other_user_back_by_more_than_one_place():
    world = World(policy="fair:by=user", capacity=4)
    world.arrive("runs", footprint(3, 1), owner=CAROL)
    for number in range(20):
        world.arrive(f"alice{number:02}", footprint(3, 1), owner=ALICE)
    world.arrive("bob", footprint(3, 1), owner=BOB)
    assert [one.job_id for one in world.scheduler.queue][:4] == ["alice00", "bob", "alice01", "alice02"]
    why = world.scheduler.explain("bob")
    assert why is not None and (why.position, why.queue_length) == (2, 21)
    last = world.scheduler.explain("alice19")
    assert last is not None and last.position == 21


@pytest.mark.parametrize("spec", ["priority", "priority:by=user"])
def test_a_job_that_changes_its_level_is_as_far_ahead_there_as_it_was(spec):
    policy = make_policy(spec)
    low, rival, high = (
        Job(JobSpec(name, SMALL, owner=owner, priority=priority), number, 0.0, SMALL, True, None)
        for number, (name, owner, priority) in enumerate((("low", ALICE, 0), ("rival", BOB, 0), ("high", BOB, 1)))
    )
    for one in (low, rival, high):
        policy.on_arrived(one)
        policy.on_ready(one)
        policy.on_competing(one)
    policy.on_served(low, 7.0, 1)
    policy.on_served(high, 100.0, 1)
    policy.on_resting(low)
    before, low.spec = low.spec, replace(low.spec, priority=1)
    policy.on_changed(low, before)
    policy.on_competing(low)
    assert lease_entry(policy, low)[0] > lease_entry(policy, high)[0]
    policy.on_served(high, 8.0, 1)
    assert lease_entry(policy, low)[0] < lease_entry(policy, high)[0], "and no further"
    for one in (low, high, rival):
        policy.on_resting(one)
        policy.on_left(one)


def test_why_a_job_waits_says_nothing_of_another_user_s_job():
    world = World(policy="fifo", share_between_users=True)
    world.arrive("secret", WIDE, owner=ALICE)
    world.arrive("stranger", WIDE, owner=BOB)
    world.arrive("own", WIDE, owner=ALICE)
    assert world.lane_of("secret") == world.lane_of("stranger") == world.lane_of("own")
    world.send(ev.JobStuck("secret"))
    why, why_own = (world.scheduler.explain(name) for name in ("stranger", "own"))
    assert why is not None and why.text.startswith("another user's job runs in lane ") and "secret" not in why.text
    assert "the administrator can end it" in why.text
    assert why_own is not None and "job secret runs in lane " in why_own.text
