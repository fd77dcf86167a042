"""While a CUDA graph is captured, the arena moves nothing and waits for nothing; afterwards all of it is done."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from salus.client.arena import LEFT, STAYS, ranges
from salus.errors import SalusError
from salus.protocol.page import Word
from salus.protocol.slots import Kind, Record
from tests.memory.test_arena import MIB, Played, holds, opened, write
from tests.service.harness import SOURCE, eventually

JOB = Path(__file__).parent / "capture_job.py"


@pytest.fixture
def pair():
    arena, played = opened()
    yield arena, played
    arena.fail_at(0)
    arena.close()
    played.close()


@pytest.fixture
def capturing(pair):
    arena, played = pair
    arena.capture_began()
    yield arena, played
    arena.capture_ended()


def test_the_lane_is_not_left_within_a_capture(pair):
    arena, _ = pair
    address = arena.alloc("lane", 4 * MIB)
    arena.capture_began()
    before = arena.calls()
    assert arena.leave(ranges([(address, 4 * MIB)])) == STAYS
    assert arena.calls() == before, "the driver was not asked for anything"
    arena.capture_ended()
    assert arena.leave(ranges([(address, 4 * MIB)])) == LEFT


def test_the_device_is_not_waited_for_within_a_capture(capturing):
    arena, _ = capturing
    with pytest.raises(SalusError):
        arena.wait()


def test_what_the_service_sends_within_a_capture_is_taken_in_after_it(pair):
    arena, played = pair
    address = arena.alloc("lane", 4 * MIB)
    assert arena.yield_([])
    played.hear()
    arena.capture_began()
    played.send(Record(Kind.NEW_LANE, 0, 0, 7))
    before = arena.calls()
    for _ in range(3):
        assert arena.listen(), "it is asked again in a moment"
    assert arena.calls() == before and played.hear() == []
    write(address, 4 * MIB, 3)
    assert holds(address, 4 * MIB, 3), "the lane is still mapped"
    arena.capture_ended()
    assert not arena.listen()
    assert [(record.kind, record.b) for record in played.hear()] == [(Kind.LEFT, 7)]


def test_nothing_sent_needs_no_second_look(capturing):
    arena, _ = capturing
    assert not arena.listen()


def test_memory_is_paged_after_the_capture_and_not_within_it(pair):
    arena, played = pair
    address = arena.alloc("private", 4 * MIB)
    write(address, 4 * MIB, 5)
    assert arena.yield_([])
    played.hear()
    played.send(Record(Kind.PREPARE))
    played.send(Record(Kind.PAGE_OUT))
    arena.capture_began()
    before = arena.calls()
    assert arena.listen() and arena.calls() == before
    assert played.page.words[Word.OUT_BYTES] == 0
    arena.capture_ended()
    for _ in range(3000):
        if not arena.listen():
            break
    assert played.page.words[Word.OUT_BYTES] == 4 * MIB
    assert holds(address, 4 * MIB, 5)


def test_a_page_out_that_had_begun_goes_on_after_the_capture(pair):
    arena, played = pair
    arena.alloc("private", 4 * MIB)
    assert arena.yield_([])
    played.send(Record(Kind.PAGE_OUT))
    arena._c.salus_arena_listen()
    assert arena._c.salus_arena_has_to_page() == 1
    arena.capture_began()
    before = arena.calls()
    assert arena._held.salus_arena_page(1 << 40) == 2, "busy"
    assert arena._c.salus_arena_prepare() == 0 and arena.calls() == before
    arena.capture_ended()
    for _ in range(3000):
        if not arena.listen():
            break
    assert played.page.words[Word.OUT_BYTES] == 4 * MIB


def test_a_lease_is_not_taken_and_a_lane_not_given_up_for_good_within_a_capture(capturing):
    arena, _ = capturing
    assert not arena.resume() and not arena.detach()


def test_a_reconnection_waits_for_the_end_of_the_capture(pair):
    arena, played = pair
    address = arena.alloc("lane", 4 * MIB)
    assert arena.yield_([])
    played.hear()
    arena.capture_began()
    for slot in list(played.chunks):
        played.drop(slot)
    played.ours.close()
    again = Played()
    thread = threading.Thread(
        target=arena.reconnect, args=(again.page.address(), os.dup(again.theirs.fileno()), False), daemon=True
    )
    thread.start()
    thread.join(0.1)
    write(address, 4 * MIB, 9)
    assert holds(address, 4 * MIB, 9), "nothing was unmapped below the capture"
    assert thread.is_alive()
    arena.capture_ended()
    thread.join(20)
    played.theirs.detach()  # the arena closed it
    assert not thread.is_alive()
    again.close()


def test_captures_are_counted(pair):
    arena, _ = pair
    arena.capture_began()
    arena.capture_began()
    arena.capture_ended()
    assert arena.leave(ranges([])) == STAYS
    arena.capture_ended()
    assert arena.leave(ranges([])) == LEFT


def test_jobs_that_capture_share_a_lane_and_nothing_is_moved_within_a_capture(serve):
    """Real processes, a switch at every boundary."""
    service = serve("--policy", "rr", "--quantum", "0", "--capacity", "520MiB")
    go, rounds = service.folder / "go", 30

    def start(name: str):
        options = ("--name", name, "--persistent", "100MiB", "--ephemeral", "200MiB")
        command = [sys.executable, str(JOB), str(SOURCE), name, str(rounds), str(go)]
        return service.salus_in_background("run", *options, "--", *command)

    jobs = [start(name) for name in ("one", "two", "three")]
    eventually(lambda: sum(bool(row["pid"]) for row in service.jobs(everything=False).values()) == 3, "all are there")
    assert len({row["lane"] for row in service.jobs().values()}) == 1
    go.touch()
    for job in jobs:
        output, errors = job.communicate(timeout=100)
        assert job.returncode == 0, errors
        assert int(output.split()[-1]) > rounds // 2, "they switched at most boundaries"
    for row in service.jobs().values():
        assert row["iterations"] == 3 * rounds, "two within each capture, and one after it"
