"""What a simulated history amounts to, in the paper's measures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from salus.simulate.engine import Outcome


@dataclass(frozen=True, slots=True)
class Summary:
    makespan_s: float
    """From the first submission to the last end."""
    avg_queuing_s: float
    """Queuing is the time from a job's submission to its first iteration."""
    avg_jct_s: float
    """A job's completion time is counted from its submission."""
    p95_jct_s: float
    utilization: float
    """The part of the GPUs' time from the first submission to the last end in which they were kept busy."""
    jobs: int

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)


def summarize(outcome: Outcome) -> Summary:
    records = outcome.records
    begin = min(record.job.submit_s for record in records)
    makespan = max(record.finished_s for record in records) - begin
    jcts = [record.jct_s for record in records]
    return Summary(
        makespan_s=makespan,
        avg_queuing_s=mean(record.queuing_s for record in records),
        avg_jct_s=mean(jcts),
        p95_jct_s=percentile(jcts, 0.95),
        utilization=outcome.busy_s / (makespan * outcome.hardware.gpus) if makespan > 0 else 0.0,
        jobs=len(records),
    )


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest value that at least this fraction of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]
