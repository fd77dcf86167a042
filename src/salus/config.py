"""Every setting of Salus: its key, what it accepts, its default, and where the value in force comes from.

Settings come from five places, and a later one wins:

    default  <  machine's file  <  user's file  <  environment  <  option on the command line

- The machine-wide service reads no user's file: what an administrator has set cannot be undone by a user.
- A setting with `owner_only` (who may use a service, and their limits) is taken from the file of whoever runs the
  service: from the machine's file for the machine-wide service alone, from the user's file for a user's own.

To add a setting, write a `Setting` below and put it into `SETTINGS` (or `CAPS`, for a limit that everybody, a user or a
group may have). That gives it a key in the files, a variable in the environment, a line in `salus config` and one in
docs/configuration.md, which a test compares with the table here.

Not for code in a user's job: that has no TOML before Python 3.11. What a job needs, it gets in its environment.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar

from salus.config_file import Keys, as_text, read_entries
from salus.errors import RequestRejected
from salus.paths import config_path, machine_config_path
from salus.plugins import load_policy
from salus.units import parse_bytes, parse_duration

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


# What a value may be.


@dataclass(frozen=True)
class Kind(Generic[T_co]):
    expected: str
    """As a person is told: `a size, like 16GiB`."""
    parse: Callable[[str], T_co]
    bare: bool = False
    """Written to a file without quotes: a number, true or false."""


def _one_of(*choices: str) -> Kind[str]:
    expected = f"{', '.join(choices[:-1])} or {choices[-1]}"

    def parse(text: str) -> str:
        if text not in choices:
            raise RequestRejected(f"{text!r:.60} is not understood; expected {expected}")
        return text

    return Kind(expected, parse)


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


def _parse_names(text: str) -> tuple[str, ...]:
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


SIZE = Kind("a size, like 16GiB", parse_bytes)
TIME = Kind("a time, like 90s or 1h30m", parse_duration)
SWITCH = Kind("true or false", _parse_switch, bare=True)
TEXT = Kind("text", str)
NAMES = Kind("names, separated by commas", _parse_names)


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


POLICY = Setting("service.policy", Kind("a policy, see salus policy", _parse_policy), "Who runs when.", "fair")
QUANTUM = Setting(
    "service.quantum",
    Kind("a time with a unit, like 20ms", _parse_quantum),
    "A lease lasts at least this long; longer between jobs that have taken turns for minutes. 0 switches at every "
    "boundary.",
    "20ms",
)
DEVICE = Setting(
    "service.device",
    Kind("auto, cuda, host or host:N", _parse_device),
    "What is shared: the GPUs, or the processor where there is none; host:2 is as if there were two.",
    "auto",
)
GPU = Setting("service.gpu", TEXT, "Which GPU, or several separated by commas, by number or UUID.", if_unset="all")
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
    "End a second after the last job has, as a service does that salus run starts.",
    "false",
)
VERBOSE = Setting("service.verbose", SWITCH, "Say what happens.", "false")
IF_NO_SERVICE = Setting(
    "run.if-no-service",
    _one_of("refuse", "run"),
    "What salus run does where no service can be had: give up, or run the command unmanaged.",
    "refuse",
)

SETTINGS: tuple[Setting[Any], ...] = (
    POLICY, QUANTUM, DEVICE, GPU, CAPACITY, RESERVE, HOST_MEMORY, STUCK_AFTER, MPS, USERS, VISIBLE, SHARE_LANES, SCRUB,
    JOURNAL, ON_STOP, LINGER, VERBOSE,
    IF_NO_SERVICE,
)  # fmt: skip


# Limits: the same names in [limits] (everybody), [limits.users.NAME] and [limits.groups.NAME].


@dataclass(frozen=True)
class Caps:
    """The most that a user may ask for; None: no limit. The fields are the names in CAPS."""

    weight: float | None = None
    priority: int | None = None
    jobs: int | None = None
    memory: int | None = None


CAPS: tuple[Setting[Any], ...] = (
    Setting("weight", number(0.001, 1000), "The largest weight of a job.", if_unset="no limit", owner_only=True),
    Setting(
        "priority", whole_number(-(2**31), 2**31 - 1), "The highest priority of a job.", if_unset="no limit",
        owner_only=True,
    ),
    Setting("jobs", whole_number(0, 10**6), "How many jobs a user may have at once.", if_unset="no limit",
            owner_only=True),
    Setting("memory", SIZE, "How much memory a user's jobs may have together.", if_unset="no limit", owner_only=True),
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    everybody: Caps = field(default_factory=Caps)
    users: Mapping[str, Caps] = field(default_factory=dict)
    groups: Mapping[str, Caps] = field(default_factory=dict)

    def of(self, user: str, groups: Iterable[str] = ()) -> Caps:
        """The caps of one user. Each cap by itself: the user's own, else the most that a group allows, else that of
        everybody."""
        own = self.users.get(user, Caps())
        mine = [self.groups[group] for group in groups if group in self.groups]
        found: dict[str, Any] = {}
        for cap in fields(Caps):
            of_groups = [value for caps in mine if (value := getattr(caps, cap.name)) is not None]
            everybody = getattr(self.everybody, cap.name)
            value = getattr(own, cap.name)
            found[cap.name] = value if value is not None else max(of_groups, default=everybody)
        return Caps(**found)


# Values, and where they come from.


class Origin(Enum):
    DEFAULT = "default"
    MACHINE = "machine's file"
    USER = "user's file"
    ENVIRONMENT = "environment"
    OPTION = "option"


@dataclass(frozen=True)
class Source:
    origin: Origin
    name: str = ""
    """The file, the variable or the option."""
    line: int | None = None

    def __str__(self) -> str:
        if self.origin is Origin.DEFAULT:
            return "default"
        return self.name if self.line is None else f"{self.name}:{self.line}"


@dataclass(frozen=True)
class Found:
    setting: Setting[Any]
    keys: Keys
    value: Any
    """None: it is not set."""
    text: str
    """As a user would write it."""
    source: Source

    @property
    def key(self) -> str:
        return as_text(self.keys)


class Settings:
    def __init__(self, found: Mapping[Keys, Found], machine_wide: bool) -> None:
        self._found = dict(found)
        self.machine_wide = machine_wide

    def __getitem__(self, setting: Setting[T]) -> T:
        """The value; for settings that have a default."""
        value: T = self._found[setting.keys].value
        return value

    def get(self, setting: Setting[T]) -> T | None:
        """The value; None: it is not set."""
        value: T | None = self._found[setting.keys].value
        return value

    def source(self, setting: Setting[Any]) -> Source:
        return self._found[setting.keys].source

    def label(self, setting: Setting[Any]) -> str:
        """How a message that complains about the value begins: `--gpu`, `/etc/salus/config.toml:3: service.gpu`."""
        return _label(setting.keys, self.source(setting))

    def all(self) -> list[Found]:
        """Settings in the order of the table above, then limits."""
        return list(self._found.values())

    @property
    def limits(self) -> Limits:
        caps: dict[tuple[str, str], dict[str, Any]] = {}
        for keys, found in self._found.items():
            if keys[0] == "limits":
                whose = (keys[1], keys[2]) if len(keys) == 4 else ("", "")
                caps.setdefault(whose, {})[keys[-1]] = found.value
        of = {
            kind: {name: Caps(**given) for (table, name), given in caps.items() if table == kind}
            for kind in ("users", "groups")
        }
        return Limits(Caps(**caps.get(("", ""), {})), of["users"], of["groups"])


def load(
    *,
    machine_wide: bool = False,
    options: Mapping[Setting[Any], str | bool | None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """The settings in force. `options`: what was given on the command line; None: nothing."""
    environment = os.environ if environment is None else environment
    found = {
        setting.keys: _read(setting, setting.keys, setting.default_for(machine_wide), Source(Origin.DEFAULT))
        for setting in SETTINGS
    }
    for one in _from_file(machine_config_path(), Origin.MACHINE):
        if machine_wide or not one.setting.owner_only:
            found[one.keys] = one
    for one in () if machine_wide else _from_file(config_path(), Origin.USER):
        found[one.keys] = one
    for setting in SETTINGS:
        text = environment.get(setting.variable)
        if text is not None:
            found[setting.keys] = _read(setting, setting.keys, text, Source(Origin.ENVIRONMENT, setting.variable))
    for setting, given in (options or {}).items():
        if given is not None:
            option = Source(Origin.OPTION, f"--{setting.keys[-1]}")
            found[setting.keys] = _read(setting, setting.keys, given, option)
    return Settings(found, machine_wide)


def setting_of(keys: Keys) -> Setting[Any]:
    """The setting of that name; one that does not exist is refused, with the nearest that does."""
    where = keys[:-1]
    if where == ("limits",) or (len(where) == 3 and where[0] == "limits" and where[1] in ("users", "groups")):
        known = {(*where, cap.key): cap for cap in CAPS}
    else:
        known = {setting.keys: setting for setting in SETTINGS}
    if keys not in known:
        raise RequestRejected(_unknown(as_text(keys), [*map(as_text, known)]))
    return known[keys]


def _unknown(key: str, known: list[str]) -> str:
    # With underscores, as in Python, or with the table left out.
    near = difflib.get_close_matches(key.replace("_", "-"), known, n=1, cutoff=0.75)
    near = near or [one for one in known if one.rpartition(".")[2] == key.rpartition(".")[2].replace("_", "-")]
    advice = f"did you mean {near[0]}?" if near else "salus config lists those there are"
    return f"there is no setting {key}; {advice}"


def literal(setting: Setting[Any], text: str) -> str:
    """The value as it stands in a file. What the setting does not accept is refused."""
    setting.kind.parse(text)
    if setting.kind.bare:
        return text.strip()
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    if not escaped.isprintable():
        raise RequestRejected(f"{text!r:.60} has characters that do not print; expected {setting.kind.expected}")
    return f'"{escaped}"'


def _from_file(path: Path, origin: Origin) -> list[Found]:
    found = []
    for entry in read_entries(path):
        source = Source(origin, str(path), entry.line)
        if isinstance(entry.value, dict):
            continue  # a table with nothing in it
        try:
            setting = setting_of(entry.keys)
        except RequestRejected as error:
            raise RequestRejected(f"{source}: {error}") from None
        found.append(_read(setting, entry.keys, entry.value, source))
    return found


def _read(setting: Setting[Any], keys: Keys, given: object, source: Source) -> Found:
    if given is None:
        return Found(setting, keys, None, "", source)
    try:
        text = _as_written(setting, given)
        return Found(setting, keys, setting.kind.parse(text), text, source)
    except RequestRejected as error:
        raise RequestRejected(f"{_label(keys, source)}: {error}") from None


def _as_written(setting: Setting[Any], given: object) -> str:
    match given:
        case bool():
            return "true" if given else "false"
        case str():
            return given
        case int() | float():
            return str(given)
        case list() if all(isinstance(one, str | int) and not isinstance(one, bool) for one in given):
            return ",".join(map(str, given))
    raise RequestRejected(f"{given!r:.60} is not understood; expected {setting.kind.expected}")


def _label(keys: Keys, source: Source) -> str:
    in_file = source.line is not None
    return f"{source}: {as_text(keys)}" if in_file else str(source) if source.name else as_text(keys)
