"""Sizes and times as people write and read them: 16GiB, 500MB, 30m, 1h30m, 1 hour 30 min."""

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
_TIME_UNITS = (
    # The sign for micro, and the Greek letter that looks the same.
    (1e-6, ("us", "\N{MICRO SIGN}s", "\N{GREEK SMALL LETTER MU}s")),
    (1e-3, ("ms",)),
    (1.0, ("s", "sec", "secs", "second", "seconds")),
    (60.0, ("m", "min", "mins", "minute", "minutes")),
    (3600.0, ("h", "hr", "hrs", "hour", "hours")),
    (86400.0, ("d", "day", "days")),
)
_TIME_FACTORS = {unit: factor for factor, units in _TIME_UNITS for unit in units}
GIB = 2**30
HOUR_S = 3600.0
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
    """'90', '1.5s', '30m', '1h30m', '1 hour 30 min', '50us'; a bare number is seconds."""
    compact = text.strip().lower().replace(" ", "")
    if re.fullmatch(_NUMBER + r"(e[+-]?\d+)?", compact):
        return _check_time(text, float(compact))
    parts = re.findall(_NUMBER + r"([^\W\d_]+)", compact)
    whole = "".join(number + unit for number, unit in parts) == compact
    if not parts or not whole or any(unit not in _TIME_FACTORS for _, unit in parts):
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
    """Two units at most: 50 us, 45.2 s, 12 m 30 s, 3 h 5 m, 2 d 4 h."""
    if 0 < seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    for size, unit, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if seconds >= size:
            whole, rest = divmod(int(seconds), size)
            return f"{whole} {unit} {rest // below} {small}"
    raise AssertionError(seconds)
