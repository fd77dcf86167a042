"""Errors across the wire: a stable code, and the same class again on the other side."""

from __future__ import annotations

from salus.errors import InvariantBroken, NoService, RequestRejected, SalusError, ServiceUnavailable
from salus.protocol.messages import VERSION, Failed, ProtocolError


class VersionMismatch(ServiceUnavailable):
    """Client and service speak different versions of the protocol."""

    code = "version-mismatch"


class NoSuchJob(RequestRejected):
    code = "no-such-job"


class NotLetIn(RequestRejected):
    """The service serves other users than this one."""

    code = "not-let-in"


class AnotherProcess(RequestRejected):
    """Another process of the same job uses the device."""

    code = "another-process"


class AnotherProcessAgain(AnotherProcess):
    """The same, and somebody has been told already: say nothing."""

    code = "another-process-again"


_CLASSES: dict[str, type[SalusError]] = {
    error.code: error
    for error in (
        SalusError,
        RequestRejected,
        ServiceUnavailable,
        NoService,
        InvariantBroken,
        ProtocolError,
        VersionMismatch,
        NoSuchJob,
        NotLetIn,
        AnotherProcess,
        AnotherProcessAgain,
    )
}


def to_message(error: SalusError) -> Failed:
    return Failed(error.code, str(error)[:4000])


def to_error(message: Failed) -> SalusError:
    """An unknown code, from a newer service, is still an error of ours."""
    return _CLASSES.get(message.code, SalusError)(message.message)


def version_mismatch(theirs: int, their_salus: str, our_salus: str) -> VersionMismatch:
    return VersionMismatch(
        f"this is Salus {their_salus} (protocol {theirs}) and the service is Salus {our_salus} (protocol {VERSION}); "
        "install the same version on both sides, or restart the service: salus serve"
    )
