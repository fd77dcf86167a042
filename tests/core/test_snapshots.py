"""A snapshot of the scheduler: one that is made from it goes on in exactly the same way."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from salus.core import actions as act
from salus.core import events as ev
from salus.core.model import Footprint, JobSpec
from salus.core.policies import Policy
from salus.core.scheduler import Scheduler
from salus.core.snapshot import SnapshotFailed
from tests.core.test_histories import CAPACITY, EVERYTHING, POLICIES, histories, play
from tests.core.world import GIB, World, make_policy


class RestoredWorld(World):
    """Its scheduler is replaced after every few events by one that was made from a snapshot, as text."""

    every = 1
    events = 0

    def send(self, event: ev.Event) -> list[act.Action]:
        self.events += 1
        if self.events % self.every == 0:
            text = json.dumps(self.scheduler.snapshot())
            policy = make_policy(str(self.scheduler.policy))
            self.scheduler = Scheduler.restore(json.loads(text), policy)
            assert json.dumps(self.scheduler.snapshot()) == text, "nothing was lost"
        return super().send(event)


@settings(max_examples=100, deadline=None)
@given(histories(EVERYTHING), st.sampled_from(POLICIES), st.sampled_from([0.0, 0.02]), st.sampled_from([1, 7, 40]))
def test_a_restored_scheduler_gives_the_same_actions_as_the_one_it_was_taken_of(history, policy, quantum_s, every):
    worlds = [kind(policy=policy, capacity=CAPACITY, quantum_s=quantum_s) for kind in (World, RestoredWorld)]
    worlds[1].every = every
    for world in worlds:
        play(world, history)
        world.drain()
    assert worlds[0].log == worlds[1].log


def test_a_snapshot_of_a_scheduler_with_nothing_in_it_can_be_restored():
    world = RestoredWorld()
    world.arrive("a", Footprint(GIB, GIB))
    assert world.running() == ["a"]


class Tree:
    pass


class WithNotes(Policy):
    name = "fair"

    def __init__(self, **given: str) -> None:
        super().__init__(**given)
        self.notes: dict[str, object] = {}


def of_a_job_with(note: object) -> dict:
    policy = WithNotes()
    scheduler = Scheduler(World().config, policy)
    scheduler.handle(ev.JobArrived(JobSpec("a", Footprint(GIB, GIB))), 1.0)
    policy.notes = {"job": scheduler.jobs["a"], "note": note}
    return scheduler.snapshot()


def test_notes_of_a_policy_may_refer_to_jobs():
    policy = WithNotes()
    scheduler = Scheduler.restore(json.loads(json.dumps(of_a_job_with((1, {"x"})))), policy)
    assert policy.notes["job"] is scheduler.jobs["a"]
    assert policy.notes["note"] == (1, {"x"})


def test_notes_of_an_unknown_kind_are_named_in_the_error():
    with pytest.raises(SnapshotFailed, match="a Tree has no plain form"):
        of_a_job_with(Tree())


@pytest.mark.parametrize("change", ["attribute", "class", "nonsense"])
def test_a_snapshot_of_another_version_is_refused(change):
    plain = of_a_job_with(None)
    if change == "attribute":
        plain["classes"]["Job"][0] = "colour"
    elif change == "class":
        plain["objects"][0][0] = "Tree"
    else:
        plain["objects"] = [["State"]]
    with pytest.raises(SnapshotFailed):
        Scheduler.restore(plain, WithNotes())
