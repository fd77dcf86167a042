"""Paging: to the host and back, at the same addresses; the arena alone, on the host device."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from salus.protocol import slots
from salus.protocol.page import Word
from salus.protocol.sealed import sealed_memory
from salus.protocol.slots import Kind, Record
from tests.memory.test_arena import EVERYTHING, MIB, Played, descriptors, holds, opened, write


def page(arena, *, tries: int = 3000) -> None:
    """As the helper thread does: as often as it takes."""
    while arena.listen():
        tries -= 1
        assert tries, "it never came to an end"
        time.sleep(0.001)


def kinds(records: list[Record]) -> list[tuple[int, int, int]]:
    return [(record.kind, record.slot, record.a) for record in records]


def chunks_in_use() -> int:
    return sum("salus-chunk" in os.readlink(f"/proc/self/fd/{fd}") for fd in _open())


def _open() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]


@pytest.fixture
def pair():
    arena, played = opened()
    yield arena, played
    arena.fail_at(0)
    arena.close()
    played.close()


def test_everything_of_its_own_goes_to_the_host_and_comes_back(pair):
    arena, played = pair
    blocks = [(arena.alloc("private", size), size, number << 20) for number, size in enumerate((2 * MIB, 70 * MIB), 1)]
    promoted = arena.alloc("lane", 4 * MIB)
    blocks.append((promoted, 4 * MIB, 9 << 20))
    for block in blocks:
        write(*block)
    arena.yield_([(promoted, 4 * MIB)])
    played.hear()
    played.send(Record(Kind.PAGE_OUT))
    page(arena)
    assert kinds(played.hear()) == [(Kind.PAGED, Kind.PAGE_OUT, 1)]
    assert played.page.words[Word.OUT_BYTES] == 76 * MIB
    assert chunks_in_use() == 4, "only what holds it on the host is left"
    for block in blocks:
        assert holds(*block), "a script that looks at its memory meanwhile finds it"
    write(blocks[0][0], blocks[0][1], 77)
    played.send(Record(Kind.PAGE_IN))
    page(arena)
    assert kinds(played.hear()) == [(Kind.PAGED, Kind.PAGE_IN, 1)]
    assert played.page.words[Word.OUT_BYTES] == played.page.words[Word.HOME_BYTES] == 0
    assert holds(blocks[0][0], blocks[0][1], 77), "and what it wrote there comes along"
    for block in blocks[1:]:
        assert holds(*block)
    assert arena.resume()


def _alternates(arena, played) -> tuple[int, int]:
    """Two blocks of the lane, each in slots of its own; the first was alive at one boundary, the second at the next."""
    first, second = (arena.alloc("lane", 4 * MIB) for _ in range(2))
    assert arena.yield_([(first, 4 * MIB)]) and arena.resume()
    write(second, 4 * MIB, 5)
    assert arena.yield_([(second, 4 * MIB)])
    return first, second


def test_what_was_promoted_and_is_empty_does_not_go_to_the_host(pair):
    arena, played = pair
    first, second = _alternates(arena, played)
    assert played.page.words[Word.PRIVATE_BYTES] == played.page.words[Word.NEEDED_BYTES] == 8 * MIB
    played.hear()
    played.send(Record(Kind.PAGE_OUT))
    page(arena)
    said = played.hear()
    assert [record.kind for record in said] == [Kind.DROP, Kind.DROP, Kind.PAGED]
    assert played.page.words[Word.OUT_BYTES] == played.page.words[Word.PRIVATE_BYTES] == 4 * MIB
    assert played.page.words[Word.NEEDED_BYTES] == 4 * MIB, "it will come back with that"
    assert holds(second, 4 * MIB, 5)
    played.send(Record(Kind.PAGE_IN))
    page(arena)
    assert arena.resume(), "what was dropped is backed again, by the lane"
    write(first, 4 * MIB, 6)
    assert holds(first, 4 * MIB, 6) and holds(second, 4 * MIB, 5)


def test_what_is_empty_stays_while_the_job_may_use_it_again(pair):
    """It left nothing: it runs, and waits for memory in the middle of an iteration."""
    arena, played = pair
    first, _ = _alternates(arena, played)
    played.send(Record(Kind.QUOTA, 0, 8 * MIB, 8 * MIB))
    assert arena.resume()
    write(first, 4 * MIB, 7)
    played.hear()
    waits = threading.Thread(target=lambda: arena.alloc("private", 4 * MIB))
    waits.start()
    assert slots.unpack(played.ours.recv(1 << 16))[0].kind == Kind.WANT
    played.send(Record(Kind.PAGE_OUT, 0, 1))
    assert kinds(slots.unpack(played.ours.recv(1 << 16))) == [(Kind.PAGED, Kind.PAGE_OUT, 1)]
    played.send(Record(Kind.PAGE_IN), Record(Kind.QUOTA, 0, *EVERYTHING))
    assert kinds(slots.unpack(played.ours.recv(1 << 16))) == [(Kind.PAGED, Kind.PAGE_IN, 1)]
    played.send(Record(Kind.RESUME))
    waits.join(5)
    assert holds(first, 4 * MIB, 7)


@pytest.mark.parametrize("short", [False, True])
def test_where_memory_is_short_what_is_empty_makes_room_for_what_is_promoted(short):
    """So that a job whose gradients are now here, now there needs no more than one set of them."""
    arena, played = opened((4 * MIB, 1 << 30))
    first, second = (arena.alloc("lane", 4 * MIB) for _ in range(2))
    assert arena.yield_([(first, 4 * MIB)])
    played.hear()
    if short:
        played.send(Record(Kind.PREPARE))
    assert arena.resume()
    write(second, 4 * MIB, 5)
    left: list[bool] = []
    leaves = threading.Thread(target=lambda: left.append(arena.yield_([(second, 4 * MIB)])))
    leaves.start()
    said = slots.unpack(played.ours.recv(1 << 16))
    if not short:
        assert [record.kind for record in said] == [Kind.WANT], "it needs both for a while"
        played.send(Record(Kind.QUOTA, 0, *EVERYTHING))
    leaves.join(5)
    assert left == [True]
    played.hear()
    assert played.page.words[Word.PRIVATE_BYTES] == (4 if short else 8) * MIB
    assert played.page.words[Word.NEEDED_BYTES] == (4 if short else 8) * MIB
    assert arena.resume() and holds(second, 4 * MIB, 5)
    arena.close()
    played.close()


def test_what_was_in_use_at_a_boundary_is_needed_although_it_is_empty_at_the_last(pair):
    """Gradients that happen to be gone when the job is paged out: it would have to ask for their place again."""
    arena, played = pair
    kept, gradients = arena.alloc("private", 4 * MIB), arena.alloc("lane", 4 * MIB)
    write(kept, 4 * MIB, 3)
    for live in ([(gradients, 4 * MIB)], []):
        assert arena.yield_(live)
        if live:
            assert arena.resume()
    played.hear()
    played.send(Record(Kind.PAGE_OUT))
    page(arena)
    assert [record.kind for record in played.hear()] == [Kind.DROP, Kind.DROP, Kind.PAGED]
    words = played.page.words
    assert (words[Word.PRIVATE_BYTES], words[Word.NEEDED_BYTES]) == (4 * MIB, 8 * MIB)
    played.send(Record(Kind.PAGE_IN))
    page(arena)
    assert arena.resume() and holds(kept, 4 * MIB, 3)


def test_where_memory_is_short_a_job_asks_for_what_is_missing_and_not_for_what_it_gives_back():
    arena, played = opened((4 * MIB, 1 << 30))
    first, second = arena.alloc("lane", 4 * MIB), arena.alloc("lane", 6 * MIB)
    assert arena.yield_([(first, 4 * MIB)])
    played.hear()
    played.send(Record(Kind.PREPARE))
    assert arena.resume()
    left: list[bool] = []
    leaves = threading.Thread(target=lambda: left.append(arena.yield_([(second, 6 * MIB)])))
    leaves.start()
    wants = [record for record in slots.unpack(played.ours.recv(1 << 16)) if record.kind == Kind.WANT]
    assert [record.a for record in wants] == [6 * MIB], "not the 10 that it has for a moment"
    played.send(Record(Kind.QUOTA, 0, *EVERYTHING))
    leaves.join(5)
    assert left == [True]
    arena.close()
    played.close()


def test_a_job_asks_once_for_all_that_it_keeps_of_its_lane():
    """Where memory is short, others are displaced each time that it asks."""
    arena, played = opened((0, 1 << 30))
    kept = [(arena.alloc("lane", 4 * MIB), 4 * MIB) for _ in range(5)]
    left: list[bool] = []
    leaves = threading.Thread(target=lambda: left.append(arena.yield_(kept)))
    leaves.start()
    wants = [record for record in slots.unpack(played.ours.recv(1 << 16)) if record.kind == Kind.WANT]
    assert [record.a for record in wants] == [20 * MIB]
    played.send(Record(Kind.QUOTA, 0, 20 * MIB, 1 << 30))
    leaves.join(5)
    assert left == [True]
    arena.close()
    played.close()


def test_a_lane_that_cannot_be_cleared_is_kept_whole():
    """Whichever call of the driver fails: the job either leaves, or goes on with all of its memory."""
    stayed = 0
    for number in range(1, 12):
        arena, played = opened()
        played.page.words[Word.SCRUB] = 1
        block = arena.alloc("lane", 4 * MIB)
        assert arena.yield_([(block, 4 * MIB)])
        played.send(Record(Kind.PREPARE))
        assert arena.resume()
        other = arena.alloc("lane", 4 * MIB)
        arena.fail_at(number)
        left = arena.yield_([])
        arena.fail_at(0)
        if not left:
            stayed += 1
            for address in (block, other):
                write(address, 4 * MIB, number)
                assert holds(address, 4 * MIB, number)
        arena.close()
        played.close()
    assert stayed


def test_host_memory_is_kept_for_the_next_time_if_the_service_says_so(pair):
    arena, played = pair
    address = arena.alloc("private", 8 * MIB)
    for word in (1, 2):
        write(address, 8 * MIB, word)
        played.send(Record(Kind.PAGE_OUT))
        page(arena)
        played.send(Record(Kind.PAGE_IN, 0, 1))
        page(arena)
        assert holds(address, 8 * MIB, word)
        assert played.page.words[Word.HOME_BYTES] == 8 * MIB
    played.hear()


def test_host_memory_of_what_is_freed_is_there_for_the_next_and_never_more_than_was_needed_at_once(pair):
    arena, played = pair

    def out_and_in(*sizes: int, keep: int = 1) -> int:
        blocks = [(arena.alloc("private", size), size, 20 + number) for number, size in enumerate(sizes)]
        for block in blocks:
            write(*block)
        played.send(Record(Kind.PAGE_OUT))
        page(arena)
        played.send(Record(Kind.PAGE_IN, 0, keep))
        page(arena)
        assert all(holds(*block) for block in blocks)
        played.hear()
        for address, size, _ in blocks:
            arena.free("private", address, size)
        return int(played.page.words[Word.HOME_BYTES])

    assert out_and_in(8 * MIB, 4 * MIB) == 12 * MIB
    assert out_and_in(8 * MIB) == 12 * MIB, "the one of its size was used again"
    assert out_and_in(6 * MIB) == 6 * MIB, "there was none of its size: it took the place of others"
    assert out_and_in(16 * MIB) == 16 * MIB
    assert out_and_in(2 * MIB, keep=0) == 0, "the host is needed by others"


def test_memory_that_is_freed_while_it_is_out_is_gone_for_good(pair):
    arena, played = pair
    first, second = arena.alloc("private", 4 * MIB), arena.alloc("private", 4 * MIB)
    write(second, 4 * MIB, 5)
    played.send(Record(Kind.PAGE_OUT))
    page(arena)
    arena.free("private", first, 4 * MIB)
    assert played.page.words[Word.OUT_BYTES] == 4 * MIB
    played.send(Record(Kind.PAGE_IN))
    page(arena)
    assert holds(second, 4 * MIB, 5)
    assert played.page.words[Word.PRIVATE_BYTES] == 4 * MIB
    played.hear()


def test_new_memory_waits_until_the_rest_is_back(pair):
    arena, played = pair
    arena.alloc("private", 4 * MIB)
    played.send(Record(Kind.PAGE_OUT))
    page(arena)
    played.hear()
    got: list[int | None] = []
    waits = threading.Thread(target=lambda: got.append(arena.alloc("private", 2 * MIB)))
    waits.start()
    (record,) = slots.unpack(played.ours.recv(1 << 16))
    assert record.kind == Kind.WANT, "whatever its quota says, nothing is made on the device now"
    played.send(Record(Kind.PAGE_IN))
    waits.join(5)
    assert got and got[0], "the thread that waited brought everything back itself"


def test_a_job_that_waits_in_mid_iteration_goes_with_its_part_of_the_lane_and_comes_back():
    arena, played = opened((8 * MIB, 4 * MIB))
    mine, work = arena.alloc("private", 4 * MIB), arena.alloc("lane", 4 * MIB)
    write(mine, 4 * MIB, 1)
    write(work, 4 * MIB, 2)
    got: list[int | None] = []
    waits = threading.Thread(target=lambda: got.append(arena.alloc("lane", 4 * MIB)))
    waits.start()
    assert slots.unpack(played.ours.recv(1 << 16))[0].kind == Kind.WANT
    played.send(Record(Kind.PAGE_OUT, 0, 1))
    assert kinds(slots.unpack(played.ours.recv(1 << 16))) == [(Kind.PAGED, Kind.PAGE_OUT, 1)]
    # Somebody else works in the lane meanwhile.
    lane = [sealed_memory("salus-chunk", 2 * MIB) for _ in range(2)]
    played.send(Record(Kind.CHUNK, 0), Record(Kind.CHUNK, 1), Record(Kind.QUOTA, 0, *EVERYTHING), fds=tuple(lane))
    played.send(Record(Kind.PAGE_IN))
    assert kinds(slots.unpack(played.ours.recv(1 << 16))) == [(Kind.PAGED, Kind.PAGE_IN, 1)]
    waits.join(0.1)
    assert not got, "it has the memory and no lease"
    for chunk in lane:
        assert os.pread(chunk, 8, 0) == bytes(8), "and nothing of it is in the lane before it has one"
    played.send(Record(Kind.RESUME))
    waits.join(5)
    assert got and got[0]
    assert holds(mine, 4 * MIB, 1) and holds(work, 4 * MIB, 2)
    write(work, 4 * MIB, 3)
    assert any(os.pread(chunk, 8, 0) != bytes(8) for chunk in lane), "it is in the lane's own chunks again"
    arena.close()
    played.close()
    for chunk in lane:
        os.close(chunk)


def test_in_a_lane_of_several_users_it_leaves_nothing_behind():
    arena, played = opened((8 * MIB, 8 * MIB))
    played.page.words[Word.SCRUB] = 1
    work, freed = arena.alloc("lane", 4 * MIB), arena.alloc("lane", 4 * MIB)
    write(work, 4 * MIB, 2)
    write(freed, 4 * MIB, 3)
    arena.yield_([])
    played.hear()
    assert all(os.pread(chunk, 2 * MIB, 0) == bytes(2 * MIB) for chunk in played.chunks.values()), "at every boundary"
    assert arena.resume()
    write(work, 4 * MIB, 2)
    write(freed, 4 * MIB, 3)
    arena.free("lane", freed, 4 * MIB)
    waits = threading.Thread(target=lambda: arena.alloc("lane", 16 * MIB))
    waits.start()
    played.ours.recv(1 << 16)
    played.send(Record(Kind.PAGE_OUT, 0, 1))
    assert kinds(slots.unpack(played.ours.recv(1 << 16))) == [(Kind.PAGED, Kind.PAGE_OUT, 1)]
    assert all(os.pread(chunk, 2 * MIB, 0) == bytes(2 * MIB) for chunk in played.chunks.values()), "and when it goes"
    played.send(Record(Kind.QUOTA, 0, *EVERYTHING), Record(Kind.PAGE_IN), Record(Kind.RESUME))
    waits.join(5)
    assert holds(work, 4 * MIB, 2)
    arena.close()
    played.close()


def test_one_that_is_suspended_cannot_be_at_a_boundary():
    """A service that is killed while a job waits in a boundary for room of its own, paged out by then."""
    arena, played = opened((4 * MIB, 8 * MIB))
    arena.alloc("private", 4 * MIB)
    work = arena.alloc("lane", 4 * MIB)
    write(work, 4 * MIB, 2)
    left: list[bool] = []
    waits = threading.Thread(target=lambda: left.append(arena.yield_([(work, 4 * MIB)])))
    waits.start()
    assert slots.unpack(played.ours.recv(1 << 16))[0].kind == Kind.WANT
    played.send(Record(Kind.PAGE_OUT, 0, 1))
    assert kinds(slots.unpack(played.ours.recv(1 << 16))) == [(Kind.PAGED, Kind.PAGE_OUT, 1)]
    played.ours.close()
    waits.join(5)
    assert left == [False]
    assert not arena.yield_([(work, 4 * MIB)]), "nor any later"
    again = Played()
    assert arena.where() == (True, True)
    arena.reconnect(again.page.address(), os.dup(again.theirs.fileno()), holds=False)
    played.theirs.detach()  # the arena closed it
    again.send(Record(Kind.QUOTA, 0, *EVERYTHING), Record(Kind.PAGE_IN))
    page(arena)
    more: list[int | None] = []
    grows = threading.Thread(target=lambda: more.append(arena.alloc("lane", 4 * MIB)))
    grows.start()
    grows.join(0.1)
    assert not more, "it goes on in its iteration, and still has no lease"
    again.send(Record(Kind.RESUME))
    grows.join(5)
    assert more and more[0]
    assert holds(work, 4 * MIB, 2)
    again.hear()
    assert arena.yield_([(work, 4 * MIB)])
    assert holds(work, 4 * MIB, 2)
    arena.close()
    again.close()


def test_host_memory_for_a_page_out_that_did_not_happen_is_given_back(pair):
    arena, played = pair
    address = arena.alloc("private", 8 * MIB)
    write(address, 8 * MIB, 1)
    arena.fail_at(5)  # the copy
    played.send(Record(Kind.PAGE_OUT))
    page(arena)
    assert kinds(played.hear()) == [(Kind.PAGED, Kind.PAGE_OUT, 0)]
    assert played.page.words[Word.HOME_BYTES] == 0
    assert holds(address, 8 * MIB, 1)


def test_what_was_under_way_when_the_service_was_killed_is_undone():
    arena, played = opened()
    address = arena.alloc("private", 8 * MIB)
    write(address, 8 * MIB, 1)
    played.send(Record(Kind.PAGE_OUT))
    arena._c.salus_arena_listen()  # ordered, and not begun
    assert arena.where() == (False, False)
    played.ours.close()
    again = Played()
    arena.reconnect(again.page.address(), os.dup(again.theirs.fileno()), holds=False)
    played.theirs.detach()  # the arena closed it
    page(arena)
    assert again.page.words[Word.OUT_BYTES] == 0
    again.send(Record(Kind.QUOTA, 0, *EVERYTHING))
    assert arena.alloc("private", 2 * MIB), "nobody has to bring it back before it gets more"
    assert holds(address, 8 * MIB, 1)
    arena.close()
    again.close()


def test_one_that_went_in_mid_iteration_may_go_again_before_it_has_a_lease():
    arena, played = opened((8 * MIB, 4 * MIB))
    mine, work = arena.alloc("private", 4 * MIB), arena.alloc("lane", 4 * MIB)
    write(mine, 4 * MIB, 1)
    write(work, 4 * MIB, 2)
    got: list[int | None] = []
    waits = threading.Thread(target=lambda: got.append(arena.alloc("lane", 4 * MIB)))
    waits.start()
    assert slots.unpack(played.ours.recv(1 << 16))[0].kind == Kind.WANT
    for with_lane in (1, 0, 0):
        played.send(Record(Kind.PAGE_OUT, 0, with_lane))
        assert kinds(slots.unpack(played.ours.recv(1 << 16))) == [(Kind.PAGED, Kind.PAGE_OUT, 1)]
        played.send(Record(Kind.QUOTA, 0, *EVERYTHING), Record(Kind.PAGE_IN))
        assert kinds(slots.unpack(played.ours.recv(1 << 16))) == [(Kind.PAGED, Kind.PAGE_IN, 1)]
        waits.join(0.05)
        assert not got, "it has no lease"
    played.send(Record(Kind.RESUME))
    waits.join(5)
    assert got and got[0]
    assert holds(mine, 4 * MIB, 1) and holds(work, 4 * MIB, 2)
    arena.close()
    played.close()


def test_it_does_not_go_while_another_thread_is_at_work(pair):
    arena, played = pair
    address = arena.alloc("private", 4 * MIB)
    write(address, 4 * MIB, 1)
    busy = True

    def work() -> None:
        # Python's lock is let go of during the call, as in a framework's operations.
        buffer = ctypes.create_string_buffer(64 * MIB)
        while busy:
            ctypes.memset(buffer, 1, 64 * MIB)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        time.sleep(0.05)
        played.send(Record(Kind.PAGE_OUT))
        deadline = time.monotonic() + 20
        while arena.listen() and time.monotonic() < deadline:
            time.sleep(0.001)
        said = kinds(played.hear())
    finally:
        busy = False
        thread.join()
    # It may have found a moment between two calls; if not, it said so. Either way nothing is lost.
    assert said in ([(Kind.PAGED, Kind.PAGE_OUT, 0)], [(Kind.PAGED, Kind.PAGE_OUT, 1)])
    assert holds(address, 4 * MIB, 1)


THREADS = """
import sys, threading, time
sys.path[:0] = sys.argv[1:3]
from salus.client.lease import WHERE_IT_WAITS
from tests.memory.test_arena import MIB, opened, write
from tests.memory.test_paging import Kind, Record, kinds

