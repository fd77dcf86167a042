"""What the service says to the launcher of a job, from the job's start until the service has heard of its end.

A service that was killed is waited for, and the next one is told that the job is still there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from salus.client.again import connect_again
from salus.client.connection import ServiceConnection
from salus.client.counts import Counts
from salus.client.kept_record import KeptRecord
from salus.client.say import say
from salus.errors import SalusError, ServiceUnavailable
from salus.paths import socket_path
from salus.protocol import messages as msg
from salus.records import open_records

END_TIMEOUT_S = 2.0


class Listener(threading.Thread):
    """`on_terminate(force)` is called in this thread when the job is to end."""

    def __init__(
        self,
        connection: ServiceConnection,
        job: msg.Registered,
        on_terminate: Callable[[bool], None],
        record: KeptRecord | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self._record = record
        self._connection, self._job, self._on_terminate = connection, job, on_terminate
        self._end: msg.Finished | None = None
        self._known = False
        """The service has heard how the job ended."""
        self.came = True
        """One of its processes wanted to use the device, as far as is known."""
        self._counts: Counts | None = None

    def run(self) -> None:
        while True:
            try:
                self._hear(self._connection)
                return
            except (SalusError, OSError):
                connection = connect_again(socket_path())
            try:
                if connection is None:
                    return
                connection.request(msg.Rejoin(self._job.job_id, self._job.token))
                connection.wait_for_ever()
            except ServiceUnavailable:
                continue  # killed again
            except SalusError:
                return  # it does not know the job any more
            self._connection = connection
            if self._end is not None:
                self._tell(self._end)

    def finish(self, end: msg.Finished) -> None:
        self._end = end
        self._tell(end)
        # When the answer is there, the service knows, and `salus ps` tells the truth.
        self.join(timeout=END_TIMEOUT_S)
        self._connection.close()
        if not self._known:
            # Where the service is gone, or another's, this is all that can be done.
            with contextlib.suppress(SalusError, OSError), open_records() as records:
                counts = None if self._counts is None else self._counts.now()
                records.finish(self._job.job_id, self._job.token, end.exit_code, end.why, counts)

    def _tell(self, end: msg.Finished) -> None:
        counts: dict[str, Any] = {} if self._counts is None else self._counts.now()
        with contextlib.suppress(SalusError):
            self._connection.send(replace(end, **counts))

    def _hear(self, connection: ServiceConnection) -> None:
        job_id = self._job.job_id
        while True:
            message, descriptors = connection.receive()
            match message:
                case msg.Queued(_, text, position, queue_length):
                    say(f"job {job_id} waits for memory, {position} of {queue_length} in the queue: {text}")
                case msg.Told(text):
                    say(text)
                case msg.Admitted():
                    say(f"job {job_id} has its memory")
                case msg.Counting(iterations, ran_ns):
                    self._counts = Counts.on(descriptors, iterations, ran_ns)
                case msg.Terminate(force):
                    self._on_terminate(force)
                case msg.Described(row):
                    if self._record is not None:
                        self._record.describe(row)
                case msg.Done(_, came):
                    self._known, self.came = True, came
                    return
                case msg.Farewell():
                    return
