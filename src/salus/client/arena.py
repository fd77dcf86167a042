"""The arena of this process: the C library that cuts the framework's segments from chunks (csrc/arena.h), by ctypes.

ctypes lets go of Python's lock during a call, so a wait for memory stops nobody else.
"""

from __future__ import annotations

import array
import ctypes
import itertools
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path

from salus.errors import SalusError
from salus.protocol.slots import GRANULE_BYTES

LIBRARY = Path(__file__).parent / "_arena.so"
SMALLEST_SLOT_BYTES = GRANULE_BYTES
RESERVE_BYTES = 256 << 30
"""Addresses for each of the two ranges; they cost nothing."""
PAGE_STEP_BYTES = 32 << 30
"""Paged at a time, with Python's lock; the script waits for its lease then, and other threads of it 0.6 s."""
REST_S = 0.0005
CAPTURE_NAP_S = 0.005
_MORE, _BUSY = 1, 2
_PUT_OFF = 1
"""A graph is captured; it has to be asked for again."""
STAYS, LEFT, PASSED = -1, 0, 1
"""What became of a lease that was to be given up."""
_FAILED = -2
_WHY = {
    -1: "there is no libcuda.so.1",
    -2: "the driver is too old: it has no virtual memory management",
    -3: "the driver finds no GPU",
    -4: "this GPU cannot share physical memory between processes",
    -10: "it is open already",
    -12: "no addresses could be reserved",
}


def ranges(live: Iterable[tuple[int, int]]) -> array.array[int]:
    """Addresses and sizes, for `leave`."""
    return array.array("Q", itertools.chain.from_iterable(sorted(live)))


def _pointer(numbers: array.array[int]) -> int:
    return numbers.buffer_info()[0]


