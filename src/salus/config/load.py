"""The settings in force: every value, and where it comes from.

Settings come from five places, and a later one wins:

    default  <  machine's file  <  user's file  <  environment  <  option on the command line

- The machine-wide service reads no user's file: what an administrator has set cannot be undone by a user.
- A setting with `owner_only` (who may use a service, and their limits) is taken from the file of whoever runs the
  service: from the machine's file for the machine-wide service alone, from the user's file for a user's own.
"""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from salus.config.file import Keys, as_text, read_entries
from salus.config.schema import CAPS, SETTINGS, Caps, Limits, Setting
from salus.errors import RequestRejected
from salus.paths import config_path, machine_config_path

T = TypeVar("T")


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

    def source_of(self, keys: Keys) -> Source:
        """The same, also of a limit."""
        return self._found[keys].source

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


@contextlib.contextmanager
def naming(settings: Settings, setting: Setting[Any]) -> Iterator[None]:
    """What is wrong with a setting's value is said with where the value comes from."""
    try:
        yield
    except RequestRejected as error:
        raise RequestRejected(f"{settings.label(setting)}: {error}") from None


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
