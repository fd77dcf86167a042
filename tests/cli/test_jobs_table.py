"""The table of jobs, in terminals of any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from salus.cli.jobs_table import jobs_table

ROW = {
    "id": "123",
    "name": "a-name-of-some-length",
    "user": "somebody",
    "state": "waiting",
    "wait_reason": "needs 600 MiB; 424 MiB of 1 GiB are free",
    "position": 2,
    "gpu": None,
    "device": "host",
    "lane": 7,
    "iterations": 1234,
    "gpu_time_s": 56.0,
    "persistent_bytes": 600 << 20,
    "ephemeral_bytes": 0,
    "finished_at": None,
    "exit_code": None,
}


def shown(width: int, **changes: object) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(jobs_table([ROW | changes], width))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [50, 60, 80, 100, 160])
def test_who_it_is_what_it_does_and_why_it_waits_are_there_in_any_terminal(width):
    lines = shown(width)
    assert all(len(line) <= width for line in lines)
    text = " ".join(" ".join(lines).split())
    assert "123" in text and "a-name" in text and "waiting" in text and "place 2: needs 600 MiB" in text


def test_where_there_is_room_nothing_is_left_out():
    assert "user" in shown(160)[0] and "ephemeral" in shown(160)[0]
    assert "a-name-of-some-length" in shown(160)[1]
    assert "user" not in shown(60)[0]


def test_a_column_without_anything_in_it_is_left_out():
    assert "why it waits" not in shown(160, wait_reason=None, position=None)[0]
    assert "share" not in shown(160)[0]


def test_an_end_shows_with_its_status_and_markup_in_a_name_is_none():
    (_, line) = shown(160, state="failed", exit_code=3, finished_at=1.0, name="[/x]")
    assert "failed (3)" in line and "[/x]" in line


def test_a_table_without_jobs_has_its_column_names_and_nothing_else():
    console = Console(file=io.StringIO(), width=80)
    console.print(jobs_table([], 80))
    assert console.file.getvalue().split() == ["id", "name", "state"]
