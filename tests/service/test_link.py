"""The service's end of an arena's channel."""

from __future__ import annotations

import array
import asyncio
import os
import socket

from salus.protocol.page import Page, Word
from salus.protocol.sealed import sealed_memory
from salus.protocol.slots import Kind, Record, pack, size_of, unpack
from salus.service.memory import Lanes, Link
from salus.service.report import Report

MIB = 1 << 20


class Job:
    """The other end, played by the test."""

    def __init__(self, lanes: Lanes, name: str) -> None:
        self.page, self._descriptor = Page.create()
        report = Report(self.page, lambda _: None)
        self.link = Link(name, self.page, report, lanes, lambda: None, lambda: None, lambda *_: None)
        self._sock = self.link.theirs
        self._sock.setblocking(False)

    def publish(self, slot: int) -> None:
        chunk = sealed_memory("salus-chunk", size_of(slot))
        self.send([Record(Kind.PUBLISH, slot)], chunk)
        os.close(chunk)
        assert self.link.catch_up()

    def says(self, kind: Kind, slot: int) -> None:
        self.send([Record(kind, slot)])
        assert self.link.catch_up()

    def send(self, records: list[Record], *descriptors: int) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self._sock.sendmsg([pack(records)], ancillary)
        self.page.words[Word.JOB_PACKETS] += 1

    def hears(self) -> list[int]:
        heard: list[int] = []
        while True:
            try:
                packet, ancillary, _, _ = self._sock.recvmsg(4096, socket.CMSG_SPACE(256))
            except BlockingIOError:
                return heard
            for _, _, data in ancillary:
                fds = array.array("i")
                fds.frombytes(data)
                for fd in fds:
                    os.close(fd)
            heard += [record.kind for record in unpack(packet)]

    def close(self) -> None:
        self.link.close()
        self.page.close()
        os.close(self._descriptor)


def test_what_another_took_for_itself_is_let_go_of_and_nothing_else_is_said():
    async def story() -> None:
        taken: list[int] = []
        lanes = Lanes(lambda *_: None, taken.append)
        takes, rests, runs = (Job(lanes, name) for name in ("takes", "rests", "runs"))
        for job in (takes, rests, runs):
            job.link.enter_lane(1)
            job.link.set_quota(0, 64 * MIB)
        for slot in range(3):
            takes.publish(slot)
        for job in (rests, runs):
            job.link.bring_up_to_date()
        for job in (takes, rests, runs):
            job.hears()
        runs.link.holds = True
        takes.says(Kind.TAKE, 1)
        takes.publish(3)
        assert taken == [1]
        assert rests.link.let_go_of_holes() and rests.hears() == [Kind.HOLE]
        assert not rests.link.let_go_of_holes() and rests.hears() == []
        assert not runs.link.let_go_of_holes(), "it is at work there"
        assert not takes.link.let_go_of_holes(), "it is its own"
        rests.link.bring_up_to_date()
        assert rests.hears() == [Kind.CHUNK], "what is new comes with its lease"
        takes.says(Kind.TAKE, 2)
        runs.publish(2)
        assert rests.link.let_go_of_holes() and rests.hears() == [Kind.HOLE]
        rests.link.bring_up_to_date()
        assert rests.hears() == [Kind.CHUNK], "and so does what has taken the place"
        for job in (takes, rests, runs):
            job.close()

    asyncio.run(story())


def test_whoever_runs_in_a_lane_keeps_what_it_has_there_until_its_next_lease():
    async def story() -> None:
        lanes = Lanes(lambda *_: None)
        runs, waits = Job(lanes, "runs"), Job(lanes, "waits")
        for job in (runs, waits):
            job.link.enter_lane(1)
            job.link.set_quota(0, 8 * MIB)
        runs.link.holds = True
        runs.publish(0)
        waits.link.bring_up_to_date()
        assert Kind.CHUNK in waits.hears()
        runs.hears()
        lanes.get(1).drop_all()
        runs.link.set_quota(0, 16 * MIB)
        assert runs.hears() == [Kind.QUOTA], "it is in the middle of an iteration in that very chunk"
        waits.link.bring_up_to_date()
        assert waits.hears() == [Kind.HOLE]
        runs.link.holds = False
        runs.link.bring_up_to_date()
        assert runs.hears() == [Kind.HOLE]
        for job in (runs, waits):
            job.close()

    asyncio.run(story())
