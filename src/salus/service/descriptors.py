"""Descriptors that come from a peer: which are taken, and how the others are got rid of.

A peer can send any descriptor it has. Two things make that dangerous. Closing the last descriptor of a socket that
lingers blocks for as long as its owner likes, so nothing that a peer sent is closed in the thread that decides. And
what the kernel cannot deliver, because there is no room for it, it closes in our name, so there is always room for as
many as one packet can carry. Where the kernel can refuse to carry descriptors at all (Linux 6.16), it is told to.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import queue
import socket
import stat
import threading
from collections.abc import Iterable

from salus.protocol.sealed import is_sealed_memory

log = logging.getLogger(__name__)

SO_PASSRIGHTS = getattr(socket, "SO_PASSRIGHTS", 83)
MOST_IN_A_PACKET = 253
"""The kernel's own limit (SCM_MAX_FD)."""
_ROOM = socket.CMSG_SPACE(MOST_IN_A_PACKET * array.array("i").itemsize)


def refuse_descriptors(sock: socket.socket) -> None:
    """Nobody can send descriptors to this socket, nor to those that a listening socket accepts."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
    except OSError:
        log.debug("this kernel cannot refuse descriptors; unexpected ones are closed in another thread")


def receive(sock: socket.socket, most_bytes: int) -> tuple[bytes, list[int], bool]:
    """A packet, the descriptors that came along, and whether the packet was longer than that."""
    packet, ancillary, flags, _ = sock.recvmsg(most_bytes, _ROOM, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return packet, list(descriptors), bool(flags & socket.MSG_TRUNC)


def is_chunk(descriptor: int, size_bytes: int, *, on_gpu: bool) -> bool:
    """Whether it can be a chunk of this size.

    On the host device a chunk is a sealed memory file. On a GPU it is a handle of the driver, whose size only the
    driver knows; an importer finds out. Files, pipes and sockets it never is.
    """
    if not on_gpu:
        return is_sealed_memory(descriptor, size_bytes)
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return not any(kind(mode) for kind in (stat.S_ISREG, stat.S_ISDIR, stat.S_ISSOCK, stat.S_ISFIFO, stat.S_ISBLK))


class _Closer(threading.Thread):
    """Closes what may block, one after the other, for as long as the process lives."""

    def __init__(self) -> None:
        super().__init__(name="salus-closer", daemon=True)
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()

    def put(self, descriptors: Iterable[int]) -> None:
        for descriptor in descriptors:
            self._waiting.put(descriptor)

    def run(self) -> None:
        while True:
            descriptor = self._waiting.get()
            try:
                os.close(descriptor)
            except OSError as error:
                log.warning("descriptor %d could not be closed (%s)", descriptor, error)


_closer: _Closer | None = None


def close_elsewhere(*descriptors: int) -> None:
    """Closes what a peer sent, or has something of a peer's in it, without waiting for that."""
    global _closer
    if not descriptors:
        return
    if _closer is None:
        _closer = _Closer()
        _closer.start()
    _closer.put(descriptors)


def close_socket_elsewhere(sock: socket.socket) -> None:
    """The peer sees the end at once. What it had sent, and nobody read, goes with the socket, in the other thread."""
    with contextlib.suppress(OSError):  # the peer may have gone already
        sock.shutdown(socket.SHUT_RDWR)
    close_elsewhere(sock.detach())
