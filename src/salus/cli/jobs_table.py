"""The table of jobs, of `ps` and `top`: as many columns as there is room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.table import Table
from rich.text import Text

from salus.units import format_bytes, format_duration

WHY = "why it waits"
NUMBERS = ("share", "iterations", "device time", "persistent", "ephemeral")
LEAVE_FIRST = ("ephemeral", "persistent", "user", "lane", "device time", "gpu", "iterations", "share")
"""Where there is not enough room; the others stay."""
STYLES = {"●": "green", "○": "yellow"}
GAP = 2
LEAST_REASON, LEAST_NAME = 24, 8
"""Letters of a reason, which may go on in the next line, and of a name."""


def jobs_table(
    rows: Sequence[dict[str, Any]], width: int, also: Mapping[str, Mapping[str, str]] = MappingProxyType({})
) -> Table:
    """`also`: by job, what `top` adds to its row."""
    several = len({row["device"] for row in rows}) > 1
    return _fitted([{**_cells(row, several=several), **also.get(row["id"], {})} for row in rows], width)


def why_it_waits(row: dict[str, Any]) -> str:
    """With its place in the queue for memory, if it is in there."""
    reason = row["wait_reason"] or ""
    return reason if row["position"] is None else f"place {row['position']}: {reason}"


def device_name(row: dict[str, Any]) -> str:
    return str(row["device"]) if row["gpu"] is None else str(row["gpu"])


def _cells(row: dict[str, Any], *, several: bool) -> dict[str, str]:
    ended = f" ({row['exit_code']})" if row["finished_at"] is not None and row["exit_code"] else ""
    return {
        "": "",
        "id": row["id"],
        "name": row["name"],
        "user": row["user"],
        "state": row["state"] + ended,
        # Which device, only where that is a question.
        **({"gpu": device_name(row)} if several else {}),
        "lane": "" if row["lane"] is None else str(row["lane"]),
        "share": "",
        "iterations": f"{row['iterations']:,}",
        "device time": format_duration(row["gpu_time_s"]),
        "persistent": format_bytes(row["persistent_bytes"]),
        "ephemeral": format_bytes(row["ephemeral_bytes"]),
        WHY: why_it_waits(row),
    }


def _fitted(rows: Sequence[Mapping[str, str]], width: int) -> Table:
    # A column in which nothing is written is left out.
    widths = {
        column: max([len(column), *(len(row[column]) for row in rows)])
        for column in (rows[0] if rows else ("id", "name", "state"))
        if not rows or any(row[column] for row in rows)
    }

    def needed() -> int:
        least = {"name": LEAST_NAME, WHY: LEAST_REASON}
        return sum(min(size, least.get(column, size)) + GAP for column, size in widths.items()) - GAP

    for column in LEAVE_FIRST:
        if needed() > width:
            widths.pop(column, None)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in widths:
        table.add_column(column, justify="right" if column in NUMBERS else "left", no_wrap=column != WHY)
    longest_name = max(LEAST_NAME, width - needed() + LEAST_NAME)
    for row in rows:
        # Not strings: what looks like markup in a name is none.
        cells = {column: Text(row[column], style=STYLES.get(row[column], "")) for column in widths}
        cells["name"].truncate(longest_name, overflow="ellipsis")
        table.add_row(*cells.values())
    return table
