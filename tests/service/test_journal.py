"""The journal in segments: each can be replayed by itself, and together they are what happened."""

from __future__ import annotations

import errno
import gzip
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from salus.core import actions as act
from salus.core import events as ev
from salus.core.model import Footprint
from salus.core.policies import Policy
from salus.errors import RequestRejected
from salus.plugins import load_policy
from salus.service import codec, journal, segments
from salus.service.codec import pack, unpack
from salus.service.journal import Journal
from salus.service.replay import leases, lines, replay
from salus.service.storage import Limits, tidy_files
from tests.core.test_histories import CAPACITY, EVERYTHING, POLICIES, histories, play
from tests.core.world import GIB, World, make_policy
from tests.service.harness import crowd, eventually

MIB = 2**20


class JournaledWorld(World):
    """Writes what happens to a journal, and begins a new segment after every few events."""

    def begin(self, folder: Path, every: int, segment_bytes: int = 0) -> JournaledWorld:
        self.every, self.events = every, 0
        self.journal = Journal(folder, self.config, self.scheduler.policy, segment_bytes=segment_bytes)
        return self

    def send(self, event: ev.Event) -> list[act.Action]:
        at = self.now
        actions = super().send(event)
        self.journal.record(event, at, actions)
        self.events += 1
        if self.every and self.events % self.every == 0:
            self.journal.rotate(self.scheduler)
        return actions

    def end(self) -> None:
        self.journal.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "state" / "journal"
    made.mkdir(parents=True)
    return made


def busy_world(folder: Path, every: int, events: int = 60, **how: object) -> JournaledWorld:
    """Two jobs that never end take turns."""
    world = JournaledWorld(policy="fair", capacity=CAPACITY, now=10.0).begin(folder, every, **how)  # type: ignore[arg-type]
    for name in "ab":
        world.arrive(name, Footprint(GIB, 14 * GIB))
    while world.events < events:
        go_on(world)
    return world


def go_on(world: JournaledWorld) -> None:
    world.answer_all()
    for name in world.running():
        if world.places[name].holds_lease:
            world.iterate(name, gpu_time_s=0.02 + random.random() / 100)
    if world.timer_s is not None and world.timer_s <= world.now:
        world.fire_timer()


@settings(max_examples=60, deadline=None)
@given(histories(EVERYTHING), st.sampled_from(POLICIES), st.sampled_from([1, 9, 50]), st.sampled_from([0.0, 1e6 / 7]))
def test_replayed_from_any_segment_a_history_gives_the_same_actions(history, policy, every, now):
    with tempfile.TemporaryDirectory() as name:
        world = JournaledWorld(policy=policy, capacity=CAPACITY, quantum_s=0.02, now=now).begin(Path(name), every)
        play(world, history)
        world.end()
        found = segments.segments_in(Path(name))
        assert len(found) == world.events // every + 1
        (whole,) = replay([Path(name)], load_policy)
        assert (whole.difference, whole.events, whole.notes) == (None, world.events, [])
        total = 0
        for one in found:
            (alone,) = replay([one.path], load_policy)
            assert alone.difference is None
            total += alone.events
        assert total == world.events


@settings(max_examples=200, deadline=None)
@given(st.floats(0, 1e9), st.floats(0, 1e6), st.integers(0, 10**15))
def test_times_of_events_are_read_exactly_as_they_were(now, used_s, used_ns):
    for time_s in (used_s, used_ns / 1e9):
        event = ev.IterationFinished("1", time_s, 3, True)
        assert unpack(json.loads(json.dumps(pack(event, now))), now, load_policy) == event


@pytest.mark.parametrize(
    "event",
    [
        ev.JobStuck("1"),
        ev.JobStuck("1", False),
        ev.IterationFinished("1", 0.0, 0),
        ev.IterationFinished("1", 0.25, 1, True),
        ev.ContextWanted("7", False),
        ev.FootprintChanged("7", Footprint(1, 2, 0)),
        ev.TimerFired(),
    ],
)
def test_an_event_is_the_same_after_it_was_written(event):
    assert unpack(json.loads(json.dumps(pack(event, 5.0))), 5.0, load_policy) == event


def test_a_policy_is_written_with_its_parameters():
    event = ev.PolicyChanged(make_policy("fair:patience=20"))
    found = unpack(json.loads(json.dumps(pack(event, 5.0))), 5.0, load_policy)
    assert isinstance(found.policy, Policy) and str(found.policy) == "fair:patience=20"


