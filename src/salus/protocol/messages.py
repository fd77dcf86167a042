"""Messages: one JSON object a packet.

Each message is a small dataclass; its fields are its schema. Decoding is strict: an unknown type or field, a missing
field, a value of the wrong type or a packet over the limit is a `ProtocolError`, which ends that connection and nothing
else. Whose message it is, is never a field: the kernel tells (SO_PEERCRED).

The first message of a client is `Hello` with its version. A service of another version says so plainly.
"""

from __future__ import annotations

import json
import types
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from salus.errors import SalusError

VERSION = 6
MAX_PACKET_BYTES = 64 * 1024
PACKET_HEAD_BYTES = 1024
"""Of a packet with a list of rows: more than everything else in it."""
MAX_DESCRIPTORS = 5
MOST = 2**63 - 1
"""No number in a message is larger; with one that no machine number holds, arithmetic fails far from here."""
LONGEST_TEXT = 4096
"""In letters, from a client. As long as a path may be."""


class ProtocolError(SalusError):
    """The peer broke the protocol. The connection is over."""

    code = "protocol-error"


# From a client.


@dataclass(frozen=True)
class Hello:
    version: int
    salus: str


@dataclass(frozen=True)
class Register:
    """A launcher announces a job. None is: not known."""

    name: str
    command: list[str]
    directory: str
    priority: int = 0
    weight: float = 1.0
    iterations: int | None = None
    duration_s: float | None = None
    persistent_bytes: int | None = None
    ephemeral_bytes: int | None = None
    log: str | None = None
    gpu: str | None = None
    """On which it is to run: numbers or UUIDs, separated by commas."""
    visible: str | None = None
    """Which the user lets it see, as in CUDA_VISIBLE_DEVICES."""
    sm_share: int | None = None
    """How much of the GPU's processors it may use at once, in percent; under MPS."""
    time_limit_s: float | None = None
    """How long the command may run; then its launcher ends the job."""
    grace_s: float = 10.0
    """Between SIGTERM and SIGKILL, when the job is ended."""


@dataclass(frozen=True)
class Attach:
    """A process of a job wants to use the device. The token came to it through its environment."""

    job_id: str
    token: str
    arena: bool = False
    """It has an arena, and wants the channel for it."""


@dataclass(frozen=True)
class Rejoin:
    """From a launcher, to a service that was started again: its job is still there. Answered with `Registered`."""

    job_id: str
    token: str


@dataclass(frozen=True)
class Reattach:
    """From a process of a job, to a service that was started again: where it is. Answered with `Attached`."""

    job_id: str
    token: str
    arena: bool
    holds: bool
    """It holds the lease of its lane."""
    waits: bool
    """It stands at the door for a lease."""
    lane: int | None
    persistent_bytes: int
    """What was reserved for it, as it last heard."""
    ephemeral_bytes: int
    internal_bytes: int
    on_host: bool = False
    suspended: bool = False
    iterations: int = 0
    used_ns: int = 0
    attained_ns: int = 0
    """How much of the device's time was its own, as it last heard."""


@dataclass(frozen=True)
class Ready:
    """The process waits for a lease. What it used so far is on the shared page."""


@dataclass(frozen=True)
class Yielding:
    """The process is about to give its lease up: whoever is next may be told."""

    now: bool
    """As soon as the device is done. Else when it comes to its next iteration, and nothing of it runs before."""


@dataclass(frozen=True)
class Yielded:
    """The process stopped at a boundary and gave its lease up; it will ask when it wants to go on."""

    wants_more: bool
    """It stands at the door for the next lease already."""
    passed: bool = False
    """It gave it straight to the next job; its page says with which ticket."""


@dataclass(frozen=True)
class Recalled:
    """The answer to `Recall`: the process does not hold a lease, and will take none by this ticket."""

    ticket: int


@dataclass(frozen=True)
class Finished:
    """From the launcher: the job has ended, its command with this status (negative: the signal that killed it)."""

    exit_code: int
    why: str = ""
    """Why its launcher ended it, in words; nothing where it ended by itself or was cancelled."""
    iterations: int | None = None
    """This and the next two: what the job did, for a service that was started again and has not seen it itself."""
    gpu_time_s: float | None = None
    ran_s: float | None = None


@dataclass(frozen=True)
class ListJobs:
    everything: bool = False
    """Also jobs that have ended."""


@dataclass(frozen=True)
class GetStatus:
    pass


