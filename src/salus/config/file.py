"""One settings file in TOML: its entries with the lines they stand on, and changes that leave the rest as it is.

It knows nothing of which settings exist (`salus.config` does). An edit touches one line: comments, order and spacing of
everything else stay. The edited text is parsed again before it is written; where the result would not be the old
settings with this one change, nothing is written and the user is asked to edit the file.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from salus.errors import RequestRejected

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Keys = tuple[str, ...]
"""A setting's place: ("service", "policy") is `policy` in the table [service]."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Entry:
    keys: Keys
    value: Any
    """As TOML has it."""
    line: int
    """From 1."""


@dataclass(frozen=True)
class _Statement:
    """A table's header, or a key with its value."""

    first: int
    last: int
    """Indexes of lines."""
    table: Keys
    """The table it opens, or stands in."""
    is_header: bool
    entries: tuple[tuple[Keys, Any], ...] = ()


def as_text(keys: Keys) -> str:
    """As in TOML, and as a user writes it: service.policy, limits.users."a.b".jobs."""
    return ".".join(key if _BARE_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False) for key in keys)


def parse_keys(text: str) -> Keys:
    try:
        ((keys, _),) = _leaves(tomllib.loads(f"{text} = 0"))
    except (tomllib.TOMLDecodeError, ValueError):
        raise RequestRejected(f"{text!r:.60} is no name of a setting; write it like service.policy") from None
    return keys


def read_entries(path: Path) -> list[Entry]:
    """Every setting in the file, in its order; none where there is no file."""
    text = _read(path)
    _parse(path, text)
    return [
        Entry(keys, value, statement.first + 1)
        for statement in _statements(text)
        for keys, value in statement.entries
    ]  # fmt: skip


def set_value(path: Path, keys: Keys, literal: str) -> None:
    """Writes one setting. `literal`: its value as TOML has it. Makes the file, and its folder, where there is none."""
    text = _read(path)
    wanted = _parse(path, text)
    _put(wanted, keys, tomllib.loads(f"x = {literal}")["x"], path)
    lines = text.split("\n")
    statements = _statements(text)
    found = _find(statements, keys)
    if found is not None:
        if found.first != found.last:
            raise _for_a_person(path, keys)
        lines[found.first] = _with_value(lines[found.first], literal)
    else:
        line = f"{as_text(keys[-1:])} = {literal}"
        in_table = [one for one in statements if one.table == keys[:-1]]
        if in_table:
            lines.insert(in_table[-1].last + 1, line)
        else:
            while lines and not lines[-1].strip():
                del lines[-1]
            lines += [*([""] if lines else []), f"[{as_text(keys[:-1])}]", line, ""]
    _write_checked(path, lines, wanted, keys)


def remove_value(path: Path, keys: Keys) -> bool:
    """Takes one setting out. False: it is not in there."""
    text = _read(path)
    wanted = _parse(path, text)
    found = _find(_statements(text), keys)
    if found is None:
        return False
    table = wanted
    for key in keys[:-1]:
        table = table[key]
    del table[keys[-1]]
    lines = text.split("\n")
    del lines[found.first : found.last + 1]
    _write_checked(path, lines, wanted, keys)
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except UnicodeDecodeError:
        raise RequestRejected(f"{path}: is not text in UTF-8; settings are written in TOML") from None
    except OSError as error:
        raise RequestRejected(f"{path}: the settings cannot be read ({error.strerror})") from None


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        fault = re.fullmatch(r"(.*) \(at (?:line (\d+), column \d+|end of document)\)", str(error))
        last = len(text.splitlines())
        what, line = (fault[1], fault[2] or last) if fault is not None else (str(error), last)
        raise RequestRejected(f"{path}:{line}: this is not TOML: {what}; write settings like key = value") from None


def _leaves(table: dict[str, Any], before: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*before, key))
        else:
            yield (*before, key), value


def _statements(text: str) -> list[_Statement]:
    """Of a text that is TOML."""
    lines = text.split("\n")
    found: list[_Statement] = []
    table: Keys = ()
    first = 0
    while first < len(lines):
        last = first
        stripped = lines[first].strip()
        if stripped.startswith("["):
            table, _ = next(_leaves(tomllib.loads(lines[first])))
            found.append(_Statement(first, last, table, True))
        elif stripped and not stripped.startswith("#"):
            while (parsed := _try_to_parse("\n".join(lines[first : last + 1]))) is None:
                last += 1
            entries = tuple((table + keys, value) for keys, value in _leaves(parsed))
            found.append(_Statement(first, last, table, False, entries))
        first = last + 1
    return found


def _try_to_parse(text: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _find(statements: list[_Statement], keys: Keys) -> _Statement | None:
    """The statement that says this and nothing else."""
    return next((one for one in statements if [found for found, _ in one.entries] == [keys]), None)


def _put(table: dict[str, Any], keys: Keys, value: Any, path: Path) -> None:
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise RequestRejected(f"{path}: {key} has a value there, and should be a table; edit the file")
    table[keys[-1]] = value


def _with_value(line: str, literal: str) -> str:
    """The line with another value; what is before it and the comment behind it stay."""
    for equals in (at for at, sign in enumerate(line) if sign == "="):
        if _try_to_parse(f"{line[:equals]}= 0") is None:
            continue  # it is within a quoted key
        rest = line[equals + 1 :]
        for hash_sign in (at for at, sign in enumerate(rest) if sign == "#"):
            if _try_to_parse(f"x = {rest[:hash_sign]}") is not None:
                value = rest[:hash_sign]
                gap = value[len(value.rstrip()) :]
                return f"{line[: equals + 1]} {literal}{gap}{rest[hash_sign:]}"
        return f"{line[: equals + 1]} {literal}"
    return line


def _write_checked(path: Path, lines: list[str], wanted: dict[str, Any], keys: Keys) -> None:
    text = "\n".join(lines)
    if _without_empty_tables(_try_to_parse(text)) != _without_empty_tables(wanted):
        raise _for_a_person(path, keys)
    _write(path, text)


def _for_a_person(path: Path, keys: Keys) -> RequestRejected:
    return RequestRejected(f"{path}: {as_text(keys)} is written there in a way that cannot be changed safely; edit it")


def _without_empty_tables(table: dict[str, Any] | None) -> dict[str, Any] | None:
    if table is None:
        return None
    table = copy.deepcopy(table)
    for key, value in list(table.items()):
        if isinstance(value, dict):
            table[key] = _without_empty_tables(value)
            if not table[key]:
                del table[key]
    return table


def _write(path: Path, text: str) -> None:
    """All of it or nothing. A link stays one: many keep their settings in another folder."""
    target = path.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            os.replace(name, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise RequestRejected(f"{path}: the settings cannot be written ({error.strerror})") from None
