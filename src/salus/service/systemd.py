"""What systemd is told, where it has started the service."""

from __future__ import annotations

import contextlib
import os
import socket


def tell_systemd(text: str) -> None:
    """One line to $NOTIFY_SOCKET, as sd_notify(3) does: `READY=1` once users can connect."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    # A name that begins with @ is in the abstract namespace, whose names begin with a zero byte.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(text.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)