arena, played = opened()
arena.trust(WHERE_IT_WAITS)
write(arena.alloc("private", 4 * MIB), 4 * MIB, 1)
done = threading.Event()
waits = {"waits": done.wait, "works": lambda: time.sleep(30)}[sys.argv[3]]
threading.Thread(target=waits, daemon=True).start()
time.sleep(0.1)
played.send(Record(Kind.PAGE_OUT))
while arena.listen():
    time.sleep(0.001)
print(kinds(played.hear())[0][2], flush=True)
done.set()
"""


@pytest.mark.parametrize(("thread", "goes"), [("waits", "1"), ("works", "0")])
def test_it_goes_only_while_other_threads_of_python_are_known_to_wait(thread, goes):
    """One that sleeps somewhere in the script may be in the middle of an operation, for all that is known."""
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-c", THREADS, str(root / "src"), str(root), thread]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.strip() == goes, done.stderr


def test_a_service_that_is_gone_leaves_nobody_on_the_host():
    arena, played = opened()
    address = arena.alloc("private", 4 * MIB)
    write(address, 4 * MIB, 1)
    played.send(Record(Kind.PAGE_OUT))
    page(arena)
    played.ours.close()
    assert arena.detach()
    assert played.page.words[Word.OUT_BYTES] == 0
    assert holds(address, 4 * MIB, 1)
    assert arena.alloc("private", 2 * MIB)
    arena.close()
    played.close()


def test_whichever_call_of_the_driver_fails_nothing_is_lost_or_leaks():
    before = descriptors()

    def story(fail_at: int) -> int:
        arena, played = opened((16 * MIB, 8 * MIB))
        blocks = [(arena.alloc("private", 4 * MIB), 4 * MIB, 1), (arena.alloc("lane", 4 * MIB), 4 * MIB, 2)]
        for block in blocks:
            write(*block)
        arena.yield_([(blocks[1][0], 4 * MIB)])
        played.hear()
        arena.fail_at(fail_at)
        played.send(Record(Kind.PAGE_OUT))
        page(arena)
        went = kinds(played.hear())
        assert went in ([(Kind.PAGED, Kind.PAGE_OUT, 1)], [(Kind.PAGED, Kind.PAGE_OUT, 0)]), fail_at
        for block in blocks:
            assert holds(*block), fail_at
        if went[0][2]:
            for _ in range(2):
                played.send(Record(Kind.PAGE_IN))
                page(arena)
                if kinds(played.hear()) == [(Kind.PAGED, Kind.PAGE_IN, 1)]:
                    break
        assert played.page.words[Word.OUT_BYTES] == 0, fail_at
        for block in blocks:
            assert holds(*block), fail_at
        calls = arena.calls()
        arena.fail_at(0)
        assert arena.resume()
        arena.close()
        played.close()
        return calls

    calls = story(0)
    assert calls > 20
    for call in range(1, calls + 1):
        story(call)
        assert descriptors() == before, f"call {call} left a descriptor behind"


@pytest.mark.parametrize("scrub", [0, 1])
def test_whichever_call_fails_in_mid_iteration_nothing_is_lost(scrub):
    before = descriptors()

    def story(fail_at: int) -> int:
        arena, played = opened((8 * MIB, 4 * MIB))
        played.page.words[Word.SCRUB] = scrub
        mine, work = arena.alloc("private", 4 * MIB), arena.alloc("lane", 4 * MIB)
        arena.yield_([])
        played.hear()
        write(mine, 4 * MIB, 1)
        write(work, 4 * MIB, 2)
        got: list[int | None] = []
        arena.fail_at(fail_at)
        waits = threading.Thread(target=lambda: got.append(arena.alloc("lane", 4 * MIB)))
        waits.start()
        assert slots.unpack(played.ours.recv(1 << 16))[0].kind == Kind.WANT
        played.send(Record(Kind.PAGE_OUT, 0, 1))
        (answer,) = slots.unpack(played.ours.recv(1 << 16))
        if answer.a:
            while True:
                played.send(Record(Kind.PAGE_IN))
                (back,) = slots.unpack(played.ours.recv(1 << 16))
                if back.a:
                    break
            played.send(Record(Kind.RESUME))
        played.send(Record(Kind.QUOTA, 0, *EVERYTHING))
        waits.join(10)
        assert not waits.is_alive(), fail_at
        assert holds(mine, 4 * MIB, 1) and holds(work, 4 * MIB, 2), fail_at
        calls = arena.calls()
        arena.fail_at(0)
        arena.close()
        played.close()
        return calls

    for call in range(1, story(0) + 1):
        story(call)
        assert descriptors() == before, f"call {call} left a descriptor behind"


def test_one_that_leaves_its_lane_and_goes_to_the_host_does_both_and_says_both():
    arena, played = opened()
    mine, work = arena.alloc("private", 4 * MIB), arena.alloc("lane", 4 * MIB)
    write(mine, 4 * MIB, 3)
    arena.free("lane", work, 4 * MIB)
    arena.yield_([])
    played.hear()
    played.send(Record(Kind.NEW_LANE, 0, 0, 7))
    played.send(Record(Kind.PAGE_OUT))
    page(arena)
    said = played.hear()
    assert [record.b for record in said if record.kind == Kind.LEFT] == [7]
    assert [(r.slot, r.a) for r in said if r.kind == Kind.PAGED] == [(Kind.PAGE_OUT, 1)]
    assert played.page.words[Word.MADE_BYTES] == 0, "nothing of the lane is left"
    assert holds(mine, 4 * MIB, 3)
    arena.close()
    played.close()


def test_host_memory_that_could_not_be_unmapped_is_tried_again():
    before = descriptors()
    arena, played = opened()
    mine = arena.alloc("private", 4 * MIB)
    played.send(Record(Kind.PAGE_OUT))
    page(arena)
    arena.fail_at(2)  # the first is the segment's, the second its home's
    arena.free("private", mine, 4 * MIB)
    arena.fail_at(0)
    played.send(Record(Kind.PAGE_IN))
    page(arena)
    played.hear()
    assert played.page.words[Word.HOME_BYTES] == 0
    arena.close()
    played.close()
    assert descriptors() <= before


def test_one_that_is_back_on_the_device_and_has_no_lease_still_counts_as_out_in_mid_iteration():
    arena, played = opened((4 * MIB, 8 * MIB))
    arena.alloc("private", 4 * MIB)
    work = arena.alloc("lane", 4 * MIB)
    left: list[bool] = []
    waits = threading.Thread(target=lambda: left.append(arena.yield_([(work, 4 * MIB)])))
    waits.start()
    assert slots.unpack(played.ours.recv(1 << 16))[0].kind == Kind.WANT
    played.send(Record(Kind.PAGE_OUT, 0, 1))
    assert kinds(slots.unpack(played.ours.recv(1 << 16))) == [(Kind.PAGED, Kind.PAGE_OUT, 1)]
    played.ours.close()
    waits.join(5)
    assert left == [False] and arena.where() == (True, True)
    again = Played()
    arena.reconnect(again.page.address(), os.dup(again.theirs.fileno()), holds=False)
    played.theirs.detach()  # the arena closed it
    again.send(Record(Kind.PAGE_IN))
    arena._c.salus_arena_listen()
    # If the service dies now as well, others may run in the lane that this one had.
    assert arena.where() == (True, True)
    page(arena)
    again.hear()
    arena.close()
    played.close()
    again.close()


def test_one_that_was_to_leave_its_lane_when_the_service_went_leaves_it_before_it_goes_alone():
    arena, played = opened()
    arena.alloc("private", 2 * MIB)
    work = arena.alloc("lane", 2 * MIB)
    arena.yield_([])
    played.hear()
    played.send(Record(Kind.NEW_LANE, 0, 0, 7))
    played.send(Record(Kind.PAGE_OUT))
    arena._c.salus_arena_listen()
    played.ours.close()
    assert arena.detach()
    write(work, 2 * MIB, 5)
    arena.resume()
    assert holds(work, 2 * MIB, 5), "what it got then is its own"
    arena.close()
    played.close()


def test_a_page_in_that_is_tried_again_makes_no_host_memory():
    arena, played = opened()
    for _ in range(3):
        arena.alloc("private", 64 * MIB)
    played.send(Record(Kind.PAGE_OUT))
    page(arena)
    arena.fail_at(16)  # part of it is in by then
    played.send(Record(Kind.PAGE_IN))
    page(arena)
    arena.fail_at(0)
    played.send(Record(Kind.PAGE_IN))
    page(arena)
    assert played.page.words[Word.OUT_BYTES] == played.page.words[Word.HOME_BYTES] == 0
    played.hear()
    arena.close()
    played.close()
