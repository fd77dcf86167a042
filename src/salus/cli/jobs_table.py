"""The table of jobs, of `ps` and `top`: the columns that were chosen, or as many as there is room for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rich.table import Table
from rich.text import Text

from salus.units import format_bytes, format_duration

Row = dict[str, Any]
STYLES = {"●": "green", "○": "yellow"}
GAP = 2


@dataclass(frozen=True)
class Column:
    cell: Callable[[Row], str]
    key: Callable[[Row], Any]
    """What rows are sorted by; None: this row has nothing there."""
    title: str = ""
    """Default: the column's name."""
    right: bool = False
    shrinks_to: int = 0
    """It may be this narrow; 0: as wide as what is in it."""
    wraps: bool = False


def why_it_waits(row: Row) -> str:
    """With its place in the queue for memory, if it is in there."""
    reason = row["wait_reason"] or ""
    return reason if row["position"] is None else f"place {row['position']}: {reason}"


def device_name(row: Row) -> str:
    return str(row["device"]) if row["gpu"] is None else str(row["gpu"])


def elapsed_s(row: Row) -> float | None:
    """From the first lease to the end, or to now."""
    if row.get("started_at") is None:
        return None
    until = row["finished_at"] if row["finished_at"] is not None else time.time()
    return max(0.0, float(until - row["started_at"]))


def _text(name: str, **more: Any) -> Column:
    return Column(lambda row: _shown(row.get(name)), lambda row: row.get(name), **more)


def _bytes(name: str, **more: Any) -> Column:
    return Column(lambda row: format_bytes(row.get(name, 0)), lambda row: row.get(name, 0), right=True, **more)


def _shown(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _state(row: Row) -> str:
    ended = f" ({row['exit_code']})" if row["finished_at"] is not None and row["exit_code"] else ""
    return str(row["state"]) + ended


def _elapsed(row: Row) -> str:
    seconds = elapsed_s(row)
    return "" if seconds is None else format_duration(seconds)


COLUMNS: dict[str, Column] = {
    "id": Column(lambda row: row["id"], lambda row: int(row["id"])),
    "name": _text("name", shrinks_to=8),
    "user": _text("user"),
    "state": Column(_state, lambda row: row["state"]),
    "gpu": Column(device_name, device_name),
    "lane": _text("lane"),
    "iterations": Column(lambda row: f"{row['iterations']:,}", lambda row: row["iterations"], right=True),
    "device-time": Column(
        lambda row: format_duration(row["gpu_time_s"]), lambda row: row["gpu_time_s"], "device time", right=True
    ),
    "elapsed": Column(_elapsed, elapsed_s, right=True),
    "weight": _text("weight", right=True),
    "priority": _text("priority", right=True),
    "persistent": _bytes("persistent_bytes"),
    "ephemeral": _bytes("ephemeral_bytes"),
    "internal": _bytes("internal_bytes"),
    "pid": _text("pid", right=True),
    "why": Column(why_it_waits, why_it_waits, "why it waits", shrinks_to=24, wraps=True),
    "command": _text("command", shrinks_to=20),
}
"""All that there are, by the name that `--columns` takes."""
MARK, SHARE = "", "share"
"""Columns of `top` alone."""
_OF_TOP = {MARK: Column(str, str), SHARE: Column(str, str, right=True)}
USUAL = (
    MARK, "id", "name", "user", "state", "gpu", "lane", SHARE, "iterations", "device-time", "elapsed", "weight",
    "priority", "persistent", "ephemeral", "pid", "why", "command",
)  # fmt: skip
LEFT_OUT_FIRST = (
    "command", "pid", "ephemeral", "persistent", "user", "lane", "elapsed", "device-time", "weight", "priority", "gpu",
    "iterations", SHARE,
)  # fmt: skip
"""Where there is not enough room; the others stay."""


def jobs_table(
    rows: Sequence[Row],
    width: int,
    also: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    columns: Sequence[str] | None = None,
) -> Table:
    """`also`: by job, what `top` adds to its row. `columns`: those that the user chose."""
    names = _usual(rows, also) if columns is None else columns
    cells = [
        {name: also.get(row["id"], {}).get(name, "") if name in _OF_TOP else COLUMNS[name].cell(row) for name in names}
        for row in rows
    ]
    if columns is None:
        # A column in which nothing is written is left out.
        names = [name for name in names if name in ("id", "name", "state") or any(row[name] for row in cells)]
    widths = {name: max([len(_title(name)), *(len(row[name]) for row in cells)]) for name in names}
    if columns is None:
        if sum(_least(widths)) + widths.get("why", 0) - COLUMNS["why"].shrinks_to > width:
            # Why a job waits is read more often than its command.
            widths.pop("command", None)
        for name in LEFT_OUT_FIRST:
            if sum(_least(widths)) > width:
                widths.pop(name, None)
    return _table(cells, _shrunk(widths, width))


def _usual(rows: Sequence[Row], also: Mapping[str, Mapping[str, str]]) -> list[str]:
    nothing_to_tell = {
        "gpu": len({row["device"] for row in rows}) < 2,
        "weight": all(row.get("weight", 1) == 1 for row in rows),
        "priority": all(row.get("priority", 0) == 0 for row in rows),
        # They say nothing about who gets how much.
        "pid": bool(also),
        "command": bool(also),
    }
    return [name for name in USUAL if not nothing_to_tell.get(name)]


def _title(name: str) -> str:
    return name if name in _OF_TOP else COLUMNS[name].title or name


def _column(name: str) -> Column:
    return _OF_TOP.get(name) or COLUMNS[name]


def _least(widths: Mapping[str, int]) -> list[int]:
    """What each column takes at least, with the gap after it; the last one has none."""
    least = [min(size, _column(name).shrinks_to or size) + GAP for name, size in widths.items()]
    return [*least[:-1], least[-1] - GAP] if least else []


def _shrunk(widths: Mapping[str, int], width: int) -> dict[str, int]:
    """The width of each column. What is left is given to those that need more, from left to right."""
    found = {name: min(size, _column(name).shrinks_to or size) for name, size in widths.items()}
    left = width - sum(found.values()) - GAP * (len(found) - 1)
    for name, size in widths.items():
        more = min(max(0, left), size - found[name])
        found[name] += more
        left -= more
    return found


def _table(rows: Sequence[Mapping[str, str]], widths: Mapping[str, int]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for name, size in widths.items():
        column = _column(name)
        table.add_column(
            _title(name),
            justify="right" if column.right else "left",
            no_wrap=not column.wraps,
            overflow="fold" if column.wraps else "ellipsis",
            max_width=size,
        )
    for row in rows:
        # Not strings: what looks like markup in a name is none.
        cells = [Text(row[name], style=STYLES.get(row[name], "")) for name in widths]
        for cell, (name, size) in zip(cells, widths.items(), strict=True):
            if _column(name).shrinks_to and not _column(name).wraps:
                cell.truncate(size, overflow="ellipsis")
        table.add_row(*cells)
    return table