@dataclass(frozen=True)
class GetUsage:
    """Answered with `Usage`: who used how much."""

    by: list[str]
    """What to add up by: user, day, job."""
    since: str | None = None
    """A day, as 2026-11-01."""


@dataclass(frozen=True)
class CancelJob:
    job_id: str
    force: bool = False


@dataclass(frozen=True)
class SetJob:
    """Changes a job while it runs. None: this stays as it is."""

    job_id: str
    name: str | None = None
    weight: float | None = None
    priority: int | None = None


@dataclass(frozen=True)
class PauseJob:
    job_id: str


@dataclass(frozen=True)
class ResumeJob:
    job_id: str


@dataclass(frozen=True)
class AwaitJob:
    """Answered with `Ended` when the job has ended."""

    job_id: str


@dataclass(frozen=True)
class SetPolicy:
    policy: str


@dataclass(frozen=True)
class Stop:
    """The service is to end; with `drain` when its last job has."""

    drain: bool = False


# From the service.


@dataclass(frozen=True)
class Welcome:
    version: int
    salus: str
    pid: int


@dataclass(frozen=True)
class Registered:
    job_id: str
    token: str
    gpu: str | None = None
    """The GPU the job is placed on, by its UUID; None on the host device."""
    mps_pipe: str | None = None
    """The directory of the MPS daemon that its processes are to join; None: they are to join none of ours."""
    sm_share: int | None = None
    mps_priority: int | None = None


@dataclass(frozen=True)
class Attached:
    """Comes with descriptors: the shared page and the event that announces a lease; for an arena its channel; the page
    that all jobs of the user share and its bell (`BatonPage`)."""

    job_id: str


@dataclass(frozen=True)
class Recall:
    """The lease that the process was promised may not come. Unless it has it already, it answers with `Recalled`."""

    ticket: int


@dataclass(frozen=True)
class Told:
    """For the person who started the job: one line."""

    text: str


@dataclass(frozen=True)
class Look:
    """Wakes the job's helper thread: a flag on the shared page has been set."""


@dataclass(frozen=True)
class Queued:
    """To the launcher: why the job waits for memory, and where in the queue."""

    reason: str
    text: str
    position: int
    queue_length: int


@dataclass(frozen=True)
class Admitted:
    pass


@dataclass(frozen=True)
class Counting:
    """To the launcher, with the shared page of the process that uses the device, so that it can tell how much the job
    did if no service is there when the job ends: what the job had done before that page began to count."""

    iterations: int
    ran_ns: int


@dataclass(frozen=True)
class Terminate:
    """To the launcher: the job was cancelled; end it."""

    force: bool


@dataclass(frozen=True)
class Jobs:
    jobs: list[dict[str, Any]]
    more: bool = False


@dataclass(frozen=True)
class Status:
    status: dict[str, Any]


@dataclass(frozen=True)
class Usage:
    rows: list[dict[str, Any]]
    more: bool = False


@dataclass(frozen=True)
class Ended:
    job_id: str
    exit_code: int | None


@dataclass(frozen=True)
class Done:
    text: str = ""
    came: bool = True
    """To a launcher whose job has ended: one of its processes wanted to use the device, at some time."""


@dataclass(frozen=True)
class Failed:
    """Becomes the same exception on the other side; see `errors`."""

    code: str
    message: str


@dataclass(frozen=True)
class Described:
    """To a launcher, before its job or the service ends: the job as in `salus ps --json`, for the user's records."""

    row: dict[str, Any]


@dataclass(frozen=True)
class Farewell:
    """The service ends; jobs go on without it."""


FROM_CLIENT = (
    Hello,
    Register,
    Attach,
    Rejoin,
    Reattach,
    Ready,
    Yielding,
    Yielded,
    Recalled,
    Finished,
    ListJobs,
    GetStatus,
    GetUsage,
    CancelJob,
    SetJob,
    PauseJob,
    ResumeJob,
    AwaitJob,
    SetPolicy,
    Stop,
)
FROM_SERVICE = (
    Welcome,
    Registered,
    Attached,
    Told,
    Recall,
    Look,
    Queued,
    Admitted,
    Counting,
    Terminate,
    Jobs,
    Status,
    Usage,
    Ended,
    Done,
    Failed,
    Described,
    Farewell,
)
Message = Any
"""One of the classes above."""


def encode(message: Message) -> bytes:
    ready_made = _READY_MADE.get(message) if type(message) in _SHORT else None
    return ready_made if ready_made is not None else _encode(message)


