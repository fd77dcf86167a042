"""Traces: the jobs of a simulation, and the CSV files they come from.

Two kinds of file are read, told apart by their columns; both are documented in docs/simulator.md.
- Salus's own: job_id, submit_time, duration (or iterations with iteration_time), persistent, ephemeral, and as you like
  internal, utilization, weight, priority, user, user_weight, name.
- A cluster trace that names a model and no sizes: job_id, num_gpu, submit_time, iterations, model_name, duration. The
  sizes come from a profile (workload, persistent_mb, ephemeral_mb), or else from the built-in catalogue.

Bad input is one `TraceError`: file, row, column, what is there and what is expected.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from salus.core.model import Footprint, JobSpec
from salus.errors import RequestRejected
from salus.simulate.workloads import CATALOGUE, Workload, pick_workload
from salus.units import format_bytes, parse_bytes, parse_duration

OWN_COLUMNS = (
    "job_id", "submit_time", "duration", "iterations", "iteration_time", "persistent", "ephemeral", "internal",
    "utilization", "weight", "priority", "user", "user_weight", "name", "num_gpu",
)  # fmt: skip
CLUSTER_COLUMNS = (
    "job_id", "submit_time", "duration", "iterations", "iteration_time", "model_name", "num_gpu", "utilization",
    "weight", "priority", "user", "user_weight",
)  # fmt: skip
WITHOUT_MEANING = ("interval", "expect_time_list", "expect_value_list", "best_effort", "job_type")
"""Columns of public cluster traces that say nothing about what is simulated. They are passed over."""
PROFILE_COLUMNS = ("workload", "persistent_mb", "ephemeral_mb", "utilization")
DEFAULT_ITERATION_S = 0.25
"""Where a trace gives a duration and no iterations."""

T = TypeVar("T")


class TraceError(RequestRejected):
    """A file that cannot be read as a trace or a profile."""

    code = "bad-trace"


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A job as it would be if it ran alone."""

    job_id: str
    submit_s: float
    iterations: int
    iteration_s: float
    footprint: Footprint
    utilization: float | None = None
    """None: not known to the scheduler, and taken to be the whole GPU by the simulated one."""
    weight: float = 1.0
    priority: int = 0
    name: str = ""
    user: str = ""
    owner: int = 0
    """The user's number; 0 where the trace names no user."""
    user_weight: float = 1.0
    load: float | None = None
    """What it really takes of the GPU, where that is something else."""

    @property
    def duration_s(self) -> float:
        return self.iterations * self.iteration_s

    def spec(self) -> JobSpec:
        return JobSpec(
            job_id=self.job_id,
            footprint=self.footprint,
            owner=self.owner,
            owner_weight=self.user_weight,
            priority=self.priority,
            weight=self.weight,
            length_s=self.duration_s,
            iterations=self.iterations,
            utilization=self.utilization,
        )


class _Row:
    """One row of a CSV file, which knows where it stands."""

    def __init__(self, file: Path, number: int, line: int, cells: Mapping[str, str]) -> None:
        self._file, self._number, self._line, self._cells = file, number, line, cells

    def error(self, column: str, problem: str) -> TraceError:
        text = f"{self._file}:{self._line}: row {self._number}, column {column}: {problem}"
        return TraceError(" ".join(text.split()))

    def has(self, column: str) -> bool:
        return bool(self._cells.get(column, ""))

    def get(self, column: str, parse: Callable[[str], T], default: T | None = None) -> T:
        text = self._cells.get(column, "")
        if not text:
            if default is not None:
                return default
            raise self.error(column, "is empty; expected a value")
        try:
            return parse(text)
        except RequestRejected as error:
            raise self.error(column, str(error)) from None


