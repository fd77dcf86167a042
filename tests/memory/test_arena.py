"""The arena alone, on the host device, against a service that a test plays itself."""

from __future__ import annotations

import array
import ctypes
import itertools
import os
import random
import socket
import threading
import time

import pytest

from salus.client.arena import LEFT, PASSED, Arena, ranges
from salus.errors import SalusError
from salus.protocol import slots
from salus.protocol.page import Page, Word
from salus.protocol.sealed import sealed_memory
from salus.protocol.slots import Kind, Record

MIB = 1 << 20
EVERYTHING = (1 << 40, 1 << 40)
PAGE, PAGE_DESCRIPTOR = Page.create()
"""One for all: an arena writes to it as long as the process lives."""


class Played:
    """The other end of the channel: gives quotas and chunks, and keeps what is published."""

    def __init__(self) -> None:
        self.page = PAGE
        for word in range(1, len(PAGE.words)):
            PAGE.words[word] = 0
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.settimeout(5)
        self.theirs = theirs
        self.sent = 0
        self.chunks: dict[int, int] = {}
        self.heard: list[Record] = []

    def send(self, *records: Record, fds: tuple[int, ...] = ()) -> None:
        self.sent += 1
        self.page.words[Word.SERVICE_PACKETS] = self.sent
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.ours.sendmsg([slots.pack(list(records))], ancillary)

    def hear(self) -> list[Record]:
        """What the arena said since the last time; published chunks are kept, taken ones let go of."""
        new: list[Record] = []
        self.ours.setblocking(False)
        while True:
            try:
                packet, ancillary, _, _ = self.ours.recvmsg(1 << 16, socket.CMSG_SPACE(4 * slots.MOST_RECORDS))
            except BlockingIOError:
                break
            fds = array.array("i")
            for _, _, data in ancillary:
                fds.frombytes(data)
            given = list(fds)
            for record in slots.unpack(packet):
                new.append(record)
                if record.kind == Kind.PUBLISH:
                    self.drop(record.slot)
                    self.chunks[record.slot] = given.pop(0)
                elif record.kind == Kind.TAKE:
                    self.drop(record.slot)
            assert not given
        self.ours.settimeout(5)
        self.heard += new
        return new

    def drop(self, slot: int) -> None:
        if slot in self.chunks:
            os.close(self.chunks.pop(slot))

    def close(self) -> None:
        for slot in list(self.chunks):
            self.drop(slot)
        self.ours.close()
        self.theirs.close()


def opened(quota: tuple[int, int] = EVERYTHING) -> tuple[Arena, Played]:
    arena, played = Arena(), Played()
    arena.fail_at(0)
    arena.open("host", 0, played.page.address(), played.theirs.fileno())
    played.send(Record(Kind.QUOTA, 0, *quota))
    assert arena.resume()
    return arena, played


@pytest.fixture
def pair():
    arena, played = opened()
    yield arena, played
    arena.fail_at(0)
    arena.close()
    played.close()


