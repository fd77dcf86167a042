"""A job that fills its lane with a pattern and looks for the other one's, as a user of its own.

argv: SOURCE UID NAME PATTERN OTHER ITERATIONS. It says "saw" and ends with 1 if the other's pattern ever arrives.
"""

from __future__ import annotations

import ctypes
import os
import sys
import sysconfig
import time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from host_memory import HostMemory

from salus.client.connection import ServiceConnection
from salus.client.lease import Lease
from salus.protocol import messages as msg

SIZE = 8 << 20


def main(uid: int, name: str, pattern: bytes, other: bytes, iterations: int) -> None:
    # Everything is imported, and what Python knows of itself has been read; from here on somebody else.
    sysconfig.get_paths()
    os.setgid(uid)
    os.setuid(uid)
    path = Path(os.environ["SALUS_SOCKET"])
    launcher = ServiceConnection(path)
    asked = msg.Register(name, ["spy"], "/", persistent_bytes=0, ephemeral_bytes=SIZE)
    job = launcher.request(asked)
    lease = Lease(path, job.job_id, job.token)
    memory = HostMemory()
    assert lease.attach(memory)
    lease.begin()
    address = memory.arena.alloc("lane", SIZE)
    assert address is not None
    lease.end()
    found = 0
    for _ in range(iterations):
        lease.begin()
        here = ctypes.string_at(address, SIZE)
        found += other in here
        ctypes.memmove(address, (pattern * (SIZE // len(pattern)))[:SIZE], SIZE)
        lease.end()
        time.sleep(0.002)
    print("saw" if found else "saw nothing", flush=True)
    sys.exit(bool(found))


main(int(sys.argv[2]), sys.argv[3], sys.argv[4].encode(), sys.argv[5].encode(), int(sys.argv[6]))