def read_trace(
    path: Path,
    *,
    capacity_bytes: int,
    profile: Mapping[str, Workload] | None = None,
    ignore_num_gpu: bool = False,
) -> list[TraceJob]:
    """The jobs of a trace file, sorted by submit time; every one of them could run alone in `capacity_bytes`."""
    columns, rows = _read_csv(path, "a trace")
    by_model = "model_name" in columns and "persistent" not in columns
    needed = ["job_id", "submit_time"]
    needed += ["model_name"] if by_model else ["persistent", "ephemeral"]
    _require_columns(path, columns, needed)
    if by_model:
        _refuse_unknown(path, columns, CLUSTER_COLUMNS, WITHOUT_MEANING)
    else:
        _refuse_unknown(path, columns, OWN_COLUMNS)
    if "duration" not in columns and not {"iterations", "iteration_time"} <= set(columns):
        raise TraceError(f"{path}: column duration is missing; expected it, or both iterations and iteration_time")
    workloads = CATALOGUE if profile is None else profile
    first_row: dict[str, int] = {}
    owners: dict[str, int] = {"": 0}
    user_weights: dict[str, float] = {}
    jobs = []
    for number, row in enumerate(rows, start=1):
        job_id = row.get("job_id", _text)
        if job_id in first_row:
            raise row.error("job_id", f"{job_id!r} is the id of row {first_row[job_id]} already; expected a new one")
        first_row[job_id] = number
        if not ignore_num_gpu and row.get("num_gpu", _count, 1) != 1:
            raise row.error(
                "num_gpu",
                f"job {job_id} asks for {row.get('num_gpu', _count)} GPUs; expected 1 "
                "(--ignore-num-gpu treats every job as a one-GPU job)",
            )
        job = _job(row, job_id, workloads if by_model else None, capacity_bytes)
        if user_weights.setdefault(job.user, job.user_weight) != job.user_weight:
            raise row.error(
                "user_weight", f"user {job.user or '(none)'} has {user_weights[job.user]:g} above; expected the same"
            )
        jobs.append(replace(job, owner=owners.setdefault(job.user, len(owners))))
    jobs.sort(key=lambda job: job.submit_s)
    return jobs


def read_profile(path: Path) -> dict[str, Workload]:
    """Workloads by name: what each needs in memory, as it was measured."""
    columns, rows = _read_csv(path, "a profile")
    _require_columns(path, columns, ["workload", "persistent_mb", "ephemeral_mb"])
    _refuse_unknown(path, columns, PROFILE_COLUMNS)
    profile: dict[str, Workload] = {}
    for row in rows:
        name = row.get("workload", _text)
        if name in profile:
            raise row.error("workload", f"{name!r} is there twice; expected each workload once")
        known = CATALOGUE.get(name) or pick_workload(CATALOGUE, name.partition("_")[0])
        profile[name] = Workload(
            name=name,
            persistent_bytes=int(row.get("persistent_mb", _not_negative) * 1e6),
            ephemeral_bytes=int(row.get("ephemeral_mb", _not_negative) * 1e6),
            utilization=row.get("utilization", _fraction, known.utilization if known else 1.0),
            iteration_s=known.iteration_s if known else DEFAULT_ITERATION_S,
        )
    return profile


def write_trace(path: Path, jobs: Iterable[TraceJob]) -> None:
    """Writes a trace in Salus's own format, to look at, change and run again."""
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(
            [
                "job_id",
                "submit_time",
                "iterations",
                "iteration_time",
                "persistent",
                "ephemeral",
                "internal",
                "utilization",
                "weight",
                "priority",
                "user",
                "user_weight",
                "name",
            ]
        )
        for job in jobs:
            memory = job.footprint
            out.writerow(
                [
                    job.job_id,
                    job.submit_s,
                    job.iterations,
                    job.iteration_s,
                    memory.persistent_bytes,
                    memory.ephemeral_bytes,
                    memory.internal_bytes,
                    "" if job.utilization is None else job.utilization,
                    job.weight,
                    job.priority,
                    job.user,
                    job.user_weight,
                    job.name,
                ]
            )