def write(address: int, size: int, word: int) -> None:
    words = (ctypes.c_uint64 * (size // 8)).from_address(address)
    for place in (0, size // 16, size // 8 - 1):
        words[place] = word + place


def holds(address: int, size: int, word: int) -> bool:
    words = (ctypes.c_uint64 * (size // 8)).from_address(address)
    return all(words[place] == word + place for place in (0, size // 16, size // 8 - 1))


def test_both_sides_cut_a_lane_alike():
    library = Arena()._c
    library.salus_slot_offset.restype = library.salus_slot_size.restype = ctypes.c_uint64
    for slot in (0, 1, 63, 64, 111, 112, 223, 224, 225, 1000):
        assert library.salus_slot_offset(slot) + library.salus_slot_size(slot) == slots.end_of(slot)


def test_a_segment_of_the_lane_is_published_when_the_lease_is_given_up(pair):
    arena, played = pair
    before = arena.segments()
    address = arena.alloc("lane", 20 * MIB)
    assert arena.segments() != before
    assert played.hear() == []
    assert arena.yield_([])
    assert [record.kind for record in played.hear()] == [Kind.PUBLISH] * 10
    assert arena.yield_([]) and played.hear() == [], "once is enough"
    assert played.page.words[Word.LANE_BYTES] == 20 * MIB
    arena.free("lane", address, 20 * MIB)


def test_a_lease_is_passed_on_only_if_the_service_knows_everything(pair):
    arena, played = pair
    words, word = played.page.words, ctypes.c_uint64()

    def passes(ticket: int) -> bool:
        return arena.pass_on(ctypes.addressof(word), ticket, True)

    address = arena.alloc("lane", 2 * MIB)
    words[Word.PASS], words[Word.PASS_SENT] = 5, words[Word.JOB_PACKETS]
    assert arena.yield_([]) and not passes(5), "it said what it has made"
    words[Word.PASS_SENT] = words[Word.JOB_PACKETS]
    assert not passes(4), "another ticket"
    words[Word.WAITING_FOR_MEMORY] = 1
    assert not passes(5), "a thread waits for memory"
    words[Word.WAITING_FOR_MEMORY] = 0
    assert word.value == words[Word.PASSED] == 0
    assert passes(5) and word.value == 11 and words[Word.PASSED] == 11
    words[Word.PASS] = 6
    assert arena.pass_on(ctypes.addressof(word), 6, False) and words[Word.PASSED] == 12 and word.value == 13
    # The same in one call with leaving the lane.
    when = arena.when

    def leaves(ticket: int) -> int:
        return arena.leave(ranges([(address, 2 * MIB)]), ctypes.addressof(word), ticket, True)

    words[Word.PASS] = 7
    assert leaves(7) == LEFT and word.value == 13, "it said that it keeps what it has there"
    assert leaves(7) == LEFT, "which the service has not heard yet"
    words[Word.PASS_SENT] = words[Word.JOB_PACKETS]
    before = time.monotonic_ns()
    assert leaves(6) == LEFT and leaves(0) == LEFT and word.value == 13
    assert leaves(7) == PASSED and word.value == 15 and words[Word.PASSED] == 15
    assert before < when[0] <= when[1] <= when[2] <= when[3] < time.monotonic_ns()
    arena.free("lane", address, 2 * MIB)


def test_what_is_alive_is_taken_and_returned_when_it_is_free_for_a_while(pair):
    arena, played = pair
    address = arena.alloc("lane", 20 * MIB)
    arena.yield_([])
    played.hear()
    assert arena.yield_([(address + 3 * MIB, MIB)])
    assert played.hear() == [Record(Kind.TAKE, 1)]
    assert played.page.words[Word.PROMOTED_BYTES] == 2 * MIB
    said = []
    for _ in range(3):
        arena.yield_([])
        said += played.hear()
    assert said == [Record(Kind.DROP, 1)]
    assert played.page.words[Word.PRIVATE_BYTES] == 0
    assert arena.resume(), "and is backed again, by a chunk of its own making"
    write(address, 20 * MIB, 7)
    assert holds(address, 20 * MIB, 7)


def test_a_slot_that_somebody_took_is_never_touched_again(pair):
    arena, played = pair
    address = arena.alloc("lane", 2 * MIB)
    arena.yield_([])
    played.hear()
    theirs = played.chunks[0]
    os.pwrite(theirs, b"secret of another", 0)
    played.send(Record(Kind.HOLE, 0))
    assert arena.resume(poison=True)
    write(address, 2 * MIB, 1)
    assert os.pread(theirs, 17, 0) == b"secret of another"


@pytest.mark.parametrize("heard_by", ["resume", "listen"])
def test_a_slot_that_could_not_be_given_up_at_once_is_given_up_before_anything_runs(pair, heard_by):
    arena, played = pair
    address = arena.alloc("lane", 2 * MIB)
    arena.yield_([])
    played.hear()
    theirs = played.chunks[0]
    os.pwrite(theirs, b"LIVE", 0)
    played.send(Record(Kind.HOLE, 0))
    arena.fail_at(1)
    if heard_by == "listen":
        arena.listen()
    assert arena.resume() or arena.resume()
    arena.fail_at(0)
    write(address, 2 * MIB, 1)
    assert os.pread(theirs, 4, 0) == b"LIVE"


@pytest.mark.parametrize("kind", ["private", "lane"])
def test_a_chunk_that_the_device_does_not_have_is_waited_for(pair, kind):
    arena, _ = pair
    arena.scarce(3)
    address = arena.alloc(kind, 2 * MIB)
    assert address, "the quota allows it, so it comes"
    write(address, 2 * MIB, 1)


def test_what_fails_for_another_reason_is_not_waited_for(pair):
    arena, _ = pair
    arena.scarce(1)
    arena.fail_at(1)
    assert not arena.alloc("private", 2 * MIB)
    arena.fail_at(0)


def test_a_chunk_that_cannot_be_imported_leaves_nothing_of_the_old_one(pair):
    arena, played = pair
    address = arena.alloc("lane", 2 * MIB)
    arena.yield_([])
    played.hear()
    old = os.dup(played.chunks[0])
    os.pwrite(old, b"LIVE", 0)
    empty = sealed_memory("too short", MIB)
    played.send(Record(Kind.CHUNK, 0), fds=(empty,))
    assert arena.resume(), "it has a chunk of its own making"
    write(address, 2 * MIB, 1)
    assert os.pread(old, 4, 0) == b"LIVE"
    os.close(old)
    os.close(empty)


def test_leaving_a_lane_is_answered_only_when_all_of_it_is_unmapped(pair):
    arena, played = pair
    arena.alloc("lane", 4 * MIB)
    arena.yield_([])
    played.hear()
    played.send(Record(Kind.NEW_LANE, 0, 0, 9))
    arena.fail_at(1)
    arena.listen()
    # The first try failed for one slot; it is tried again at once.
    assert played.hear() == [Record(Kind.LEFT, 0, 0, 9)]


def test_what_another_wrote_in_the_lane_is_there_and_poison_removes_it(pair):
    arena, played = pair
    chunk = sealed_memory("chunk", 2 * MIB)
    os.pwrite(chunk, b"of another", 0)
    played.send(Record(Kind.CHUNK, 0), fds=(chunk,))
    assert arena.resume()
    address = arena.alloc("lane", 2 * MIB)
    assert ctypes.string_at(address, 10) == b"of another", "the very same memory"
    assert arena.resume(poison=True)
    assert ctypes.string_at(address, 10) == b"\xff" * 10
    os.close(chunk)


def test_out_of_quota_it_asks_and_waits_and_a_refusal_is_out_of_memory():
    arena, played = opened((4 * MIB, 0))
    assert arena.alloc("private", 4 * MIB)
    played.send(Record(Kind.REFUSED))
    # The answer is there before the question: it is an old one, and does not count.
    played.send(Record(Kind.QUOTA, 0, 8 * MIB, 0))
    assert arena.alloc("private", 4 * MIB)
    assert played.hear() == []
    got: list[int | None] = []
    waits = threading.Thread(target=lambda: got.append(arena.alloc("lane", 2 * MIB)))
    waits.start()
    (record,) = slots.unpack(played.ours.recv(1 << 16))
    assert record == Record(Kind.WANT, 0, 8 * MIB, 2 * MIB)
    since = played.page.words[Word.WAITING_FOR_MEMORY]
    assert 0 < since < time.monotonic_ns()
    played.send(Record(Kind.QUOTA, 0, 8 * MIB, 2 * MIB))
    waits.join(5)
    assert got and got[0]
    assert played.page.words[Word.BEGAN_NS] == 0, "it had no time that counts"
    played.page.words[Word.BEGAN_NS] = 1000
    waits = threading.Thread(target=lambda: got.append(arena.alloc("private", 2 * MIB)))
    waits.start()
    played.ours.recv(1 << 16)
    played.send(Record(Kind.REFUSED))
    waits.join(5)
    assert got[1] is None
    assert played.page.words[Word.WAITING_FOR_MEMORY] == 0
    assert 1000 < played.page.words[Word.BEGAN_NS] < 1000 + time.monotonic_ns() - since, "as much later as it waited"
    arena.close()
    played.close()


def test_a_service_that_is_gone_is_nobody_to_wait_for():
    arena, played = opened((0, 0))
    played.ours.close()
    arena.go_alone()
    assert arena.alloc("private", 2 * MIB)
    assert arena.alloc("lane", 2 * MIB)
    assert not arena.yield_([]), "there is nobody to give the lease to, and nobody who would know what is ours"
    assert arena.detach()
    arena.close()
    played.close()


def test_a_service_that_is_started_again_is_waited_for():
    arena, played = opened((0, 0))
    mine = []
    waits = threading.Thread(target=lambda: mine.append(arena.alloc("private", 2 * MIB)))
    waits.start()
    played.ours.recv(1 << 16)
    played.ours.close()
    waits.join(0.1)
    assert waits.is_alive(), "nobody said that it may have it"
    again = Played()
    arena.reconnect(again.page.address(), os.dup(again.theirs.fileno()), holds=False)
    played.theirs.detach()  # the arena closed it
    (asked,) = slots.unpack(again.ours.recv(1 << 16))
    assert asked == Record(Kind.WANT, 0, 2 * MIB, 0), "it asks the new one"
    again.send(Record(Kind.QUOTA, 0, 2 * MIB, 0))
    waits.join(5)
    assert mine and mine[0]
    arena.close()
    again.close()


@pytest.mark.parametrize("holds", [True, False])
def test_after_a_restart_only_the_holder_of_the_lease_keeps_its_lane(pair, holds):
    arena, played = pair
    kept, gone = arena.alloc("lane", 2 * MIB), arena.alloc("lane", 2 * MIB)
    write(kept, 2 * MIB, 1)
    write(gone, 2 * MIB, 2)
    assert arena.yield_([(kept, 2 * MIB)])
    played.hear()
    assert arena.resume()
    write(gone, 2 * MIB, 2)
    for slot in list(played.chunks):
        played.drop(slot)
    played.ours.close()
    again = Played()
    arena.reconnect(again.page.address(), os.dup(again.theirs.fileno()), holds=holds)
    played.theirs.detach()  # the arena closed it
    assert again.hear() == [Record(Kind.OWN, 0)]
    again.send(Record(Kind.QUOTA, 0, *EVERYTHING))
    if not holds:
        assert arena.resume(), "it is granted a lease"
    assert holds_both(kept, gone) == (True, holds)
    assert arena.yield_([(kept, 2 * MIB)])
    assert again.hear() == [Record(Kind.PUBLISH, 1)], "and hands over what the lane has"
    again.close()


def holds_both(first: int, second: int) -> tuple[bool, bool]:
    return holds(first, 2 * MIB, 1), holds(second, 2 * MIB, 2)


def test_another_lane_means_other_memory_and_what_is_private_stays(pair):
    arena, played = pair
    first, second = arena.alloc("lane", 2 * MIB), arena.alloc("lane", 2 * MIB)
    write(first, 2 * MIB, 5)
    write(second, 2 * MIB, 6)
    arena.yield_([(first, 2 * MIB)])
    played.hear()
    played.send(Record(Kind.NEW_LANE, 0, 0, 77))
    arena.listen()
    assert played.hear() == [Record(Kind.LEFT, 0, 0, 77)]
    assert arena.resume()
    assert holds(first, 2 * MIB, 5)
    assert not holds(second, 2 * MIB, 6)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_ten_thousand_random_operations_agree_with_a_model():
    before = descriptors()
    arena, played = opened()
    rng = random.Random(4)
    blocks: dict[int, tuple[str, int, int]] = {}
    """By address: kind, size, word."""
    alive: set[int] = set()
    word = 1
    for step in range(10_000):
        what = rng.choices(("alloc", "free", "keep", "switch"), (5, 4, 2, 1))[0]
        if what == "alloc" and len(blocks) < 40:
            kind = rng.choice(("private", "lane"))
            size = rng.choice((1, 2, 3, 8, 20)) * MIB
            address = arena.alloc(kind, size)
            assert address is not None
            for other, (_, other_size, _) in blocks.items():
                assert address + size <= other or other + other_size <= address, "two blocks overlap"
            word += 1 << 20
            write(address, size, word)
            blocks[address] = (kind, size, word)
        elif what == "free" and blocks:
            address = rng.choice(list(blocks))
            kind, size, expected = blocks.pop(address)
            alive.discard(address)
            assert holds(address, size, expected), f"step {step}: something overwrote a live block"
            arena.free(kind, address, size)
        elif what == "keep" and blocks:
            address = rng.choice(list(blocks))
            if blocks[address][0] == "lane":
                alive.add(address)
        elif what == "switch":
            # Whatever is not kept is dead now, as at the end of an iteration.
            for address in [a for a, (kind, _, _) in blocks.items() if kind == "lane" and a not in alive]:
                arena.free("lane", address, blocks.pop(address)[1])
            assert arena.yield_([(address, blocks[address][1]) for address in alive])
            played.hear()
            for chunk in played.chunks.values():
                os.pwrite(chunk, b"another job was here", 0)
            assert arena.resume(poison=rng.random() < 0.5)
            for address, (_, size, expected) in blocks.items():
                assert holds(address, size, expected), f"step {step}: a switch overwrote a live block"
    private = sum(size + (-size) % (2 * MIB) for kind, size, _ in blocks.values() if kind == "private")
    words = played.page.words
    assert words[Word.PRIVATE_BYTES] - words[Word.PROMOTED_BYTES] == private
    arena.close()
    played.close()
    assert descriptors() == before


def first_fit(taken: dict[int, int], size: int, by_slots: bool) -> int:
    """Where a segment should lie: in the first gap with room. In the lane, what fills a slot or more begins at one."""
    at = 0
    for offset, length in [*sorted(taken.items()), (1 << 60, 0)]:
        slot = next(slot for slot in itertools.count() if slots.end_of(slot) > at)
        begins = slots.end_of(slot) - slots.size_of(slot)
        start = slots.end_of(slot) if by_slots and size >= slots.size_of(slot) and at != begins else at
        if start + size <= offset:
            return start
        at = offset + length
    raise AssertionError


@pytest.mark.parametrize("kind", ["private", "lane"])
def test_a_segment_lies_in_the_first_gap_that_has_room(pair, kind):
    """Whatever was looked for in vain before it, and was freed since."""
    arena, _ = pair
    rng = random.Random(7)
    base = arena.alloc(kind, 2 * MIB)
    assert base is not None
    taken = {0: 2 * MIB}
    for _ in range(3_000):
        if rng.random() < 0.55 and len(taken) < 60:
            size = rng.choice((2, 2, 4, 6, 8, 10, 20, 32, 40, 70)) * MIB
            expected = first_fit(taken, size, kind == "lane")
            assert arena.alloc(kind, size) == base + expected
            taken[expected] = size
        elif taken:
            offset = rng.choice(list(taken))
            arena.free(kind, base + offset, taken.pop(offset))


def scenario(arena: Arena, played: Played) -> list[bool]:
    """A bit of everything; whatever fails must fail cleanly. True for each part that went well."""
    went = []
    private, lane, more = arena.alloc("private", 4 * MIB), arena.alloc("lane", 6 * MIB), arena.alloc("lane", 2 * MIB)
    went += [private is not None, lane is not None, more is not None]
    live = [(lane, 2 * MIB)] if lane is not None else []
    if lane is not None:
        write(lane, 2 * MIB, 9)
    went.append(arena.yield_(live))
    played.hear()
    played.send(Record(Kind.HOLE, 2))
    went.append(arena.resume(poison=True))
    if not went[-1]:
        went.append(arena.resume(poison=True))
    if lane is not None:
        assert holds(lane, 2 * MIB, 9), "a failure cost live data"
    for _ in range(3):
        went.append(arena.yield_([]))
    played.hear()
    if private is not None:
        arena.free("private", private, 4 * MIB)
    return went


def test_whichever_call_of_the_driver_fails_nothing_leaks_or_hangs():
    arena, played = opened()
    arena.fail_at(0)
    assert all(scenario(arena, played))
    calls = arena.calls()
    assert calls > 30
    arena.close()
    played.close()
    before = descriptors()
    for number in range(1, calls + 1):
        arena, played = opened()
        arena.fail_at(number)
        assert not all(scenario(arena, played)) or arena.calls() >= number
        arena.fail_at(0)
        arena.close()
        played.close()
        assert descriptors() <= before, f"call {number} leaks"


def test_what_the_kernel_lacks_is_one_clear_line():
    arena, played = Arena(), Played()
    with pytest.raises(SalusError, match=r"memory cannot be shared: there is no libcuda"):
        arena.open("cuda", 0, played.page.address(), played.theirs.fileno())
    played.close()
