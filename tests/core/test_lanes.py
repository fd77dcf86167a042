"""Lane assignment: Algorithm 1 step by step, and against brute force on small cases."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from salus.core.actions import CloseLane, OpenLane, ResizeLane
from salus.core.lanes import LaneTable, Place, Step


def table_with(capacity: int, *jobs: tuple[str, int, int]) -> LaneTable:
    """A table with these jobs in it: name, fixed bytes, ephemeral bytes; each where Algorithm 1 puts it."""
    table = LaneTable(capacity)
    for name, fixed, ephemeral in jobs:
        place = table.find(fixed, ephemeral, 0)
        assert place is not None
        table.add_fixed(fixed)
        table.enter(place, name, ephemeral, 0)
    table.out.clear()
    return table


def test_a_job_gets_a_lane_of_its_own_while_there_is_room():
    table = table_with(16, ("a", 2, 5))
    assert table.find(2, 7, 0) == Place(Step.NEW, None, 7)


def test_otherwise_it_joins_the_smallest_lane_that_is_large_enough():
    table = table_with(16, ("a", 1, 4), ("b", 1, 6))
    place = table.find(1, 4, 0)
    assert place == Place(Step.JOIN, 1, 4)
    assert table.find(1, 5, 0) == Place(Step.JOIN, 2, 6)


def test_otherwise_the_smallest_lane_that_may_grow_does():
    table = table_with(16, ("a", 1, 3), ("b", 1, 6))
    assert table.find(1, 7, 0) == Place(Step.GROW, 1, 7)
    assert table.find(1, 9, 0) == Place(Step.GROW, 2, 9), "growing the smaller lane would take too much"
    assert table.find(1, 12, 0) is None


def test_joining_needs_room_for_the_job_s_own_memory():
    table = table_with(16, ("a", 4, 10))
    assert table.find(2, 10, 0) == Place(Step.JOIN, 1, 10)
    assert table.find(3, 10, 0) is None


def test_a_lane_shrinks_to_what_the_others_need_and_its_memory_counts_until_it_is_released():
    table = table_with(16, ("a", 0, 10), ("b", 0, 4), ("c", 0, 10))
    assert {lane_id: sorted(lane.needs) for lane_id, lane in table.lanes.items()} == {1: ["a", "c"], 2: ["b"]}
    table.leave(1, "a")
    table.leave(1, "c")
    assert table.out == [CloseLane(1)]
    assert table.free_bytes == 2
    assert table.coming_bytes == 10
    table.released(1, 0)
    assert table.free_bytes == 12
    assert table.coming_bytes == 0


def test_a_lane_that_grows_again_before_it_was_released_takes_nothing_new():
    table = table_with(10, ("a", 0, 10), ("b", 0, 3))
    table.leave(1, "a")
    assert table.out == [ResizeLane(1, 3)]
    place = table.find(0, 8, 0)
    assert place == Place(Step.GROW, 1, 8), "its own memory is still there for it"
    table.enter(place, "c", 8, 0)
    assert table.free_bytes == 0
    table.released(1, 3)
    assert table.free_bytes == 2, "the answer to the shrinking must not take away what has grown since"


def test_lanes_are_shared_within_a_user_only_unless_told_otherwise():
    table = LaneTable(16)
    table.enter(Place(Step.NEW, None, 10), "a", 10, owner=1)
    assert table.find(0, 8, owner=1) == Place(Step.JOIN, 1, 10)
    assert table.find(0, 8, owner=2) is None
    table.share_between_users = True
    assert table.find(0, 8, owner=2) == Place(Step.JOIN, 1, 10)


def test_planning_on_a_trial_leaves_the_table_alone():
    table = table_with(16, ("a", 1, 10), ("b", 1, 2))
    trial = table.trial()
    trial.leave(1, "a")
    assert trial.free_bytes == 12
    assert table.free_bytes == 2
    assert not table.out


@dataclass(frozen=True)
class Option:
    """One way to place a job, tried by brute force."""

    lane_id: int | None
    size: int
    total: int


def every_option(capacity: int, fixed: int, lanes: dict[int, int], job_fixed: int, need: int) -> list[Option]:
    """All that keep the safety condition: a lane of its own, or any lane made large enough."""
    used = fixed + job_fixed + sum(lanes.values())
    options = [Option(None, need, used + need)]
    for lane_id, size in lanes.items():
        larger = max(size, need)
        options.append(Option(lane_id, larger, used - size + larger))
    return [option for option in options if option.total <= capacity]


@settings(max_examples=500, deadline=None)
@given(
    st.integers(1, 24),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=6),
    st.integers(0, 5),
    st.integers(0, 12),
)
def test_a_place_is_found_whenever_brute_force_finds_one_and_it_is_the_one_the_paper_prefers(
    capacity, others, job_fixed, need
):
    table = LaneTable(capacity)
    for number, (fixed, ephemeral) in enumerate(others):
        place = table.find(fixed, ephemeral, 0)
        if place is not None:
            table.add_fixed(fixed)
            table.enter(place, f"job{number}", ephemeral, 0)
    sizes = {lane_id: lane.size_bytes for lane_id, lane in table.lanes.items()}
    options = every_option(capacity, table.fixed_bytes, sizes, job_fixed, need)
    found = table.find(job_fixed, need, 0)
    if not options:
        assert found is None
        return
    assert found is not None
    assert (found.lane_id, found.size_bytes) in {(option.lane_id, option.size) for option in options}
    unresized = [option for option in options if option.lane_id is not None and sizes[option.lane_id] >= need]
    if any(option.lane_id is None for option in options):
        assert found.step is Step.NEW
    elif unresized:
        assert found.step is Step.JOIN
        assert found.size_bytes == min(option.size for option in unresized)
    else:
        assert found.step is Step.GROW
        assert sizes[found.lane_id] == min(sizes[option.lane_id] for option in options if option.lane_id is not None)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 9)), max_size=30))
def test_entering_and_leaving_in_any_order_keeps_the_books_right(moves):
    table = LaneTable(20)
    inside: dict[str, tuple[int, int, int]] = {}
    for number, (enters, fixed, ephemeral) in enumerate(moves):
        if enters:
            place = table.find(fixed, ephemeral, 0)
            if place is not None:
                table.add_fixed(fixed)
                inside[f"job{number}"] = (table.enter(place, f"job{number}", ephemeral, 0), fixed, ephemeral)
        elif inside:
            name = sorted(inside)[ephemeral % len(inside)]
            lane_id, fixed, _ = inside.pop(name)
            table.leave(lane_id, name)
            table.free_fixed(fixed)
        for action in table.out:
            if isinstance(action, CloseLane):
                table.released(action.lane_id, 0)
            elif isinstance(action, ResizeLane):
                table.released(action.lane_id, action.size_bytes)
            else:
                assert isinstance(action, OpenLane)
        table.out.clear()
        needed = {lane: max(e for other, _, e in inside.values() if other == lane) for lane, _, _ in inside.values()}
        assert {lane_id: lane.size_bytes for lane_id, lane in table.lanes.items()} == needed
        assert table.free_bytes == 20 - sum(needed.values()) - sum(fixed for _, fixed, _ in inside.values())
        assert table.coming_bytes == 0


def test_leaving_a_lane_that_one_is_not_in_is_a_bug_that_shows():
    table = table_with(16, ("a", 1, 4))
    with pytest.raises(KeyError):
        table.leave(1, "b")
