"""Two jobs of one lane. argv: SOURCE NAME FOLDER.

`lends` shares a part of the lane with a child in the middle of an iteration, and does not end that. The child writes to
it, again and again, until there is a file `end`. `checks` runs in the lane afterwards and looks at every byte it uses.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from arena_job import MIB, Block, NotedMemory

from salus.client.lease import of_this_process
from salus.client.lending import Lender, Region

FOLDER = Path(sys.argv[3])


def rest() -> None:
    threading.Event().wait(0.01)


def child(region: Region, offset: int, size: int, loan: int) -> None:
    capsule = region.borrow(0, offset, size, loan)
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = ctypes.cast(get(capsule, b"dltensor"), ctypes.POINTER(ctypes.c_uint64))[0]
    parent = os.getppid()
    while not (FOLDER / "end").exists() and FOLDER.exists():
        ctypes.memset(address, 0xEE, size)
        if not (FOLDER / "writes").exists() or os.getppid() != parent:
            (FOLDER / "writes").touch()
        rest()


def wait_for(name: str) -> None:
    while not (FOLDER / name).exists():
        rest()


def main() -> None:
    lease, memory = of_this_process(), NotedMemory()
    assert lease is not None and lease.attach(memory)
    if sys.argv[2] == "lends":
        lease.begin()
        # Others know the chunks already: it is given back to the lane once.
        Block(memory.arena, "lane", 20 * MIB, 1)
        lease.end()
        wait_for("go")
        lease.begin()
        block = Block(memory.arena, "lane", 8 * MIB, 2)
        lent = Lender(memory.arena, "host").lend(block.address, block.size, None, rest)
        assert lent is not None
        region, offset, loan = lent
        context = multiprocessing.get_context("spawn")
        context.Process(target=child, args=(region, offset, block.size, loan)).start()
        while True:
            rest()
    lease.begin()
    Block(memory.arena, "lane", 20 * MIB, 3)
    lease.end()
    wait_for("writes")
    rounds = 0
    for number in range(60):
        lease.begin()
        block = Block(memory.arena, "lane", 20 * MIB, number << 20)
        for _ in range(3):
            rest()
            block.check("while another process writes to what it borrowed")
        memory.arena.free("lane", block.address, block.size)
        lease.end()
        rounds += 1
    print(f"finished {rounds}")


if __name__ == "__main__":
    main()