def _job(row: _Row, job_id: str, workloads: Mapping[str, Workload] | None, capacity_bytes: int) -> TraceJob:
    if workloads is not None:
        model = row.get("model_name", _text)
        workload = workloads.get(model) or pick_workload(workloads, model)
        if workload is None:
            raise row.error(
                "model_name", f"nothing is known of {model!r}; expected a workload of the profile (--profile)"
            )
        footprint = Footprint(workload.persistent_bytes, workload.ephemeral_bytes)
        sizes = "model_name"
        utilization: float | None = row.get("utilization", _fraction, workload.utilization)
        name = workload.name
    else:
        footprint = Footprint(
            row.get("persistent", parse_bytes), row.get("ephemeral", parse_bytes), row.get("internal", parse_bytes, 0)
        )
        sizes = "persistent"
        utilization = row.get("utilization", _fraction) if row.has("utilization") else None
        name = row.get("name", _text, "")
    if footprint.total_bytes > capacity_bytes:
        needs = format_bytes(footprint.total_bytes)
        raise row.error(sizes, f"job {job_id} needs {needs}; expected at most the GPU's {format_bytes(capacity_bytes)}")
    iterations, iteration_s = _length(row)
    return TraceJob(
        job_id=job_id,
        submit_s=row.get("submit_time", parse_duration),
        iterations=iterations,
        iteration_s=iteration_s,
        footprint=footprint,
        utilization=utilization,
        weight=row.get("weight", _positive, 1.0),
        priority=row.get("priority", _whole, 0),
        user=row.get("user", _text, ""),
        user_weight=row.get("user_weight", _positive, 1.0),
        name=name,
    )


def _length(row: _Row) -> tuple[int, float]:
    """Iterations and the time of each, from whichever columns there are."""
    if row.has("iterations"):
        iterations = row.get("iterations", _count)
        if row.has("duration"):
            return iterations, row.get("duration", _positive_time) / iterations
        return iterations, row.get("iteration_time", _positive_time)
    duration_s = row.get("duration", _positive_time)
    iterations = max(1, round(duration_s / row.get("iteration_time", _positive_time, DEFAULT_ITERATION_S)))
    return iterations, duration_s / iterations


def _read_csv(path: Path, what: str) -> tuple[list[str], list[_Row]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            lines = [(reader.line_num, [cell.strip() for cell in line]) for line in reader if any(map(str.strip, line))]
    except FileNotFoundError:
        raise TraceError(f"{path}: there is no such file; expected {what} in CSV") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}); expected {what} in CSV") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: is not CSV text ({error}); expected {what} in CSV") from None
    if not lines:
        raise TraceError(f"{path}: is empty; expected {what} in CSV: a line of column names, then a row for each")
    columns = lines[0][1]
    for column in columns:
        if columns.count(column) > 1:
            raise TraceError(f"{path}:1: column {column} is there twice; expected each column once")
    rows = []
    for number, (line, cells) in enumerate(lines[1:], start=1):
        if len(cells) != len(columns):
            raise TraceError(f"{path}:{line}: row {number} has {len(cells)} columns; expected {len(columns)}")
        rows.append(_Row(path, number, line, dict(zip(columns, cells, strict=True))))
    if not rows:
        raise TraceError(f"{path}: has column names and no rows; expected at least one row")
    return columns, rows


def _require_columns(path: Path, columns: list[str], needed: list[str]) -> None:
    for column in needed:
        if column not in columns:
            raise TraceError(
                f"{path}:1: column {column} is missing; expected {', '.join(needed)}; found {', '.join(columns)}"
            )


def _refuse_unknown(path: Path, columns: list[str], known: tuple[str, ...], passed_over: tuple[str, ...] = ()) -> None:
    """A misspelled column would silently mean nothing."""
    for column in columns:
        if column not in (*known, *passed_over):
            raise TraceError(f"{path}:1: column {column!r} is not known; known are: {', '.join(known)}")


def _number(text: str, expected: str, good: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        raise RequestRejected(f"{text!r} is not a number; expected {expected}") from None
    if not good(value):
        raise RequestRejected(f"{text} is out of range; expected {expected}")
    return value


def _text(text: str) -> str:
    return text


def _not_negative(text: str) -> float:
    return _number(text, "a number, 0 or more", lambda value: 0 <= value < float("inf"))


def _positive(text: str) -> float:
    return _number(text, "a number above 0", lambda value: 0 < value < float("inf"))


def _fraction(text: str) -> float:
    return _number(text, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def _count(text: str) -> int:
    return int(_number(text, "a whole number, 1 or more", lambda value: value >= 1 and value.is_integer()))


def _whole(text: str) -> int:
    return int(_number(text, "a whole number", lambda value: value.is_integer()))


def _positive_time(text: str) -> float:
    value = parse_duration(text)
    if value <= 0:
        raise RequestRejected(f"{text} is out of range; expected a time above 0")
    return value