def test_a_line_is_much_smaller_than_with_the_names_of_all_fields(folder):
    world = busy_world(folder, 0, 400)
    world.end()
    _, *rest = world.journal.path.read_bytes().splitlines(keepends=True)
    named = sum(len(json.dumps(line, separators=(",", ":"))) + 1 for line in lines(folder))
    assert len(rest) == 400
    assert sum(map(len, rest)) < 0.5 * named


def test_a_journal_of_the_first_format_can_still_be_replayed(folder):
    world = busy_world(folder, 0, 40)
    world.end()
    header = json.loads(world.journal.path.read_bytes().splitlines()[0])
    old = [{"format": 1, "config": header["config"], "policy": header["policy"]}, *lines(folder)]
    world.journal.path.unlink()
    path = folder / "20261115-120000-4711.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in old))
    (found,) = replay([folder], load_policy)
    assert (found.difference, found.events, found.since) == (None, 40, None)
    assert len(leases(folder)) == len(leases(path)) > 3


def test_who_held_a_lease_is_the_same_over_segments_and_compression(folder):
    world = busy_world(folder, 10)
    world.end()
    before = leases(folder)
    for one in segments.segments_in(folder)[:3]:
        assert segments.compress(one)
    assert leases(folder) == before
    assert {job_id for job_id, *_ in before} == {"a", "b"}


def test_a_segment_whose_state_was_changed_is_found_out(folder):
    busy_world(folder, 10).end()
    second = segments.segments_in(folder)[1].path
    text = second.read_text()
    assert '"a"' in text
    header, *rest = text.splitlines()
    plain = json.loads(header)
    state = next(row for row in plain["state"]["objects"] if row[0] == "Job")
    done = plain["state"]["classes"]["Job"].index("iterations_done") + 1
    state[done] += 1
    second.write_text("\n".join([json.dumps(plain), *rest]) + "\n")
    (found,) = replay([folder], load_policy)
    assert found.difference is not None and "begins with another state" in found.difference


# What a crash leaves.


def test_a_run_whose_last_line_was_cut_off_is_replayed_up_to_there(folder):
    world = busy_world(folder, 0)
    world.end()
    path = world.journal.path
    path.write_bytes(path.read_bytes()[:-7])
    (found,) = replay([folder], load_policy)
    assert (found.difference, found.events) == (None, world.events - 1)


@pytest.mark.parametrize("moment", ["begun", "compressing", "compressed"])
def test_a_crash_in_the_middle_of_a_rotation_loses_no_line(folder, moment):
    world = busy_world(folder, 20)
    world.end()
    first = segments.segments_in(folder)[0].path
    if moment == "begun":
        (folder / ".20261115-120000-4711.0004.jsonl.part").write_bytes(b'{"format":2')
    elif moment == "compressing":
        (folder / f".{first.name}.gz.part").write_bytes(gzip.compress(first.read_bytes())[:40])
    else:
        first.with_name(first.name + ".gz").write_bytes(gzip.compress(first.read_bytes()))
    (found,) = replay([folder], load_policy)
    assert (found.difference, found.events) == (None, world.events)
    tidy_files(folder.parent, Limits())
    assert all(one.is_compressed for one in segments.files_in(folder))
    (found,) = replay([folder], load_policy)
    assert (found.difference, found.events) == (None, world.events)


def test_what_a_crash_left_unfinished_is_removed_when_it_is_old(folder, monkeypatch):
    left = folder / ".20261115-120000-4711.0004.jsonl.part"
    left.touch()
    tidy_files(folder.parent, Limits())
    assert left.exists(), "it may have been begun just now"
    monkeypatch.setattr(segments, "UNFINISHED_FOR_S", -1.0)
    tidy_files(folder.parent, Limits())
    assert not left.exists()


def test_a_segment_that_is_being_written_is_neither_compressed_nor_removed(folder):
    world = busy_world(folder, 20)
    for limits in (Limits(journal_bytes=0), Limits(keep_s=-10.0)):
        tidy_files(folder.parent, limits)
    (left,) = segments.files_in(folder)
    assert left.path == world.journal.path and not left.is_compressed
    world.end()
    tidy_files(folder.parent, Limits(journal_bytes=0))
    assert segments.files_in(folder) == []


def test_a_full_disk_ends_the_journal_when_a_segment_is_to_begin_and_says_so(folder, monkeypatch):
    world = busy_world(folder, 0)
    written = world.events

    def no_room(folder: Path, name: str) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal, "create", no_room)
    world.journal.rotate(world.scheduler)
    assert world.journal.broken == (
        f"{world.journal.path}: the journal ends here (No space left on device); jobs go on without it"
    )
    go_on(world)
    assert world.events > written
    (found,) = replay([folder], load_policy)
    assert (found.difference, found.events) == (None, written)
    world.journal.rotate(world.scheduler)
    world.end()


