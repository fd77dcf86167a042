"""What there is to set: each setting's key, what it accepts, its default and what it is for.

To add a setting, write a `Setting` below and put it into `SETTINGS`; for a limit that everybody, a user or a group may
have, into `CAPS`, and give `Caps` a field of that name. That is all: the files, the environment, `salus config` and its
messages know it from here, and a test compares docs/configuration.md with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

from salus.config.file import Keys
from salus.core.policies import DEFAULT_POLICY, DEFAULT_SYSTEM_POLICY
from salus.errors import RequestRejected
from salus.plugins import load_policy
from salus.units import parse_bytes, parse_duration

T = TypeVar("T")


# What a value may be.


@dataclass(frozen=True)
class Kind(Generic[T]):
    expected: str
    """As a person is told: `a size, like 16GiB`."""
    parse: Callable[[str], T]
    bare: bool = False
    """Written to a file without quotes: a number, true or false."""
    metavar: str | None = None
    """What stands for a value in the help of an option; None: what is expected."""


def _one_of(*choices: str) -> Kind[str]:
    expected = f"{', '.join(choices[:-1])} or {choices[-1]}"

    def parse(text: str) -> str:
        if text not in choices:
            raise RequestRejected(f"{text!r:.60} is not understood; expected {expected}")
        return text

    return Kind(expected, parse, metavar="|".join(choices))


def _parse_switch(text: str) -> bool:
    if text not in ("true", "false"):
        raise RequestRejected(f"{text!r:.60} is not understood; expected true or false")
    return text == "true"


def _parse_quantum(text: str) -> float:
    """Someone who writes 20 means milliseconds, and a bare number would be seconds."""
    quantum_s = parse_duration(text)
    if quantum_s and not text.strip()[-1].isalpha():
        raise RequestRejected(f"{text!r} has no unit; write {quantum_s:g}ms or {quantum_s:g}s")
    return quantum_s


def _parse_policy(text: str) -> str:
    load_policy(text)
    return text


def _parse_device(text: str) -> str:
    if re.fullmatch("auto|cuda|host|host:[1-9][0-9]?", text) is None:
        raise RequestRejected(f"{text!r:.60} is not understood; expected auto, cuda, host, or host:N with up to 99")
    return text


def _parse_names(text: str) -> Sequence[str]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def number(least: float, most: float) -> Kind[float]:
    expected = f"a number from {least:g} to {most:g}"

    def parse(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = float("nan")
        if not least <= found <= most:
            raise RequestRejected(f"{text!r:.60} is not understood; expected {expected}")
        return found

    return Kind(expected, parse, bare=True)


def whole_number(least: int, most: int) -> Kind[int]:
    expected = f"a whole number from {least} to {most}"

    def parse(text: str) -> int:
        if re.fullmatch(r"-?\d{1,18}", text) is None or not least <= int(text) <= most:
            raise RequestRejected(f"{text!r:.60} is not understood; expected {expected}")
        return int(text)

    return Kind(expected, parse, bare=True)


SIZE = Kind("a size, like 16GiB", parse_bytes, metavar="SIZE")
TIME = Kind("a time, like 90s or 1h30m", parse_duration, metavar="TIME")
SWITCH = Kind("true or false", _parse_switch, bare=True)
GPUS = Kind("a number or a UUID, or several separated by commas", str, metavar="N|UUID")
NAMES = Kind("names, separated by commas", _parse_names, metavar="NAMES|all")


# The settings.


@dataclass(frozen=True, eq=False)
class Setting(Generic[T]):
    key: str
    """In a file: `table.name`. Of a cap, the name alone."""
    kind: Kind[T]
    help: str
    default: str | None = None
    """As a user would write it; None: it is not set."""
    if_unset: str = ""
    """What no value means, as `salus config` shows it."""
    machine_default: str | None = None
    """The default of the machine-wide service, where that has another."""
    owner_only: bool = False

    @property
    def keys(self) -> Keys:
        return tuple(self.key.split("."))

    @property
    def variable(self) -> str:
        """In the environment."""
        return "SALUS_" + re.sub("[.-]", "_", self.key).upper()

    def default_for(self, machine_wide: bool) -> str | None:
        return self.machine_default if machine_wide and self.machine_default is not None else self.default


POLICY = Setting(
    "service.policy",
    Kind("a policy, see salus policy", _parse_policy, metavar="POLICY"),
    "Who runs when; see salus policy.",
    DEFAULT_POLICY,
    machine_default=DEFAULT_SYSTEM_POLICY,
)
QUANTUM = Setting(
    "service.quantum",
    Kind("a time with a unit, like 20ms", _parse_quantum, metavar="TIME"),
    "A lease lasts at least this long; longer between jobs that have taken turns for minutes. 0 switches at every "
    "boundary.",
    "20ms",
)
DEVICE = Setting(
    "service.device",
    Kind("auto, cuda, host or host:N", _parse_device, metavar="auto|cuda|host"),
    "What is shared: the GPUs, or the processor where there is none; host:2 is as if there were two.",
    "auto",
)
GPU = Setting("service.gpu", GPUS, "Which GPU, or several separated by commas, by number or UUID.", if_unset="all")
CAPACITY = Setting("service.capacity", SIZE, "Memory to share on each GPU, as on a smaller one.", if_unset="all")
RESERVE = Setting(
    "service.reserve", SIZE, "Memory to leave to others on the GPU, besides what they use already.", "256MiB"
)
HOST_MEMORY = Setting(
    "service.host-memory",
    SIZE,
    "Memory of the host for jobs that are paged out, divided among the GPUs; 0: none are.",
    if_unset="half of what is available",
)
STUCK_AFTER = Setting(
    "service.stuck-after", TIME, "A job that ends no iteration for this long holds nobody else up; 0: never.", "60s"
)
MPS = Setting(
    "service.mps",
    _one_of("off", "auto", "on"),
    "Run jobs side by side under NVIDIA MPS. Faster for small ones; but a fatal fault of one ends all.",
    "off",
)
USERS = Setting(
    "service.users",
    NAMES,
    "Other users who may run jobs here, separated by commas; @NAME is a group; all: everybody.",
    "",
    machine_default="all",
    owner_only=True,
)
VISIBLE = Setting("service.visible", SWITCH, "Let users see one another's jobs.", "false", owner_only=True)
SHARE_LANES = Setting(
    "service.share-lanes-between-users",
    SWITCH,
    "Jobs of several users in one lane; each clears what it leaves there.",
    "false",
    owner_only=True,
)
SCRUB = Setting("service.scrub", SWITCH, "Clear what a job leaves in its lane at every switch.", "false")
JOURNAL = Setting("service.journal", SWITCH, "Keep a journal of every decision, for salus replay.", "true")
ON_STOP = Setting(
    "service.on-stop",
    _one_of("release", "drain"),
    "What SIGTERM does: jobs go on unmanaged, or are waited for.",
    "release",
)
LINGER = Setting(
    "service.linger",
    SWITCH,
    "End a second after the last job has, or after ten seconds if none comes; without it, serve until stopped. "
    "The service that salus run starts by itself does so.",
    "false",
)
JOURNAL_SIZE = Setting(
    "storage.journal-size", SIZE, "Keep at most this much of the journal; the oldest is removed.", "256MiB"
)
OUTPUT_SIZE = Setting(
    "storage.output-size",
    SIZE,
    "Keep at most this much output of submitted jobs that have ended; that of the oldest is removed.",
    "256MiB",
)
KEEP_FOR = Setting(
    "storage.keep-for",
    TIME,
    "Remove journal, output, records and history that are older than this; 0: never.",
    "90d",
)
VERBOSE = Setting("service.verbose", SWITCH, "Say what happens.", "false")
IF_NO_SERVICE = Setting(
    "run.if-no-service",
    _one_of("refuse", "run"),
    "What salus run does where no service can be had: give up, or run the command unmanaged.",
    "refuse",
)
TIME_LIMIT = Setting(
    "run.time-limit",
    TIME,
    "End a job when this much time has passed since its start, waiting included; 0: never.",
    if_unset="no limit",
)
GRACE = Setting(
    "run.grace", TIME, "How long a job may take to end, once it is told to, before what is left is killed.", "10s"
)

SETTINGS: tuple[Setting[Any], ...] = (
    POLICY, QUANTUM, DEVICE, GPU, CAPACITY, RESERVE, HOST_MEMORY, STUCK_AFTER, MPS, USERS, VISIBLE, SHARE_LANES, SCRUB,
    JOURNAL, ON_STOP, LINGER, VERBOSE,
    JOURNAL_SIZE, OUTPUT_SIZE, KEEP_FOR,
    IF_NO_SERVICE, TIME_LIMIT, GRACE,
)  # fmt: skip


# Limits: the same names in [limits] (everybody), [limits.users.NAME] and [limits.groups.NAME].


@dataclass(frozen=True)
class Caps:
    """The most that a user may ask for; None: no limit. The fields are the names in CAPS."""

    weight: float | None = None
    priority: int | None = None
    jobs: int | None = None
    memory: int | None = None
    share: float | None = None
    """No cap: what the user gets beside others, where users share."""


CAPS: tuple[Setting[Any], ...] = (
    Setting("weight", number(0.001, 1000), "The largest weight of a job.", if_unset="no limit", owner_only=True),
    Setting(
        "priority", whole_number(-(2**31), 2**31 - 1), "The highest priority of a job.", if_unset="no limit",
        owner_only=True,
    ),
    Setting("jobs", whole_number(0, 10**6), "How many jobs a user may have at once.", if_unset="no limit",
            owner_only=True),
    Setting("memory", SIZE, "How much memory a user's jobs may have together.", if_unset="no limit", owner_only=True),
    Setting("share", number(0.001, 1000), "What a user gets beside others under fair:by=user; 2 is twice as much as 1.",
            if_unset="1", owner_only=True),
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    everybody: Caps = field(default_factory=Caps)
    users: Mapping[str, Caps] = field(default_factory=dict)
    groups: Mapping[str, Caps] = field(default_factory=dict)

    def of(self, user: str, groups: Iterable[str] = ()) -> Caps:
        """The caps of one user."""
        rules = {cap.name: self.rule(cap.name, user, groups) for cap in fields(Caps)}
        return Caps(**{name: rule[0] for name, rule in rules.items() if rule is not None})

    def rule(self, cap: str, user: str, groups: Iterable[str] = ()) -> tuple[Any, Keys] | None:
        """What one cap is for one user, and the setting that says so: the user's own, else the most that a group
        allows, else that of everybody. None: there is no limit."""
        own = getattr(self.users.get(user, Caps()), cap)
        if own is not None:
            return own, ("limits", "users", user, cap)
        of_groups = [
            (value, group)
            for group in groups
            if group in self.groups and (value := getattr(self.groups[group], cap)) is not None
        ]
        if of_groups:
            value, group = max(of_groups)
            return value, ("limits", "groups", group, cap)
        everybody = getattr(self.everybody, cap)
        return None if everybody is None else (everybody, ("limits", cap))
