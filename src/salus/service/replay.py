"""Reads journals: what happened, line by line, and whether a scheduler gives the same actions again.

Any segment can be replayed by itself. Where the one before it is there too, the state that this one leads to must be
the state that the next begins with.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from salus.core.policies import Policy
from salus.core.scheduler import Scheduler
from salus.core.snapshot import SnapshotFailed
from salus.errors import RequestRejected
from salus.plugins import load_policy as load_any_policy
from salus.service.codec import NS, from_plain, pack, to_plain, unpack
from salus.service.segments import Segment, segment_at, segments_in

EXPECTED = "expected a journal of salus serve"
Load = Callable[[str], Policy]


@dataclass
class Replayed:
    """What was found in one run."""

    run: str
    segments: list[int] = field(default_factory=list)
    events: int = 0
    since: float | None = None
    """As the clock on the wall has it; None: a journal of a version that did not note it."""
    until: float | None = None
    difference: str | None = None
    """The first."""
    notes: list[str] = field(default_factory=list)
    """What could not be replayed, and why."""


@dataclass(frozen=True)
class _Line:
    where: str
    content: Any


def replay(paths: Iterable[Path], load_policy: Load = load_any_policy) -> list[Replayed]:
    """Feeds the events of each run to a new scheduler, up to the first difference."""
    found = []
    for run, segments in groupby(find_segments(paths), key=lambda segment: segment.run):
        replayed = _Replay(run, load_policy)
        for segment in segments:
            replayed.feed(segment)
            if replayed.found.difference is not None:
                break
        found.append(replayed.found)
    return found


def find_segments(paths: Iterable[Path]) -> list[Segment]:
    """The segments in a folder, or the files themselves."""
    found: dict[Path, Segment] = {}
    for path in paths:
        try:
            inside = segments_in(path) if path.is_dir() else [segment_at(path) or Segment(path, path.name, 0, False)]
        except OSError as error:
            raise RequestRejected(f"{path}: cannot be read ({error.strerror}); {EXPECTED}") from None
        if not inside:
            raise RequestRejected(f"{path}: has no journal in it; expected files like 20261115-120000-4711.0001.jsonl")
        found.update((segment.path, segment) for segment in inside)
    return sorted(found.values(), key=lambda segment: (segment.run, segment.number))


class _Replay:
    """Of one run, segment after segment."""

    def __init__(self, run: str, load_policy: Load) -> None:
        self.found = Replayed(run)
        self._load_policy = load_policy
        self._scheduler: Scheduler | None = None

    def feed(self, segment: Segment) -> None:
        lines = _lines(segment)
        header = next(lines, None)
        if header is None:
            raise RequestRejected(f"{segment.path}: is empty; {EXPECTED}")
        before = self.found.segments[-1] if self.found.segments else None
        follows = before is not None and segment.number == before + 1
        self.found.segments.append(segment.number)
        try:
            self._begin(segment, header.content, follows)
        except (ValueError, KeyError, TypeError):
            raise RequestRejected(f"{header.where}: is not a line of a journal; {EXPECTED}") from None
        except SnapshotFailed as error:
            self._scheduler = None
            self.found.notes.append(f"{segment.path.name} cannot be replayed: {error}")
        if self._scheduler is None or self.found.difference is not None:
            return
        reader = _reader(header.content, self._load_policy)
        began_at, clock_s = header.content.get("began_at"), header.content.get("clock_s")
        if began_at is not None and self.found.since is None:
            self.found.since = began_at
        for line in lines:
            try:
                now, event, expected, written = reader(line.content)
            except (ValueError, KeyError, TypeError, IndexError):
                raise RequestRejected(f"{line.where}: is not a line of a journal; {EXPECTED}") from None
            given = [written(action) for action in self._scheduler.handle(event, now)]
            if given != expected:
                self.found.difference = f"{line.where}: {type(event).__name__} gave {expected} and now gives {given}"
                return
            self.found.events += 1
            if began_at is not None:
                self.found.until = began_at + now - clock_s

    def _begin(self, segment: Segment, header: dict[str, Any], follows: bool) -> None:
        """The scheduler with which the segment begins."""
        if header["format"] not in (1, 2):
            raise RequestRejected(
                f"{segment.path}: was written by a newer version of Salus ({header.get('salus')}); replay it with that"
            )
        state, policy = header.get("state"), self._load_policy(header["policy"])
        if follows and self._scheduler is not None:
            if state is not None and state != self._scheduler.snapshot():
                self.found.difference = f"{segment.path}:1: begins with another state than the one that was led to"
        elif state is not None:
            self._scheduler = Scheduler.restore(state, policy)
        elif segment.number <= 1:
            self._scheduler = Scheduler(from_plain(header["config"], self._load_policy), policy)
        else:
            raise SnapshotFailed(
                "it has no snapshot to begin with, since the notes of its policy have no plain form, "
                "and the segments before it are not here"
            )


def _reader(header: dict[str, Any], load_policy: Load) -> Callable[[Any], tuple[float, Any, Any, Callable[[Any], Any]]]:
    """What turns a line into its time, its event, the actions it gave, and what writes an action as they are."""
    if header["format"] == 1:
        return lambda line: (line["t"], from_plain(line["event"], load_policy), line["actions"], to_plain)
    at_ns = round(header["clock_s"] * NS)

    def read(line: Any) -> tuple[float, Any, Any, Callable[[Any], Any]]:
        nonlocal at_ns
        after, event, *actions = line
        if isinstance(after, int):
            at_ns += after
            now = at_ns / NS
        else:
            at_ns, now = round(after * NS), after
        return now, unpack(event, now, load_policy), actions, lambda action: pack(action, now)

    return read


def lines(paths: Path | Iterable[Path], load_policy: Load = load_any_policy) -> Iterator[dict[str, Any]]:
    """For those who look at what happened: time `t`, `event` and `actions`, with the names of their fields."""
    for segment in find_segments([paths] if isinstance(paths, Path) else paths):
        content = (line.content for line in _lines(segment))
        header = next(content, None)
        if header is None or header["format"] == 1:
            yield from content
            continue
        read = _reader(header, load_policy)
        for line in content:
            now, event, actions, _ = read(line)
            plain = [to_plain(unpack(action, now, load_policy)) for action in actions]
            yield {"t": now, "event": to_plain(event), "actions": plain}


def leases(paths: Path | Iterable[Path]) -> list[tuple[str, int, float, float]]:
    """Who held the lease of which lane from when to when, in whole runs: job, lane, start and end."""
    held: dict[str, tuple[int, float]] = {}
    found: list[tuple[str, int, float, float]] = []
    last = 0.0
    for line in lines(paths):
        event, last = line["event"], line["t"]
        gives_up = event.get("yielded") or event["kind"] in ("JobIdled", "JobLeft")
        if gives_up and event["job_id"] in held:
            lane, since = held.pop(event["job_id"])
            found.append((event["job_id"], lane, since, last))
        for action in line["actions"]:
            if action["kind"] == "GrantLease":
                held[action["job_id"]] = (action["lane_id"], last)
    return found + [(job_id, lane, since, last) for job_id, (lane, since) in held.items()]


def _lines(segment: Segment) -> Iterator[_Line]:
    try:
        with _opened(segment) as file:
            for number, text in enumerate(file, start=1):
                where = f"{segment.path}:{number}"
                if not text.endswith(b"\n") and number > 1:
                    # Cut off in the middle: whoever wrote it was killed, or is about to write the rest.
                    return
                try:
                    yield _Line(where, json.loads(text))
                except ValueError:
                    raise RequestRejected(f"{where}: is not a line of a journal; {EXPECTED}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RequestRejected(f"{segment.path}: is damaged ({error})") from None
    except OSError as error:
        raise RequestRejected(f"{segment.path}: cannot be read ({error.strerror}); {EXPECTED}") from None


def _opened(segment: Segment) -> IO[bytes] | gzip.GzipFile:
    if segment.is_compressed:
        return gzip.open(segment.path, "rb")
    try:
        return segment.path.open("rb")
    except FileNotFoundError:
        # It may have been compressed since it was listed.
        whole = segment.path.with_name(segment.path.name + ".gz")
        if not whole.exists():
            raise
        return gzip.open(whole, "rb")
