"""Shared memory of a fixed size: memory files that nobody can shrink, grow or unseal.

A process that maps a file and touches a page beyond its end dies of SIGBUS. So a file that two processes map is sealed
before it is handed on, and whoever receives such a file looks for the seals before mapping it.
"""

from __future__ import annotations

import fcntl
import os

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed_memory(name: str, size_bytes: int) -> int:
    """A new memory file of this size, as a descriptor."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_sealed_memory(descriptor: int, size_bytes: int) -> bool:
    """Whether the descriptor is a memory file of exactly this size that keeps it."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        return seals & SEALS == SEALS and os.fstat(descriptor).st_size == size_bytes
    except OSError:
        return False  # it is no memory file
