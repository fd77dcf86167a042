"""The lanes' physical memory, as the service holds it: a descriptor of every chunk, and who has mapped which.

There is no CUDA context here; a descriptor is enough to keep a chunk alive and to hand it on. The core decides how
large lanes are and who is in them; this carries it out:
- before a job is granted a lease, it is sent what changed in its lane since it ran last (`Link.bring_up_to_date`);
- a chunk that a job took for itself (promotion) is forgotten here, and everyone else is told never to touch it again:
  before it runs at the latest, and soon (`Link.let_go_of_holes`), since what somebody has mapped is not free;
- a lane that shrank or closed is free when nobody has the memory mapped any more.

A job has mapped nothing beyond what it may use (its quota), so a lane shrinks by closing descriptors.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from salus.protocol.page import Page, Word
from salus.protocol.slots import MOST_RECORDS, Kind, Record, end_of, pack, size_of, unpack
from salus.service.descriptors import close_elsewhere, close_socket_elsewhere, is_chunk, receive
from salus.service.report import MOST_BYTES, Report

log = logging.getLogger(__name__)

RETRY_S = 0.01
MOST_UNREAD = 4096
"""Packets that one socket can hold, and many more."""
_PACKET_BYTES = 24 * MOST_RECORDS


@dataclass(eq=False)
class Slot:
    version: int = 0
    """Goes up whenever another chunk, or none, takes the place."""
    descriptor: int = -1
    """-1: a hole. Whoever needs the slot next makes a chunk for it."""

    def put(self, descriptor: int) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = descriptor
        self.version += 1


@dataclass(eq=False)
class PhysicalLane:
    slots: dict[int, Slot] = field(default_factory=dict)
    changes: int = 0
    """Goes up whenever a slot changed."""
    leaving: set[str] = field(default_factory=set)
    """Jobs that were told to unmap it and have not said that they did."""
    size_bytes: int = 0
    closed: bool = False
    users: set[int] = field(default_factory=set)
    """Whose data may be in it."""

    def drop_all(self) -> None:
        """Nobody gets to see what is in it: whoever runs next makes chunks of its own, which begin empty."""
        self.changes += 1
        for slot in self.slots.values():
            slot.put(-1)

    def cut(self, size_bytes: int) -> None:
        """Lets go of what lies beyond."""
        self.size_bytes = size_bytes
        self.changes += 1
        for number in [number for number in self.slots if end_of(number) > size_bytes]:
            self.slots.pop(number).put(-1)


class Lanes:
    """All lanes of the device."""

    def __init__(
        self,
        on_released: Callable[[int, int], None],
        on_taken: Callable[[int], None] = lambda _lane_id: None,
        capacity_bytes: int = MOST_BYTES,
        *,
        on_gpu: bool = False,
    ) -> None:
        self.capacity_bytes, self.on_gpu = capacity_bytes, on_gpu
        self._lanes: dict[int, PhysicalLane] = {}
        self._on_released = on_released
        self.on_taken = on_taken
        """A job took something of the lane for itself."""

    def get(self, lane_id: int) -> PhysicalLane:
        return self._lanes.setdefault(lane_id, PhysicalLane())

    def resize(self, lane_id: int, size_bytes: int) -> None:
        lane = self.get(lane_id)
        shrinks = size_bytes < lane.size_bytes
        lane.cut(size_bytes)
        if shrinks:
            self._tell(lane_id, lane)

    def close(self, lane_id: int) -> None:
        lane = self.get(lane_id)
        lane.closed = True
        lane.cut(0)
        self._tell(lane_id, lane)

    def left(self, lane_id: int, job_id: str) -> None:
        """The job has nothing of the lane mapped any more, or is dead."""
        lane = self._lanes.get(lane_id)
        if lane is not None and job_id in lane.leaving:
            lane.leaving.discard(job_id)
            self._tell(lane_id, lane)

    def descriptors(self) -> int:
        return sum(slot.descriptor >= 0 for lane in self._lanes.values() for slot in lane.slots.values())

    def held_bytes(self) -> int:
        return sum(
            size_of(number)
            for lane in self._lanes.values()
            for number, slot in lane.slots.items()
            if slot.descriptor >= 0
        )

    def _tell(self, lane_id: int, lane: PhysicalLane) -> None:
        if lane.leaving:
            return
        if lane.closed:
            del self._lanes[lane_id]
        self._on_released(lane_id, 0 if lane.closed else lane.size_bytes)


class Link:
    """The channel to one job's arena."""

    def __init__(
        self,
        job_id: str,
        page: Page,
        report: Report,
        lanes: Lanes,
        on_want: Callable[[], None],
        on_broken: Callable[[], None],
        on_paged: Callable[[Kind, bool], None],
    ) -> None:
        self.job_id = job_id
        self._page, self._report, self._lanes = page, report, lanes
        self._on_want, self._on_broken, self._on_paged = on_want, on_broken, on_paged
        self._loop = asyncio.get_running_loop()
        self._sock, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock.fileno(), self._readable)
        self._sent = self._received = 0
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self.lane_id: int | None = None
        self.quota = (0, 0)
        self.wanted: tuple[int, int] | None = None
        """It waits in an allocation for these: private and lane bytes."""
        self._has: dict[int, int] = {}
        """The version it has mapped of each slot of its lane."""
        self._own: set[int] = set()
        """Slots in which it has a chunk of its own."""
        self._moves: dict[int, int] = {}
        """Lanes it was told to leave, by the number of the order."""
        self._seen: tuple[int | None, int, int] | None = None
        """Lane, changes in it and quota when it was brought up to date."""
        self.holds = False
        """It runs in the lane: what it has mapped there stays, whatever became of the lane."""
        self._suspends = False
        self.suspended = False
        """It was paged out in mid-iteration, and its allocation goes on when it has a lease again."""
        self.closed = False
        self.broken = False
        """It said what cannot be, or something could not be sent to it: nothing more is known of what it has."""

    @property
    def received(self) -> int:
        """Packets of its arena that have been taken in."""
        return self._received

    # What the core decided.

    def set_quota(self, private_bytes: int, lane_bytes: int) -> None:
        """What is there already in the part of the lane that it may use from now on comes along."""
        records = self._changes(lane_bytes)
        self.quota = (private_bytes, lane_bytes)
        if self.wanted is not None and all(has >= want for has, want in zip(self.quota, self.wanted, strict=True)):
            self.wanted = None
        self._send([*records, Record(Kind.QUOTA, 0, private_bytes, lane_bytes)])

    def refuse(self) -> None:
        self.wanted = None
        self._send([Record(Kind.REFUSED)])

    def enter_lane(self, lane_id: int | None) -> None:
        """None: it is in no lane now. It unmaps the one it was in before anything else."""
        if lane_id == self.lane_id:
            return
        if self.lane_id is not None:
            number = self._sent + 1
            self._moves[number] = self.lane_id
            self._lanes.get(self.lane_id).leaving.add(self.job_id)
            self._has.clear()
            self._seen = None
            self._send([Record(Kind.NEW_LANE, 0, 0, number)])
        self.lane_id = lane_id

    def bring_up_to_date(self) -> None:
        """Before a grant."""
        records = self._changes(self.quota[1])
        if records:
            self._send(records)

    def let_go_of_holes(self) -> bool:
        """It unmaps what is not the lane's any more. False: it has nothing of that."""
        if self.lane_id is None or self.holds:
            return False
        slots = self._lanes.get(self.lane_id).slots
        # Also where another chunk has taken the place: that comes with its next lease.
        gone = [number for number, version in self._has.items() if number in slots and slots[number].version != version]
        for number in gone:
            del self._has[number]
        self._send([Record(Kind.HOLE, number) for number in gone])
        return bool(gone)

    def page_out(self, with_lane: bool) -> None:
        """It answers when everything of its own is on the host, or that it could not be."""
        self._suspends = with_lane
        # One that is suspended already, and had no lease since, stays so.
        self.suspended = self.suspended or with_lane
        self._send([Record(Kind.PAGE_OUT, 0, int(with_lane))])

    def page_in(self, keep_host_memory: bool) -> None:
        self._send([Record(Kind.PAGE_IN, 0, int(keep_host_memory))])

    def prepare(self) -> None:
        """It may be paged out before long, and has the time to make host memory ready."""
        self._send([Record(Kind.PREPARE)])

    def resume(self) -> None:
        """It waits in mid-iteration, and has a lease again."""
        self.suspended = False
        self._send([Record(Kind.RESUME)])

    def hang_up(self) -> None:
        """The job is cut off, and lives on. One that waits for us in an allocation hears of it here alone."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        close_socket_elsewhere(self._sock)
        self.close_theirs()
        for _, descriptors in self._unsent:
            for descriptor in descriptors:
                os.close(descriptor)
        self._unsent.clear()
        for lane_id in self._moves.values():
            self._lanes.left(lane_id, self.job_id)
        self._moves.clear()

    def close_theirs(self) -> None:
        """Once the job has its end."""
        self.theirs.close()

    def catch_up(self) -> bool:
        """Takes in everything the arena has sent; it counts its packets on the page, before it says anything else.

        False: not all of it could be, so nobody knows what the job has taken for itself.
        """
        # Asked for once: a job that goes on sending must not keep us here.
        sent = self._report.packets
        if sent - self._received > MOST_UNREAD:
            self._break()
        while not self.closed and not self.broken and self._received < sent:
            before = self._received
            self._readable()
            if self._received == before:
                return False
        return not self.broken

    # Inside.

    def _changes(self, lane_bytes: int) -> list[Record]:
        """What differs between the lane, as far as the job may use it, and what the job has mapped."""
        if self.lane_id is None:
            return []
        lane = self._lanes.get(self.lane_id)
        if self._seen == (self.lane_id, lane.changes, lane_bytes):
            return []
        self._seen = None if self.holds else (self.lane_id, lane.changes, lane_bytes)
        records = []
        for number, slot in lane.slots.items():
            if self.holds and number in self._has:
                continue
            if number in self._own or self._has.get(number, 0) == slot.version or end_of(number) > lane_bytes:
                continue
            if slot.descriptor >= 0:
                records.append(Record(Kind.CHUNK, number))
            elif number in self._has:
                records.append(Record(Kind.HOLE, number))
            self._has[number] = slot.version
        return records

    def _send(self, records: list[Record]) -> None:
        if self.closed:
            return
        for start in range(0, len(records), MOST_RECORDS):
            part = records[start : start + MOST_RECORDS]
            descriptors = []
            for record in part:
                if record.kind == Kind.CHUNK:
                    assert self.lane_id is not None
                    try:
                        descriptors.append(os.dup(self._lanes.get(self.lane_id).slots[record.slot].descriptor))
                    except OSError as error:
                        log.error("job %s: a chunk cannot be handed on (%s); it is cut off", self.job_id, error)
                        self._break()
            self._sent += 1
            self._page.words[Word.SERVICE_PACKETS] = self._sent
            self._unsent.append((pack(part), descriptors))
        self._writable()

    def _writable(self) -> None:
        while self._unsent:
            packet, descriptors = self._unsent[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            try:
                self._sock.sendmsg([packet], ancillary)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock.fileno(), self._writable)
                return
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
                    # Too many descriptors on their way, or no memory: what was counted must arrive.
                    self._loop.remove_writer(self._sock.fileno())
                    self._loop.call_later(RETRY_S, self._write_again)
                    return
            self._unsent.popleft()
            for descriptor in descriptors:
                os.close(descriptor)
        self._loop.remove_writer(self._sock.fileno())

    def _write_again(self) -> None:
        if not self.closed:
            self._writable()

    def _break(self) -> None:
        self.broken = True
        self._on_broken()

    def _readable(self) -> None:
        try:
            packet, descriptors, _ = receive(self._sock, _PACKET_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            packet, descriptors = b"", []
        if not packet:
            close_elsewhere(*descriptors)
            self._loop.remove_reader(self._sock.fileno())
            return
        self._received += 1
        given = deque(descriptors)
        try:
            for record in unpack(packet):
                self._obey(record, given)
        except (ValueError, KeyError, IndexError) as error:
            log.warning("job %s: its arena said what cannot be (%s); it is cut off", self.job_id, error)
            self._break()
        finally:
            close_elsewhere(*given)

    def _obey(self, record: Record, given: deque[int]) -> None:
        match record.kind:
            case Kind.WANT:
                self.wanted = (record.a, record.b)
                self._on_want()
            case Kind.PUBLISH:
                descriptor = given.popleft()
                if self.lane_id is None or end_of(record.slot) > self.quota[1]:
                    close_elsewhere(descriptor)
                    raise ValueError(f"slot {record.slot} is not its to fill")
                if not is_chunk(descriptor, size_of(record.slot), on_gpu=self._lanes.on_gpu):
                    close_elsewhere(descriptor)
                    raise ValueError(f"what it published for slot {record.slot} is no chunk")
                lane = self._lanes.get(self.lane_id)
                lane.changes += 1
                slot = lane.slots.setdefault(record.slot, Slot())
                slot.put(descriptor)
                self._has[record.slot] = slot.version
            case Kind.TAKE:
                if self.lane_id is None:
                    raise ValueError("it takes a slot of no lane")
                lane = self._lanes.get(self.lane_id)
                lane.changes += 1
                lane.slots[record.slot].put(-1)
                self._own.add(record.slot)
                self._has.pop(record.slot, None)
                self._lanes.on_taken(self.lane_id)
            case Kind.DROP:
                self._seen = None
                self._own.discard(record.slot)
                self._has.pop(record.slot, None)
            case Kind.LEFT:
                # Whoever answers the last of several has left those before it too.
                left = [self._moves.pop(number) for number in sorted(self._moves) if number <= record.b]
                for lane_id in dict.fromkeys(left):
                    if lane_id not in self._moves.values():
                        self._lanes.left(lane_id, self.job_id)
            case Kind.OWN:
                if end_of(record.slot) > self._lanes.capacity_bytes:
                    raise ValueError(f"slot {record.slot} lies beyond the device's memory")
                self._own.add(record.slot)
            case Kind.PAGED:
                done = bool(record.a)
                if record.slot == Kind.PAGE_OUT and self._suspends:
                    self._suspends = False
                    if done:
                        # Nothing of the lane is mapped any more; what it had there is on the host.
                        self.lane_id, self._seen = None, None
                        self._has.clear()
                    else:
                        self.suspended = False
                self._on_paged(Kind(record.slot), done)
            case _:
                raise ValueError(f"record of kind {record.kind}")
