"""Descriptors of ours in a process of somebody else's.

A script may close every number that it does not know, and its next files get those numbers. So ours are moved to high
numbers, where a script's next files do not come, and away from 0, 1 and 2, which a process may have been started
without. And before one is read, written or closed, it is compared with what it was: a number that is another file's by
now is left alone. (Two events look alike to the kernel; a stranger's event under our number is the one thing missed.)
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource

FROM_NUMBER = 700
"""And above. Most processes may have 1024 descriptors."""


def out_of_the_way(number: int) -> int:
    """The same under a high number; or as it is, where there is none."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = FROM_NUMBER if most == resource.RLIM_INFINITY else min(FROM_NUMBER, most * 3 // 4)
    if number >= lowest:
        return number
    try:
        moved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, lowest)
    except OSError:
        return number
    os.close(number)
    return moved


class Descriptor:
    """A descriptor, and which file it is of."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._file = _file_of(number)

    @property
    def is_ours(self) -> bool:
        return self._file is not None and _file_of(self.number) == self._file

    def close(self) -> None:
        if self.is_ours:
            with contextlib.suppress(OSError):
                os.close(self.number)
        self._file = None


class Event(Descriptor):
    """An eventfd. Nothing is done, and nothing raised, where it is not ours any more."""

    def ring(self) -> None:
        if self.is_ours:
            with contextlib.suppress(OSError):
                os.eventfd_write(self.number, 1)

    def hush(self) -> None:
        if self.is_ours:
            with contextlib.suppress(OSError):
                os.eventfd_read(self.number)


def _file_of(number: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return found.st_dev, found.st_ino