class Arena:
    def __init__(self, library: Path = LIBRARY) -> None:
        try:
            self._c = ctypes.CDLL(str(library))
        except OSError as error:
            raise SalusError(f"the arena cannot be loaded ({error})") from None
        self._held = ctypes.PyDLL(str(library))
        """The same, for the call that must have Python's lock: it keeps other threads from using the device."""
        self._held.salus_arena_page.argtypes = [ctypes.c_uint64]
        for name in ("salus_private_alloc", "salus_lane_alloc"):
            function = getattr(self._c, name)
            function.restype = ctypes.c_void_p
            function.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        for name in ("salus_private_free", "salus_lane_free"):
            function = getattr(self._c, name)
            function.restype = None
            function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        self._c.salus_arena_open.argtypes = [
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_uint64,
        ]
        self._c.salus_arena_reconnect.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
        self._c.salus_arena_trust.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        self._c.salus_arena_trust.restype = None
        self._c.salus_arena_pass.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]
        self._c.salus_arena_lane_changes.restype = ctypes.POINTER(ctypes.c_uint64)
        self._lane_changes = self._c.salus_arena_lane_changes().contents
        self.when = (ctypes.c_uint64 * 4)()
        """Of the last `leave`, on CLOCK_MONOTONIC, in ns."""
        self._c.salus_arena_leave.argtypes = [
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p,
        ]  # fmt: skip

    def open(self, device: str, ordinal: int, page_address: int, channel: int) -> None:
        status = self._c.salus_arena_open(device.encode(), ordinal, page_address, channel, RESERVE_BYTES)
        if status:
            raise SalusError(f"memory cannot be shared: {_WHY.get(status, f'error {self.last_error()}')}")

    def trust(self, lease_file: str) -> None:
        """Threads that wait in the standard library, or for a lease, are known to use nothing of the device."""
        stdlib = sysconfig.get_path("stdlib") + "/"
        self._c.salus_arena_trust(stdlib.encode(), lease_file.encode())

    def close(self) -> None:
        self._c.salus_arena_close()

    def last_error(self) -> int:
        return int(self._c.salus_arena_last_error())

    def where(self) -> tuple[bool, bool]:
        """Whether it is paged out, and whether it was in mid-iteration then."""
        where = self._c.salus_arena_where()
        return where >= 1, where == 2

    def capture_began(self) -> None:
        """A CUDA graph is captured from now on: nothing here waits for the device or changes what is mapped."""
        self._c.salus_arena_capture_began()

    def capture_ended(self) -> None:
        self._c.salus_arena_capture_ended()

    def reconnect(self, page_address: int, channel: int, holds: bool) -> None:
        """The service was started again. Without a lease, nothing of the lane stays mapped.

        While a graph is captured this waits for its end.
        """
        while self._c.salus_arena_reconnect(page_address, channel, int(holds)) == _PUT_OFF:
            time.sleep(CAPTURE_NAP_S)

    def go_alone(self) -> None:
        """The service does not come back: whoever waits for it goes on."""
        self._c.salus_arena_go_alone()

    def lend(self, more: int) -> None:
        """1: from now on another process has something of it, so that nothing is paged out; -1: that was returned."""
        self._c.salus_arena_lend(more)

    def export(self, address: int) -> tuple[int, int, int, int]:
        """The chunk at an address: what came of it (`lending`), where it begins, its size, and a descriptor."""
        base, size, descriptor = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int(-1)
        status = self._c.salus_arena_export(
            ctypes.c_uint64(address), ctypes.byref(base), ctypes.byref(size), ctypes.byref(descriptor)
        )
        return int(status), base.value, size.value, descriptor.value

    def resume(self, *, poison: bool = False) -> bool:
        """After a grant. False: the lane's memory could not be had, and the job must not run."""
        return bool(self._c.salus_arena_resume(int(poison)) == 0)

    def wait(self) -> None:
        """Until the device has done everything that this process began. Raises `SalusError` if it failed at that.

        Rather than the framework's own call: a helper thread that is in the middle of that one when Python ends takes
        the whole process down, because C++ does not let itself be left like this.
        """
        if self._c.salus_arena_wait():
            raise SalusError("the device failed")

    def segments(self) -> int:
        """Changes whenever the lane's segments do."""
        return int(self._lane_changes.value)

    def leave(self, live: array.array[int], word: int = 0, ticket: int = 0, wants_more: bool = False) -> int:
        """Before a lease is given up; `live` are addresses and sizes (`ranges`). `STAYS`, `LEFT`, or `PASSED`.

        With a ticket, the lease goes straight to the next job if it can (`pass_on`). `when` tells then at what time
        what lives was promoted, the device was idle, the lane was left, and the lease was passed.
        """
        status = self._c.salus_arena_leave(
            _pointer(live), len(live) // 2, word, ticket, wants_more, ctypes.addressof(self.when)
        )
        if status == _FAILED:
            raise SalusError("the device failed")
        return int(status)

    def yield_(self, live: Iterable[tuple[int, int]]) -> bool:
        """The same, for whoever has addresses and sizes and passes nothing on. False: it cannot be given up now."""
        return self.leave(ranges(live)) != STAYS

    def pass_on(self, word: int, ticket: int, wants_more: bool) -> bool:
        """Gives the lease straight to the next job, which looks at that word. False: the service must see to it."""
        return bool(self._c.salus_arena_pass(word, ticket, int(wants_more)))

    def detach(self) -> bool:
        """The service is gone: memory of its own instead of the lane's. False: there is not enough; try again."""
        return bool(self._c.salus_arena_detach() == 0)

    def take_in(self) -> None:
        """What the service sent so far; what it orders is left to `listen`. After this `resume` is quick."""
        self._c.salus_arena_listen()

    def listen(self) -> bool:
        """Takes in what the service sent, and pages if it said so. True: there is more to do, in a moment."""
        if self._c.salus_arena_listen() == _PUT_OFF:
            return True
        if not self._c.salus_arena_has_to_page():
            return False
        while self._c.salus_arena_prepare() > 0:
            time.sleep(REST_S)  # each may take a tenth of a second, and the script may wait for the arena
        while (status := self._held.salus_arena_page(PAGE_STEP_BYTES)) == _MORE:
            pass
        return bool(status == _BUSY)

    def functions(self, kind: str) -> tuple[int, int]:
        """The addresses of alloc and free, for the framework: kind is `private` or `lane`."""
        pair = (getattr(self._c, f"salus_{kind}_{what}") for what in ("alloc", "free"))
        alloc, free = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in pair)
        return alloc, free

    # For jobs without a framework: tests and benchmarks.

    def alloc(self, kind: str, size: int) -> int | None:
        found = getattr(self._c, f"salus_{kind}_alloc")(size, 0, None)
        return None if found is None else int(found)

    def free(self, kind: str, address: int, size: int) -> None:
        getattr(self._c, f"salus_{kind}_free")(address, size, 0, None)

    def slots_of(self, offset: int) -> int:
        """The slot at an offset of the lane. Does next to nothing: what a call from Python costs by itself."""
        return int(self._c.salus_slot_at(ctypes.c_uint64(offset)))

    def fail_at(self, call: int) -> None:
        """The n-th call of the driver from now on fails; 0: none."""
        self._c.salus_arena_fail_at(ctypes.c_long(call))

    def scarce(self, chunks: int) -> None:
        """For tests: the device does not have the next so many chunks that are asked for."""
        self._c.salus_arena_scarce(ctypes.c_long(chunks))

    def calls(self) -> int:
        self._c.salus_arena_calls.restype = ctypes.c_long
        return int(self._c.salus_arena_calls())