def _encode(message: Message) -> bytes:
    kind = _name(type(message))
    body = {"type": kind, **{part.name: getattr(message, part.name) for part in fields(message)}}
    packet = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    if len(packet) > MAX_PACKET_BYTES:
        raise ProtocolError(f"a {kind} message of {len(packet)} bytes is over the limit of {MAX_PACKET_BYTES}")
    return packet


def decode(packet: bytes, known: tuple[type, ...]) -> Message:
    """The message in a packet, if it is one of the known ones and right in every part."""
    if packet in _PACKETS and type(_PACKETS[packet]) in known:
        return _PACKETS[packet]
    if len(packet) > MAX_PACKET_BYTES:
        raise ProtocolError(f"a packet of over {MAX_PACKET_BYTES} bytes")
    try:
        body = json.loads(packet)
    except (ValueError, RecursionError):
        raise ProtocolError("a packet that is not JSON") from None
    if not isinstance(body, dict):
        raise ProtocolError("a packet that is not a JSON object")
    kind = body.pop("type", None)
    schema = _SCHEMAS.get(kind) if isinstance(kind, str) else None
    if schema is None or schema.message not in known:
        raise ProtocolError(f"a message of unknown type {kind!r:.60}")
    return schema.build(body)


def _name(message: type) -> str:
    """The type as it stands in a packet: `SetPolicy` is `set-policy`."""
    return "".join("-" + letter.lower() if letter.isupper() else letter for letter in message.__name__).lstrip("-")


@dataclass(frozen=True)
class _Schema:
    message: type
    kinds: dict[str, tuple[type, ...]] = field(default_factory=dict)
    """The types that each field may have."""
    needed: frozenset[str] = frozenset()

    def build(self, body: dict[str, Any]) -> Message:
        name = _name(self.message)
        for key, value in body.items():
            allowed = self.kinds.get(key)
            if allowed is None:
                raise ProtocolError(f"{name}: unknown field {key!r:.60}")
            # A bool is an int to Python, and not to us; an int will do for a float.
            right = type(value) in allowed or (type(value) is int and float in allowed)
            if type(value) in (int, float) and not -MOST <= value <= MOST:  # nor is NaN
                raise ProtocolError(f"{name}: field {key} is out of range")
            if not right or (
                allowed == (list,) and self.message is Register and not all(type(v) is str for v in value)
            ):
                raise ProtocolError(f"{name}: field {key} is of the wrong type")
            body[key] = self._text(name, key, value)
        missing = self.needed - body.keys()
        if missing:
            raise ProtocolError(f"{name}: field {min(missing)} is missing")
        return self.message(**body)

    def _text(self, name: str, key: str, value: Any) -> Any:
        """Halves of letters, which no file and no database takes, are written out."""
        if type(value) is list and self.message is Register:
            return [_whole(word) for word in value]
        if type(value) is not str:
            return value
        if len(value) > LONGEST_TEXT and self.message in FROM_CLIENT:
            raise ProtocolError(f"{name}: field {key} has more than {LONGEST_TEXT} letters")
        return _whole(value)


def _whole(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def fitting(rows: Sequence[dict[str, Any]]) -> int:
    """How many of the first rows go in one packet: a list of jobs is sent in parts."""
    left = MAX_PACKET_BYTES - PACKET_HEAD_BYTES
    for count, row in enumerate(rows):
        left -= len(json.dumps(row)) + 2
        if left < 0:
            return max(1, count)
    return len(rows)


def _schema(message: type) -> _Schema:
    hints = get_type_hints(message)
    kinds: dict[str, tuple[type, ...]] = {}
    for key, hint in hints.items():
        parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        kinds[key] = tuple(get_origin(part) or part for part in parts)
    return _Schema(message, kinds, frozenset(part.name for part in fields(message) if part.default is MISSING))


_SCHEMAS = {_name(message): _schema(message) for message in (*FROM_CLIENT, *FROM_SERVICE)}

# Between the end of one job's iteration and the start of the next one's lie a few messages that never change: they are
# looked up, both ways, rather than built and parsed.
_SHORT = (Ready, Yielding, Yielded, Look)
_ALL_SHORT = (
    Ready(),
    Look(),
    *(Yielding(now) for now in (True, False)),
    *(Yielded(more, passed) for more in (True, False) for passed in (True, False)),
)
_READY_MADE = {message: _encode(message) for message in _ALL_SHORT}
_PACKETS = {packet: message for message, packet in _READY_MADE.items()}
