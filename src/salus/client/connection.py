"""The client's end of the socket: packets out and in, one at a time, blocking."""

from __future__ import annotations

import array
import contextlib
import select
import socket
import struct
from pathlib import Path
from typing import Any

from salus import __version__, machine
from salus.errors import NoService, ServiceUnavailable
from salus.paths import check_socket, runtime_dir
from salus.protocol import messages as msg
from salus.protocol.descriptors import Descriptor, out_of_the_way
from salus.protocol.errors import to_error


class ServiceConnection:
    def __init__(self, path: Path, timeout_s: float | None = 10.0) -> None:
        check_socket(path)
        self.path = path
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, out_of_the_way(opened.detach()))
        self._descriptor = Descriptor(self._sock.fileno())
        self._sock.settimeout(timeout_s)
        try:
            self._sock.connect(str(path))
        except OSError as error:
            self._sock.close()
            if not isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
                raise ServiceUnavailable(f"{path}: the service cannot be reached ({error.strerror})") from None
            raise NoService(machine.none_runs(path)) from None
        credentials = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.served_by: int = struct.unpack("3i", credentials)[1]
        """The user who runs the service."""
        try:
            machine.check_server(path, self.served_by, runtime_dir())
            self.welcome: msg.Welcome = self.request(msg.Hello(msg.VERSION, __version__))
        except BaseException:
            self._sock.close()
            raise

    def send(self, message: msg.Message) -> None:
        self._check_ours()
        try:
            self._sock.send(msg.encode(message))
        except OSError:
            # It may have told us why before it closed the connection.
            self.receive()
            raise NoService("the service is gone") from None

    def _check_ours(self) -> None:
        """What comes and goes under a number that the script has given to a file of its own is not ours."""
        if not self._descriptor.is_ours:
            raise NoService("the script has closed the connection to the service")

    def receive(self) -> tuple[msg.Message, list[int]]:
        """The next message, with the descriptors that came along. Raises what the service reports as an error."""
        self._check_ours()
        try:
            packet, ancillary, _, _ = self._sock.recvmsg(
                msg.MAX_PACKET_BYTES, socket.CMSG_SPACE(4 * msg.MAX_DESCRIPTORS)
            )
        except ConnectionError:
            raise NoService("the service is gone") from None
        except OSError as error:
            raise ServiceUnavailable(f"the service does not answer ({error.strerror or 'timed out'})") from None
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if not packet:
            raise NoService("the service is gone")
        message = msg.decode(packet, msg.FROM_SERVICE)
        if isinstance(message, msg.Failed):
            raise to_error(message)
        return message, [out_of_the_way(number) for number in descriptors]

    def request(self, message: msg.Message) -> Any:
        """Sends, and gives back the answer."""
        self.send(message)
        return self._answer()

    def _answer(self) -> Any:
        message, _ = self.receive()
        if isinstance(message, msg.Farewell):
            raise NoService("the service has ended")
        return message

    def jobs(self, everything: bool = False) -> list[dict[str, Any]]:
        self.send(msg.ListJobs(everything))
        rows: list[dict[str, Any]] = []
        while True:
            part = self._answer()
            rows += part.jobs
            if not part.more:
                return rows

    def usage(self, by: list[str], since: str | None) -> list[dict[str, Any]]:
        self.send(msg.GetUsage(by, since))
        rows: list[dict[str, Any]] = []
        while True:
            part = self._answer()
            rows += part.rows
            if not part.more:
                return rows

    def something_comes_within(self, seconds: float) -> bool:
        # Not select: a process with many files open has descriptors that it cannot take.
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def wait_for_ever(self) -> None:
        """From now on a receive blocks until something comes."""
        self._sock.settimeout(None)

    def close(self) -> None:
        # A thread that is blocked in a receive wakes up from this, and not from a plain close.
        if self._descriptor.is_ours:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self.close_in_child()

    def close_in_child(self) -> None:
        """After a fork: lets go of our copy, and leaves the parent's connection alone."""
        self._descriptor.close()
        self._sock.detach()

    def __enter__(self) -> ServiceConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
