"""One peer on the socket: packets in, packets out, its identity from the kernel.

SOCK_SEQPACKET keeps packets apart, so there is no framing to get wrong: a packet is a message or the connection ends.
A peer that does not read what it is sent is cut off once `MAX_UNSENT` packets wait for it; it must not hold the
service up.
"""

from __future__ import annotations

import array
import asyncio
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable

from salus.protocol import messages as msg
from salus.service.descriptors import close_elsewhere, close_socket_elsewhere, receive

log = logging.getLogger(__name__)

MAX_UNSENT = 256


class Connection:
    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[Connection, msg.Message], None],
        on_closed: Callable[[Connection], None],
    ) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_closed = on_message, on_closed
        self._unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self.closed = False
        self.greeted = False
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid, self.uid, self.gid = struct.unpack("3i", credentials)
        sock.setblocking(False)

    def listen(self) -> None:
        """From now on the peer is heard. Nothing is read from a stranger."""
        self._loop.add_reader(self._sock.fileno(), self._readable)

    def send(self, message: msg.Message, descriptors: tuple[int, ...] = ()) -> None:
        """Sends now, or as soon as the peer reads. The caller keeps its own descriptors."""
        if self.closed:
            return
        packet = msg.encode(message)
        if not self._unsent and self._try_send(packet, descriptors):
            return
        if self.closed:
            return
        kept = tuple(os.dup(descriptor) for descriptor in descriptors)
        self._unsent.append((packet, kept))
        if len(self._unsent) == 1:
            self._loop.add_writer(self._sock.fileno(), self._writable)
        if len(self._unsent) > MAX_UNSENT:
            log.warning("process %d does not read what it is sent; it is cut off", self.pid)
            self.close()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        close_socket_elsewhere(self._sock)
        for _, kept in self._unsent:
            for descriptor in kept:
                os.close(descriptor)
        self._unsent.clear()
        self._on_closed(self)

    def _readable(self) -> None:
        try:
            packet, descriptors, too_long = receive(self._sock, msg.MAX_PACKET_BYTES + 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        close_elsewhere(*descriptors)
        if not packet:
            self.close()
            return
        try:
            if descriptors:
                raise msg.ProtocolError("descriptors, which no message to the service has")
            if too_long:
                raise msg.ProtocolError(f"a packet of over {msg.MAX_PACKET_BYTES} bytes")
            self._on_message(self, msg.decode(packet, msg.FROM_CLIENT))
        except msg.ProtocolError as error:
            log.info("process %d broke the protocol with %s; its connection ends", self.pid, error)
            self.send(msg.Failed(error.code, str(error)))
            self.close()

    def _try_send(self, packet: bytes, descriptors: tuple[int, ...]) -> bool:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self._sock.sendmsg([packet], ancillary)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self._loop.call_soon(self.close)
        return True

    def _writable(self) -> None:
        while self._unsent:
            packet, kept = self._unsent[0]
            if not self._try_send(packet, kept):
                return
            self._unsent.popleft()
            for descriptor in kept:
                os.close(descriptor)
        self._loop.remove_writer(self._sock.fileno())
