"""The errors of Salus: whose fault it was, and what can be done.

Waiting and not fitting are ordinary values; an exception means that something could not go on.
Each class has a stable `code`, so that an error can cross a wire and become the same class again.
"""

from __future__ import annotations


class SalusError(Exception):
    """Base of everything Salus raises on purpose."""

    code = "salus-error"
    status = 2
    """What a command that ends with it exits with."""


class RequestRejected(SalusError):
    """The caller asked for something that cannot be done; the message says what would be accepted."""

    code = "request-rejected"


class CommandNotStarted(RequestRejected):
    """The command of a job is not there (status 127) or may not be executed (126), as in a shell. Crosses no wire."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServiceUnavailable(SalusError):
    """There is no service to talk to: try again, or go on without it."""

    code = "service-unavailable"


class NoService(ServiceUnavailable):
    """None runs, or it has ended: one can be started."""

    code = "no-service"


class InvariantBroken(SalusError):
    """A bug in Salus. Carries the story of the job it concerns, for the report."""

    code = "invariant-broken"

    def __init__(self, message: str, story: tuple[str, ...] = ()) -> None:
        super().__init__("\n  ".join((message, *story)))
        self.story = story
