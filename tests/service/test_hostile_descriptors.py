"""Shared memory and descriptors in the hands of somebody who wants to do harm."""

from __future__ import annotations

import array
import asyncio
import os
import resource
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from salus.client.connection import ServiceConnection
from salus.errors import SalusError
from salus.protocol import messages as msg
from salus.protocol import slots
from salus.protocol.page import SIZE_BYTES, Page
from salus.protocol.sealed import sealed_memory
from salus.protocol.slots import Kind, Record
from salus.service import descriptors
from salus.service.connection import Connection
from salus.service.memory import Lanes
from tests.service.harness import eventually, finish
from tests.service.test_link import Job

MIB = 1 << 20


def with_descriptors(*given: int) -> list[tuple[int, int, Any]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given))]


def test_a_job_cannot_make_any_shared_page_smaller_and_the_service_goes_on(serve):
    service = serve()
    with service.connect() as launcher, service.connect() as worker:
        job = launcher.request(msg.Register("hostile", ["x"], "/"))
        worker.send(msg.Attach(job.job_id, job.token))
        _, (page, event, batons, bell) = worker.receive()
        for shared in (page, batons):
            for size in (0, SIZE_BYTES - 1, 2 * SIZE_BYTES):
                with pytest.raises(PermissionError):
                    os.ftruncate(shared, size)
        for descriptor in (page, event, batons, bell):
            os.close(descriptor)
        finish(service.job(iterations=3, seconds=0.001))


def test_a_page_that_could_be_made_smaller_is_not_mapped():
    unsealed = os.memfd_create("page", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, SIZE_BYTES)
    too_large = sealed_memory("page", 2 * SIZE_BYTES)
    for descriptor in (unsealed, too_large):
        with pytest.raises(ValueError, match="smaller"):
            Page(descriptor)
        os.close(descriptor)


def unsealed_memory() -> int:
    descriptor = os.memfd_create("chunk", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, slots.size_of(0))
    return descriptor


def read_end_of_a_pipe() -> int:
    reads, writes = os.pipe()
    os.close(writes)
    return reads


NO_CHUNKS: dict[str, Callable[[], int]] = {
    "a memory file that can still be made smaller": unsealed_memory,
    "a memory file of the wrong size": lambda: sealed_memory("chunk", slots.size_of(0) // 2),
    "a pipe": read_end_of_a_pipe,
    "a socket": lambda: socket.socket().detach(),
    "a file": lambda: os.open(__file__, os.O_RDONLY),
    "a folder": lambda: os.open("/", os.O_RDONLY),
}


@pytest.mark.parametrize("what", NO_CHUNKS)
def test_what_is_published_as_a_chunk_and_is_none_never_gets_into_the_lane(what):
    async def story() -> None:
        lanes = Lanes(lambda *_: None)
        job = Job(lanes, "hostile")
        job.link.enter_lane(1)
        job.link.set_quota(0, 4 * MIB)
        job.send([Record(Kind.PUBLISH, 0)], descriptor)
        assert not job.link.catch_up(), what
        assert job.link.broken
        assert lanes.descriptors() == 0
        job.close()

    descriptor = NO_CHUNKS[what]()
    asyncio.run(story())
    os.close(descriptor)


@pytest.mark.parametrize("what", ["a pipe", "a socket", "a file", "a folder"])
def test_on_a_gpu_files_pipes_and_sockets_are_no_chunks_either(what):
    found = NO_CHUNKS[what]()
    assert not descriptors.is_chunk(found, MIB, on_gpu=True)
    os.close(found)


def test_the_driver_hands_out_devices_and_those_are_taken_on_a_gpu():
    device = os.open("/dev/null", os.O_RDWR)
    assert descriptors.is_chunk(device, MIB, on_gpu=True)
    os.close(device)


class SlowToClose:
    """Stands in for `os.close` where the last descriptor of a socket that lingers would be closed."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.closed_by: list[str] = []
        self._close = os.close

    def __call__(self, descriptor: int) -> None:
        self.closed_by.append(threading.current_thread().name)
        assert self.may_go_on.wait(30)
        self._close(descriptor)


def test_a_descriptor_that_takes_long_to_close_holds_nobody_up(monkeypatch):
    """As on a kernel that cannot refuse descriptors: they arrive, and the connection ends."""
    slow = SlowToClose()
    monkeypatch.setattr(descriptors, "_closer", None)
    monkeypatch.setattr(descriptors.os, "close", slow)
    heard: list[msg.Message] = []

    async def story() -> None:
        ended = asyncio.Event()
        hostile, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        friendly, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        first = Connection(theirs, lambda _, message: heard.append(message), lambda _: ended.set())
        second = Connection(ours, lambda _, message: heard.append(message), lambda _: None)
        first.listen()
        second.listen()
        lingers = os.open("/dev/null", os.O_RDONLY)
        hostile.sendmsg([msg.encode(msg.GetStatus())], with_descriptors(lingers))
        await asyncio.wait_for(ended.wait(), 30)
        friendly.send(msg.encode(msg.ListJobs()))
        while not heard:
            await asyncio.sleep(0.001)
        assert not slow.may_go_on.is_set(), "it was heard while the descriptor was still being closed"
        slow.may_go_on.set()
        second.close()
        for end in (hostile, friendly):
            end.close()

    asyncio.run(story())
    assert heard == [msg.ListJobs()], "what came with descriptors was not obeyed"
    assert set(slow.closed_by) == {"salus-closer"}


def test_nobody_can_send_descriptors_to_a_service_where_the_kernel_can_refuse_them(serve):
    service = serve()
    before = service.descriptors()
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(str(service.socket))
    try:
        stranger.getsockopt(socket.SOL_SOCKET, descriptors.SO_PASSRIGHTS)
    except OSError:
        pytest.skip("this kernel cannot refuse descriptors")
    given = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(PermissionError):
        stranger.sendmsg([b"{}"], with_descriptors(given))
    os.close(given)
    stranger.close()
    eventually(lambda: service.descriptors() <= before, "nothing is left of the stranger")


def test_without_descriptors_nobody_new_is_let_in_and_nothing_spins(serve):
    service = serve()
    log = service.process.stderr
    resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (service.descriptors() + 8, 4096))
    crowd = []
    for _ in range(32):
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one.connect(str(service.socket))
        crowd.append(one)
    with pytest.raises(SalusError):
        ServiceConnection(service.socket, timeout_s=2.0)
    for one in crowd:
        one.close()
    eventually(lambda: service.status()["jobs"] == 0, "those who come later are let in again")
    service.process.terminate()
    paused = [line for line in log.read().splitlines() if "nobody new can be let in" in line]
    assert 0 < len(paused) < 100, "the service waits between two looks"
