"""The files of the journal: segments of runs.

A run is what one service recorded for one device. Its segments are numbered from 1; the newest one is being written,
the others are finished and sooner or later compressed:

    20261115-120000-4711.0001.jsonl.gz      began, the service's process, which segment
    20261115-120000-4711-1.0002.jsonl       of the second of several devices

A segment gets its name when it has its header, and whoever writes it holds a lock on it until it is finished. So a
segment that is not locked may be compressed or removed, by any process; that one holds the lock meanwhile. Whatever
was begun and not finished has a name that begins with a dot.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_NAME = re.compile(r"(?P<run>[0-9]{8}-[0-9]{6}-[0-9]+(?:-[0-9]+)?)(?:\.(?P<number>[0-9]+))?\.jsonl(?P<gz>\.gz)?")
_UNFINISHED = re.compile(r"\..*\.part")
UNFINISHED_FOR_S = 60.0
"""A file that is being made is locked at once; after this time one without a lock is what a crash has left."""
_LEVEL = 6


@dataclass(frozen=True)
class Segment:
    path: Path
    run: str
    number: int
    """0: a journal of a version that had no segments."""
    is_compressed: bool


def name_of(run: str, number: int) -> str:
    return f"{run}.{number:04}.jsonl"


def segment_at(path: Path) -> Segment | None:
    """None: it does not have the name of one."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    return Segment(path, match["run"], int(match["number"] or 0), match["gz"] is not None)


def files_in(folder: Path) -> list[Segment]:
    """All of them: after a crash there may be two with the same content, of which one is compressed."""
    segments = (segment_at(path) for path in sorted(folder.iterdir()) if path.is_file())
    return [segment for segment in segments if segment is not None]


def segments_in(folder: Path) -> list[Segment]:
    """In the order of their runs, and in each run in theirs."""
    # The compressed one sorts last, and has its name only when it is whole.
    found = {(segment.run, segment.number): segment for segment in files_in(folder)}
    return [found[key] for key in sorted(found)]


def create(folder: Path, name: str) -> IO[bytes]:
    """A file of another name that is locked by us. `publish` gives it its own when its header is in it."""
    file = (folder / f".{name}.part").open("xb", buffering=1 << 16)
    _lock(file)
    return file


def _lock(file: IO[bytes]) -> None:
    """A file that is new."""
    with contextlib.suppress(OSError):  # where there are no locks, as on some network disks, nobody gets one
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def publish(folder: Path, name: str) -> Path:
    (folder / f".{name}.part").rename(folder / name)
    return folder / name


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Whether the file is ours for now: nobody writes it, compresses it or removes it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Somebody else may have removed it before we had the lock.
        ours = os.fstat(descriptor).st_nlink > 0
    except OSError:
        ours = False
    try:
        yield ours
    finally:
        os.close(descriptor)


def is_being_written(path: Path) -> bool:
    with locked(path) as ours:
        return not ours and path.exists()


def compress(segment: Segment) -> bool:
    """Puts a compressed file in the place of a finished segment. False: it is not finished, or another process does it.

    However this ends, one of the two files is whole.
    """
    whole = segment.path.with_name(segment.path.name + ".gz")
    with locked(segment.path) as ours:
        if not ours or segment.is_compressed:
            return False
        if not whole.exists():
            part = segment.path.with_name(f".{whole.name}.part")
            part.unlink(missing_ok=True)  # (Whoever made that one had the lock that we have.)
            try:
                _write_compressed(segment.path, part)
                os.replace(part, whole)
            except OSError:
                part.unlink(missing_ok=True)
                raise
        segment.path.unlink()
    return True


def _write_compressed(source: Path, target: Path) -> None:
    with source.open("rb") as plain, target.open("xb") as file:
        _lock(file)
        with gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as packed:
            shutil.copyfileobj(plain, packed, 1 << 18)
        file.flush()
        os.fsync(file.fileno())
    kept = source.stat()
    # As old as what is in it.
    os.utime(target, ns=(kept.st_atime_ns, kept.st_mtime_ns))


def remove(path: Path) -> bool:
    """False: it is being written or compressed."""
    with locked(path) as ours:
        if ours:
            path.unlink()
        return ours


def unfinished_in(folder: Path) -> list[Path]:
    """What a crash has left of a segment that was being begun or compressed."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if _UNFINISHED.fullmatch(path.name) and time.time() - path.stat().st_mtime > UNFINISHED_FOR_S:
                found.append(path)
    return found