# Limits.


def test_the_journal_of_a_machine_that_is_never_empty_stays_within_its_limit(folder):
    limits = Limits(journal_bytes=MIB // 8)
    world = busy_world(folder, 0, segment_bytes=limits.segment_bytes(1))
    while world.journal.path.name.split(".")[1] < "0100":
        go_on(world)
        if world.journal.is_full:
            world.journal.rotate(world.scheduler)
            tidy_files(folder.parent, limits, room_for_bytes=limits.segment_bytes(1))
        if world.events % 100 == 0:
            world.journal.flush()
            assert sum(path.stat().st_size for path in folder.iterdir()) <= limits.journal_bytes
    world.end()
    found = segments.segments_in(folder)
    assert found[0].number > 1 and len(found) > 10, "the first ones are gone, and many are there"
    for one in (found[0], found[-1]):
        (alone,) = replay([one.path], load_policy)
        assert alone.difference is None and alone.notes == []
    (whole,) = replay([folder], load_policy)
    assert whole.difference is None and whole.segments[0] == found[0].number


def test_a_gap_between_segments_is_no_difference(folder):
    world = busy_world(folder, 10)
    world.end()
    second = segments.segments_in(folder)[1]
    (alone,) = replay([second.path], load_policy)
    second.path.unlink()
    (found,) = replay([folder], load_policy)
    assert (found.difference, found.events) == (None, world.events - alone.events)


class WithSecrets(Policy):
    """Its notes have no plain form."""

    name = "fair"

    def __init__(self, **given: str) -> None:
        super().__init__(**given)
        self.notes = object()


def test_of_a_policy_whose_notes_have_no_plain_form_segments_are_replayed_after_those_before(folder):
    world = JournaledWorld(policy="fair", capacity=CAPACITY)
    world.scheduler = type(world.scheduler)(world.config, WithSecrets())
    world.begin(folder, 10)
    world.arrive("a", Footprint(GIB, GIB))
    for _ in range(40):
        world.iterate("a")
    world.end()
    (whole,) = replay([folder], lambda _: WithSecrets())
    assert (whole.difference, whole.events) == (None, world.events)
    (alone,) = replay([segments.segments_in(folder)[1].path], lambda _: WithSecrets())
    assert alone.events == 0
    assert "cannot be replayed: it has no snapshot to begin with" in alone.notes[0]


# What is no journal.


@pytest.fixture
def refused(folder: Path) -> Iterator[None]:
    yield
    with pytest.raises(RequestRejected) as caught:
        replay([folder], load_policy)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("content", [b"", b"nonsense\n", b"[1,2]\n", b'{"format":9}\n', b"{}\n", b"\xff\xfe\n"])
def test_a_file_that_is_no_journal_is_refused_by_its_name(folder, content):
    (folder / segments.name_of("20261115-120000-4711", 1)).write_bytes(content)


@pytest.mark.usefixtures("refused")
def test_a_compressed_segment_that_was_cut_off_is_refused_by_its_name(folder):
    world = busy_world(folder, 20)
    world.end()
    tidy_files(folder.parent, Limits())
    first = segments.segments_in(folder)[0].path
    first.write_bytes(first.read_bytes()[:200])


@pytest.mark.usefixtures("refused")
def test_a_folder_without_a_journal_is_refused(folder):
    shutil.rmtree(folder)


@pytest.mark.usefixtures("refused")
def test_an_empty_folder_is_refused(folder):
    pass


# With a real service.


def test_a_service_that_is_killed_after_it_began_new_segments_leaves_what_can_be_replayed(serve):
    service = serve("--policy", "rr", "--quantum", "0", "--capacity", "4GiB", start=False)
    service.environment["SALUS_STORAGE_JOURNAL_SIZE"] = "1MiB"
    service.start()
    journal_folder = service.folder / "state" / "journal"
    while not any(one.is_compressed for one in segments.files_in(journal_folder)):
        crowd(service, 40)
    # What was not flushed when it was killed is lost; the rest is not.
    eventually(lambda: len(segments.files_in(journal_folder)) >= 2, "a segment is being written")
    service.kill()
    service.start()
    crowd(service, 3)
    done = service.salus("replay")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("give the same actions") == 2, "one line for each of the two services"
    first = segments.segments_in(journal_folder)[1]
    alone = service.salus("replay", str(first.path))
    assert alone.returncode == 0 and "give the same actions" in alone.stdout, alone.stderr


def test_classes_of_the_codec_are_those_of_the_core():
    for name, kind in codec._CLASSES.items():
        assert kind.__name__ == name
