from __future__ import annotations

import pytest

from salus.errors import RequestRejected
from salus.units import format_bytes, format_duration, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024),
        ("16GiB", 16 * 2**30),
        ("500MB", 500_000_000),
        (" 1.5 gib ", 3 * 2**29),
        ("2g", 2 * 2**30),
        ("0", 0),
    ],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1.5s", 1.5),
        ("30m", 1800),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("200ms", 0.2),
        ("2d", 172800),
        ("1e-05", 1e-5),
        ("50us", 5e-5),
        ("50 \N{MICRO SIGN}s", 5e-5),
        ("50\N{GREEK SMALL LETTER MU}s", 5e-5),
        ("1 sec", 1),
        ("2secs", 2),
        ("1 second", 1),
        ("90 seconds", 90),
        ("1min", 60),
        ("2 mins", 120),
        ("1 minute", 60),
        ("30 minutes", 1800),
        ("1hr", 3600),
        ("2 hrs", 7200),
        ("1hour 30min", 5400),
        ("1.5 Hours", 5400),
        ("1day 1s", 86401),
        ("2 days", 172800),
    ],
)
def test_times_are_read_as_people_write_them(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "many", "-1", "5 parsecs", "GiB", "1h30", "h", "1 fortnight", "1hour30", "1_000s", "9" * 400]
)
def test_what_is_neither_gets_one_line_with_examples(text):
    if not text.endswith("30"):
        with pytest.raises(RequestRejected, match="16GiB"):
            parse_bytes(text)
    with pytest.raises(RequestRejected, match="1h30m"):
        parse_duration(text)


def test_sizes_and_times_are_written_short():
    assert [format_bytes(size) for size in (0, 1023, 2**20, 1.5 * 2**30, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1 MiB",
        "1.5 GiB",
        "3 TiB",
    ]
    assert [format_duration(s) for s in (0, 5e-5, 0.02, 45.25, 750, 11_100, 187_200)] == [
        "0 ms",
        "50 us",
        "20 ms",
        "45.2 s",
        "12 m 30 s",
        "3 h 5 m",
        "2 d 4 h",
    ]
