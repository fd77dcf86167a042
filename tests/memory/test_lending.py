"""Memory of an arena that another process uses: by descriptor, and kept where it is until it is returned."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from salus.client import lending
from salus.client.arena import LEFT, STAYS, ranges
from salus.client.lending import LOANS, Descriptor, Lender, Region, is_borrowed
from salus.errors import SalusError
from salus.protocol.page import Word
from salus.protocol.slots import Kind, Record
from tests.memory.test_arena import EVERYTHING, MIB, holds, opened, write
from tests.memory.test_paging import chunks_in_use, kinds, page
from tests.service.harness import SOURCE, eventually

JOB = Path(__file__).parent / "lending_job.py"


@pytest.fixture
def pair():
    arena, played = opened()
    yield arena, played
    arena.fail_at(0)
    arena.close()
    played.close()


@pytest.fixture
def lender(pair):
    return Lender(pair[0], "host")


def never() -> None:
    pytest.fail("it is not on the host")


class Borrowed:
    """What arrives in another process, here: the bytes of a loan, until they are dropped."""

    def __init__(self, lent: tuple[Region, int, int], size: int) -> None:
        region, offset, loan = lent
        # As if it had come by a message: descriptors of its own.
        chunks, loans = region._descriptors()
        own = [Descriptor(one.token, os.dup(one.descriptor), one.size_bytes) for one in (*chunks, loans)]
        arrived = Region(region.device, tuple(own[:-1]), own[-1])
        self.capsule = arrived.borrow(0, offset, size, loan)
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        self._managed = get(self.capsule, b"dltensor")
        words = ctypes.cast(self._managed, ctypes.POINTER(ctypes.c_uint64))
        self.address = words[0]
        self.size = ctypes.cast(words[3], ctypes.POINTER(ctypes.c_int64))[0]

    def drop(self) -> None:
        words = ctypes.cast(self._managed, ctypes.POINTER(ctypes.c_uint64))
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(words[7])(self._managed)


def test_what_is_lent_is_the_same_memory(pair, lender):
    arena, _ = pair
    address = arena.alloc("private", 4 * MIB)
    write(address, 4 * MIB, 5)
    borrowed = Borrowed(lender.lend(address + MIB, MIB, None, never), MIB)
    assert borrowed.size == MIB and borrowed.address != address + MIB and is_borrowed(borrowed.address)
    write(address + MIB, MIB, 6)
    assert holds(borrowed.address, MIB, 6)
    write(borrowed.address, MIB, 7)
    assert holds(address + MIB, MIB, 7)
    borrowed.drop()
    assert not is_borrowed(borrowed.address)


def test_what_lies_elsewhere_is_not_lent(pair, lender):
    elsewhere = ctypes.create_string_buffer(64)
    assert lender.lend(ctypes.addressof(elsewhere), 64, None, never) is None
    assert lender.count == 0


def test_memory_of_the_lane_is_made_private_before_anybody_gets_it(pair, lender):
    arena, played = pair
    address = arena.alloc("lane", 4 * MIB)
    write(address, 4 * MIB, 5)
    assert arena.leave(ranges([])) == LEFT
    assert [record.kind for record in played.hear()] == [Kind.PUBLISH, Kind.PUBLISH], "others may have it, too"
    assert arena.resume()
    borrowed = Borrowed(lender.lend(address + 2 * MIB - 512, 1024, None, never), 1024)
    assert [(record.kind, record.slot) for record in played.hear()] == [(Kind.TAKE, 0), (Kind.TAKE, 1)]
    assert played.page.words[Word.PROMOTED_BYTES] == 4 * MIB
    ctypes.memset(borrowed.address, 9, 1024)
    found = (ctypes.c_uint8 * 1024).from_address(address + 2 * MIB - 512)
    assert bytes(found) == b"\x09" * 1024, "both slots, side by side"
    borrowed.drop()


def test_a_slot_that_no_other_job_knows_is_kept_without_a_word(pair, lender):
    arena, played = pair
    address = arena.alloc("lane", 2 * MIB)
    borrowed = Borrowed(lender.lend(address, MIB, None, never), MIB)
    assert arena.leave(ranges([(address, MIB)])) == LEFT
    assert played.hear() == [], "it was never the lane's"
    borrowed.drop()


def test_memory_of_the_lane_that_may_not_become_private_is_not_lent(pair, lender):
    arena, played = pair
    address = arena.alloc("lane", 2 * MIB)
    played.send(Record(Kind.QUOTA, 0, 0, 8 * MIB))
    assert arena.listen() is False

    def refuse() -> None:
        played.ours.recv(1 << 16)
        played.send(Record(Kind.REFUSED))

    refuses = threading.Thread(target=refuse)
    refuses.start()
    with pytest.raises(SalusError, match="more memory of its own"):
        lender.lend(address, MIB, None, never)
    refuses.join()
    assert lender.count == 0
    played.send(Record(Kind.QUOTA, 0, *EVERYTHING))


def test_a_job_that_lent_something_is_not_paged_out_until_it_is_returned(pair, lender):
    arena, played = pair
    address = arena.alloc("private", 4 * MIB)
    write(address, 4 * MIB, 5)
    assert arena.yield_([])
    lent = lender.lend(address, MIB, None, never)
    played.hear()
    for borrowed in (None, Borrowed(lent, MIB)):
        played.send(Record(Kind.PAGE_OUT))
        page(arena)
        assert kinds(played.hear()) == [(Kind.PAGED, Kind.PAGE_OUT, 0)]
        assert played.page.words[Word.OUT_BYTES] == 0
        if borrowed is not None:
            borrowed.drop()
    lender.collect()
    played.send(Record(Kind.PAGE_OUT))
    page(arena)
    assert kinds(played.hear()) == [(Kind.PAGED, Kind.PAGE_OUT, 1)]
    assert holds(address, 4 * MIB, 5)


def test_a_page_out_that_was_ordered_before_the_loan_does_not_happen(pair, lender):
    arena, played = pair
    address = arena.alloc("private", 4 * MIB)
    write(address, 4 * MIB, 5)
    assert arena.yield_([])
    played.hear()
    played.send(Record(Kind.PAGE_OUT))
    arena._c.salus_arena_listen()
    borrowed = Borrowed(lender.lend(address, 4 * MIB, None, lambda: page(arena)), 4 * MIB)
    assert kinds(played.hear()) == [(Kind.PAGED, Kind.PAGE_OUT, 0)]
    assert holds(borrowed.address, 4 * MIB, 5)
    borrowed.drop()


def test_memory_that_is_on_the_host_is_fetched_before_it_is_lent(pair, lender):
    arena, played = pair
    address = arena.alloc("private", 4 * MIB)
    write(address, 4 * MIB, 5)
    assert arena.yield_([])
    played.send(Record(Kind.PAGE_OUT))
    page(arena)
    fetched = []

    def fetch() -> None:
        played.send(Record(Kind.PAGE_IN))
        page(arena)
        fetched.append(1)

    borrowed = Borrowed(lender.lend(address, 4 * MIB, None, fetch), 4 * MIB)
    assert fetched == [1] and holds(borrowed.address, 4 * MIB, 5)
    borrowed.drop()


def test_the_owner_is_kept_until_the_loan_is_returned(pair, lender):
    arena, _ = pair

    class Storage:
        gone = False

        def __del__(self) -> None:
            Storage.gone = True

    address = arena.alloc("private", 2 * MIB)
    lent = lender.lend(address, MIB, Storage(), never)
    lender.collect()
    assert not Storage.gone, "it is on its way"
    borrowed = Borrowed(lent, MIB)
    lender.collect()
    assert not Storage.gone
    borrowed.drop()
    lender.collect()
    assert Storage.gone and lender.count == 0


def test_a_borrower_that_died_returns_what_it_had(pair, lender, monkeypatch):
    arena, _ = pair
    monkeypatch.setattr(lending, "LOOK_AGAIN_S", 0)
    lent = lender.lend(arena.alloc("private", 2 * MIB), MIB, None, never)
    died = subprocess.Popen([sys.executable, "-c", ""])
    died.wait()
    lender._loans[0].loans.words[lent[2]] = died.pid
    lender.collect()
    assert lender.count == 0


def test_storages_of_one_chunk_are_one_descriptor_and_one_mapping(pair, lender):
    arena, _ = pair
    address = arena.alloc("private", 4 * MIB)
    first, second = (lender.lend(address + at, 1024, None, never) for at in (0, MIB))
    assert first[0] == second[0] and hash(first[0]) == hash(second[0])
    assert first[0]._descriptors()[0][0] is second[0]._descriptors()[0][0]
    one, other = Borrowed(first, 1024), Borrowed(second, 1024)
    assert other.address - one.address == MIB
    one.drop()
    ctypes.memset(other.address, 3, 1024)
    other.drop()
    lender.collect()
    assert lender.count == 0


def test_a_chunk_that_was_returned_is_let_go_of(pair, lender):
    """A descriptor would keep its memory, whatever becomes of the chunk."""
    arena, _ = pair
    address = arena.alloc("private", 2 * MIB)
    before = chunks_in_use()
    lent = lender.lend(address, MIB, None, never)
    assert chunks_in_use() == before + 1
    Borrowed(lent, MIB).drop()
    lender.collect()
    assert chunks_in_use() == before, "although the region is still known"


def test_more_loans_than_one_list_has(pair, lender):
    arena, _ = pair
    address = arena.alloc("private", 2 * MIB)
    regions = {lender.lend(address, 64, None, never)[0].key for _ in range(LOANS + 1)}
    assert len(regions) == 2 and lender.count == LOANS + 1


def test_what_is_no_list_of_loans_is_not_mapped(pair, lender):
    arena, _ = pair
    region, offset, loan = lender.lend(arena.alloc("private", 2 * MIB), MIB, None, never)
    chunks, _ = region._descriptors()
    short = Descriptor((1, 2, 3), os.memfd_create("short"), 8)
    with pytest.raises(SalusError, match="list of loans"):
        Region("host", chunks, short).borrow(0, offset, MIB, loan)


def test_more_than_the_chunk_has_is_not_given(pair, lender):
    arena, _ = pair
    region, _, loan = lender.lend(arena.alloc("private", 2 * MIB), MIB, None, never)
    with pytest.raises(SalusError, match="cannot be mapped"):
        region.borrow(0, MIB, 2 * MIB, loan)


def test_what_is_returned_within_a_capture_is_returned_after_it(pair, lender):
    """To unmap it would spoil the capture."""
    arena, _ = pair
    address = arena.alloc("private", 4 * MIB)
    first, second = (Borrowed(lender.lend(address + at, MIB, None, never), MIB) for at in (0, MIB))
    arena.capture_began()
    first.drop()
    lender.collect()
    assert lender.count == 2
    arena.capture_ended()
    second.drop()
    lender.collect()
    assert lender.count == 0


def test_a_region_is_pickled_only_by_multiprocessing(pair, lender):
    region, _, _ = lender.lend(pair[0].alloc("private", 2 * MIB), MIB, None, never)
    sent = pickle.loads(pickle.dumps(region))
    assert sent == region and sent._descriptors()[0][0].descriptor != region._descriptors()[0][0].descriptor


def test_a_lane_is_not_left_with_less_than_what_is_lent(pair, lender):
    arena, played = pair
    address = arena.alloc("lane", 2 * MIB)
    borrowed = Borrowed(lender.lend(address, MIB, None, never), MIB)
    for _ in range(5):
        assert arena.leave(ranges([(address, MIB)])) != STAYS and arena.resume()
    write(borrowed.address, MIB, 4)
    assert holds(address, MIB, 4), "it is still the same chunk"
    assert played.page.words[Word.PROMOTED_BYTES] == 2 * MIB
    borrowed.drop()


def test_a_descriptor_that_goes_after_the_names_of_its_module_is_closed_all_the_same(monkeypatch):
    """When Python ends, the caches of a framework may be the last to go."""
    number = os.memfd_create("last")
    last = Descriptor((1, 2, 3), number, 8)
    for name in ("os", "contextlib"):
        monkeypatch.setattr(lending, name, None, raising=False)
    last.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_what_a_killed_job_lent_is_never_another_job_s(serve):
    """Its child lives on, and writes to what was a part of the lane; the next job of the lane must not notice."""
    service = serve("--policy", "rr", "--quantum", "0", "--capacity", "520MiB")
    options = ("--persistent", "100MiB", "--ephemeral", "200MiB")

    def start(name: str, *arguments: str):
        command = [sys.executable, str(JOB), str(SOURCE), name, str(service.folder), *arguments]
        return service.salus_in_background("run", "--name", name, *options, "--", *command)

    lends, checks = start("lends"), start("checks")
    writes = service.folder / "writes"
    try:
        eventually(lambda: all(row["pid"] for row in service.jobs().values()) and len(service.jobs()) == 2, "are there")
        assert len({row["lane"] for row in service.jobs().values()}) == 1
        row = service.jobs()["lends"]
        (service.folder / "go").touch()
        eventually(writes.exists, "the child of the first writes")
        os.kill(row["pid"], signal.SIGKILL)
        output, errors = checks.communicate(timeout=60)
        assert checks.returncode == 0 and output.startswith("finished"), errors
        assert int(output.split()[1]) > 5, "it ran in the lane after the first had died"
    finally:
        (service.folder / "end").touch()
        with contextlib.suppress(ProcessLookupError):
            os.kill(row["pid"], signal.SIGKILL)
        lends.communicate(timeout=60)
