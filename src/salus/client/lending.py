"""Memory of this process that others of its job use, and theirs that this one uses (csrc/lending.c), by descriptor.

A `Region` is what travels: chunks side by side, and the memory in which both sides note what has become of each loan.
It is pickled as `multiprocessing` pickles descriptors, so it goes wherever a script sends its objects.

A loan ends when the borrower drops its tensor, or is dead. Until then the lender keeps what it lent, also if the script
has dropped it. What was sent and never received stays lent, as it does in PyTorch.

Must not know: a framework.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

from salus.client.arena import LIBRARY, Arena
from salus.errors import SalusError
from salus.protocol.sealed import is_sealed_memory, sealed_memory

LOANS = 4096
"""In one piece of memory of loans (csrc/arena.h)."""
LOANS_BYTES = 8 * LOANS
RETURNED, ON_ITS_WAY = 0, 1
"""Of a loan; else the process that has it."""
LOOK_AGAIN_S = 0.2
NOT_OURS, EXPORTED, NOT_NOW, NO_MEMORY = range(4)
"""What an arena answers when it is asked for a chunk."""

Token = tuple[int, int, int]
"""A descriptor that is lent: the process, something that no other process of that number has, and its number there."""


class Descriptor:
    """Pickled once in each message, however many tensors lie in it."""

    def __init__(self, token: Token, descriptor: int, size_bytes: int, base: int = 0) -> None:
        self.token, self.descriptor, self.size_bytes = token, descriptor, size_bytes
        self.base = base
        """Where the chunk is mapped in the process that lends it."""

    def __reduce__(self) -> Any:
        return received_descriptor, (self.token, reduction.DupFd(self.descriptor), self.size_bytes)

    def close(self, _close: Callable[[int], None] = os.close) -> None:
        # (When Python ends, the names of this module are gone before its objects.)
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            try:  # noqa: SIM105
                _close(descriptor)
            except OSError:
                pass

    __del__ = close


def received_descriptor(token: Token, sent: Any, size_bytes: int) -> Descriptor:
    return Descriptor(token, sent.detach(), size_bytes)


class Region:
    """What a tensor is sent with. Equal where it is the same memory."""

    def __init__(self, device: str, chunks: tuple[Descriptor, ...], loans: Descriptor) -> None:
        self.device = device
        self.key = (device, loans.token, tuple(chunk.token for chunk in chunks))
        self._held: tuple[tuple[Descriptor, ...], Descriptor] | None = (chunks, loans)

    def __reduce__(self) -> Any:
        chunks, loans = self._descriptors()
        return type(self), (self.device, chunks, loans)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Region) and self.key == other.key

    def borrow(self, ordinal: int, offset: int, size_bytes: int, loan: int) -> Any:
        """A DLPack capsule of bytes. Raises `SalusError`. To be done once: descriptors are let go of."""
        chunks, loans = self._descriptors()
        self._held = None
        if not is_sealed_memory(loans.descriptor, LOANS_BYTES):
            raise SalusError("what another process lends cannot be mapped: its list of loans is none")
        descriptors = (ctypes.c_int * len(chunks))(*(chunk.descriptor for chunk in chunks))
        sizes = (ctypes.c_uint64 * len(chunks))(*(chunk.size_bytes for chunk in chunks))
        tensor = _library().salus_borrow(
            self.device.encode(), ordinal, repr(self.key).encode(), descriptors, sizes, len(chunks),
            loans.descriptor, offset, size_bytes, loan,
        )  # fmt: skip
        if not tensor:
            raise SalusError("memory of another process cannot be mapped; is there room for it on this device?")
        return _new_capsule()(tensor, _NAME, None)

    def give_back(self, loan: int) -> None:
        """It was sent once more, and is here already."""
        _, loans = self._descriptors()
        self._held = None
        with mmap.mmap(loans.descriptor, LOANS_BYTES) as page:
            struct.pack_into("q", page, 8 * loan, RETURNED)

    def _descriptors(self) -> tuple[tuple[Descriptor, ...], Descriptor]:
        if self._held is None:
            raise SalusError("memory of another process was asked for twice")
        return self._held


class Loans:
    """The memory in which both sides note what has become of each loan."""

    def __init__(self, token: Token) -> None:
        descriptor = sealed_memory("salus-loans", LOANS_BYTES)
        self.descriptor = Descriptor(token, descriptor, LOANS_BYTES)
        self.words = memoryview(mmap.mmap(descriptor, LOANS_BYTES)).cast("q")
        self.free = list(range(LOANS))


class Loan:
    def __init__(self, owner: Any, loans: Loans, number: int, chunks: tuple[Descriptor, ...]) -> None:
        self.owner, self.loans, self.number, self.chunks = owner, loans, number, chunks

    @property
    def borrower(self) -> int:
        """Or `RETURNED`, or `ON_ITS_WAY`."""
        return self.loans.words[self.number]


class Lender:
    """What this process has lent. It may be asked by any thread."""

    def __init__(self, arena: Arena, device: str) -> None:
        self._arena, self._device = arena, device
        self._lock = threading.RLock()
        self._process = os.getpid(), int.from_bytes(os.urandom(6), "big")
        self._numbers = 0
        self._lists: list[Loans] = []
        self._loans: list[Loan] = []
        self._looked_at = 0.0
        """When it was asked last which borrowers are alive."""

    def lend(
        self,
        address: int,
        size_bytes: int,
        owner: Any,
        bring_back: Callable[[], None],
        region: type[Region] = Region,
    ) -> tuple[Region, int, int] | None:
        """The region, where in it the memory begins, and the number of the loan. None: it is not the arena's.

        `owner` is kept until the loan is over. `bring_back` is called as long as the memory is on the host: it returns
        when that may be over. Raises `SalusError` where the memory cannot be lent.
        """
        self.collect()
        self._arena.lend(1)  # from here on nothing is paged out
        lent = False
        try:
            chunks, begin = self._export(address, size_bytes, bring_back)
            if not chunks:
                return None
            with self._lock:
                loans = next((one for one in self._lists if one.free), None) or self._new_list()
                number = loans.free.pop()
                loans.words[number] = ON_ITS_WAY
                self._loans.append(Loan(owner, loans, number, chunks))
            lent = True
            return region(self._device, chunks, loans.descriptor), address - begin, number
        finally:
            if not lent:
                self._arena.lend(-1)

    def collect(self) -> None:
        """Lets go of what nobody has any more."""
        if not self._loans:
            return
        with self._lock:
            gone = self._dead_borrowers() | {RETURNED}
            over = [loan for loan in self._loans if loan.borrower in gone]
            if not over:
                return
            self._loans = [loan for loan in self._loans if loan.borrower not in gone]
            kept = {chunk.token for loan in self._loans for chunk in loan.chunks}
            for loan in over:
                loan.loans.words[loan.number] = RETURNED
                loan.loans.free.append(loan.number)
                for chunk in loan.chunks:
                    if chunk.token not in kept:
                        chunk.close()  # (also where the region is still known somewhere)
                self._arena.lend(-1)

    def _dead_borrowers(self) -> set[int]:
        """They return nothing."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_AGAIN_S:
            return set()
        self._looked_at = now
        borrowers = {loan.borrower for loan in self._loans} - {RETURNED, ON_ITS_WAY}
        return {borrower for borrower in borrowers if not _is_alive(borrower)}

    @property
    def count(self) -> int:
        return len(self._loans)

    def _new_list(self) -> Loans:
        self._lists.append(Loans(self._token()))
        return self._lists[-1]

    def _token(self) -> Token:
        with self._lock:
            self._numbers += 1
            return (*self._process, self._numbers)

    def _export(
        self, address: int, size_bytes: int, bring_back: Callable[[], None]
    ) -> tuple[tuple[Descriptor, ...], int]:
        chunks: list[Descriptor] = []
        begin, end = address, address
        while end < address + size_bytes:
            status, base, chunk_bytes, descriptor = self._arena.export(end)
            if status == NOT_NOW:
                # (From the beginning: what was looked at before may have moved meanwhile.)
                chunks, end = [], address
                bring_back()
            elif status == EXPORTED:
                begin = base if not chunks else begin
                chunks.append(self._known(base, chunk_bytes, descriptor))
                end = base + chunk_bytes
            elif status == NOT_OURS and not chunks:
                return (), address
            else:
                why = "it may not have more memory of its own" if status == NO_MEMORY else "the driver refuses that"
                raise SalusError(f"memory cannot be shared with another process: {why}")
        return tuple(chunks), begin

    def _known(self, base: int, size_bytes: int, descriptor: int) -> Descriptor:
        """The one under which this chunk is lent already. (As long as it is, no other chunk can be at that address.)"""
        with self._lock:
            for loan in self._loans:
                for chunk in loan.chunks:
                    if chunk.base == base:
                        os.close(descriptor)
                        return chunk
            return Descriptor(self._token(), descriptor, size_bytes, base)


def is_borrowed(address: int) -> bool:
    return bool(_library().salus_is_borrowed(address))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is another's, so it is there
    return True


_NAME = b"dltensor"


@functools.cache
def _library() -> Any:
    found = ctypes.CDLL(str(LIBRARY))
    found.salus_borrow.restype = ctypes.c_void_p
    found.salus_borrow.argtypes = [
        ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint,
        ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint,
    ]  # fmt: skip
    found.salus_is_borrowed.argtypes = [ctypes.c_uint64]
    return found


@functools.cache
def _new_capsule() -> Any:
    found = ctypes.pythonapi.PyCapsule_New
    found.restype = ctypes.py_object
    found.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return found
