"""Sizes and times as people write and read them: 16GiB, 500MB, 30m, 1h30m."""

from __future__ import annotations

import re

from salus.errors import RequestRejected

_SIZE_FACTORS = {
    "": 1,
    "b": 1,
    **{unit: 1000**n for n, unit in enumerate(("kb", "mb", "gb", "tb"), start=1)},
    **{unit: 1024**n for n, unit in enumerate(("kib", "mib", "gib", "tib"), start=1)},
    **{unit: 1024**n for n, unit in enumerate("kmgt", start=1)},
}
_TIME_FACTORS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LARGEST_BYTES = 2**62
LONGEST_S = 1000 * 365 * 86400.0
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)"


def parse_bytes(text: str) -> int:
    """'16GiB', '500 MB', '1024'. A bare k, m, g or t counts in powers of 1024, as GPU tools do."""
    match = re.fullmatch(_NUMBER + r"\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _SIZE_FACTORS:
        raise RequestRejected(f"{text!r} is not a size; write it like 16GiB, 500MB or 1024 (bytes)")
    size = float(match[1]) * _SIZE_FACTORS[match[2]]
    if size > LARGEST_BYTES:
        raise RequestRejected(f"{text:.40}... is more memory than there is; write it like 16GiB")
    return int(size)


def parse_duration(text: str) -> float:
    """'90', '1.5s', '30m', '1h30m'; a bare number is seconds."""
    compact = text.strip().lower().replace(" ", "")
    if re.fullmatch(_NUMBER + r"(e[+-]?\d+)?", compact):
        return _check_time(text, float(compact))
    parts = re.findall(_NUMBER + r"(ms|s|m|h|d)", compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        raise RequestRejected(f"{text!r} is not a time; write it like 90s, 30m, 1h30m or 200ms")
    return _check_time(text, sum(float(number) * _TIME_FACTORS[unit] for number, unit in parts))


def _check_time(text: str, seconds: float) -> float:
    if seconds > LONGEST_S:
        raise RequestRejected(f"{text:.40} is longer than a thousand years; write times like 90s, 30m or 1h30m")
    return seconds


def format_bytes(size: int | float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    unit = units[0]
    return f"{size:.0f} {unit}" if unit == "B" or float(size).is_integer() else f"{size:.1f} {unit}"


def format_duration(seconds: float) -> str:
    """Two units at most: 45.2 s, 12 m 30 s, 3 h 5 m, 2 d 4 h."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    for size, unit, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= size:
            whole, rest = divmod(int(seconds), size)
            return f"{whole} {unit} {rest // below} {small}"
    raise AssertionError(seconds)
