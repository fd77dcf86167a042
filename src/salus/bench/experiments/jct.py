"""A queue of jobs of very different lengths: how long each takes from its arrival to its end, under each policy.

The jobs are a trace of the paper's kind (`salus simulate --generate`), shortened to what fits. How much a policy can
gain lies in the trace. So it is the first one on which, so shortened, SRTF would be about as far ahead of FIFO on a
perfect GPU as it was in the paper; by how much it is with the lengths that were measured is told with the result.

Each distinct model is measured alone first: how long an iteration takes, so that a job has as many as make it as long
as it should be, and how busy it keeps the GPU, which the simulator wants to know of jobs that run side by side.
One by one in the order of arrival, all at once as the driver slices time, all at once under MPS, and under Salus with
several policies. The paper: SRTF is 3.19 times better than FIFO. The same trace, simulated with the measured times,
must give about the same averages. How much jobs side by side get done depends on the GPU; the simulator is told it from
the side without Salus, time-slicing.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from salus.bench.experiment import Job, Ran, Say, Settings, Steps, at_once, has_mps, one_by_one
from salus.bench.models_of_paper import BATCHES, ON_THE_PROCESSOR
from salus.core.model import Footprint
from salus.errors import RequestRejected
from salus.plugins import load_policy
from salus.service.gpu import Nvml, choose
from salus.simulate.engine import Hardware, Simulation
from salus.simulate.metrics import summarize
from salus.simulate.trace import TraceJob
from salus.simulate.workloads import generate
from salus.units import parse_bytes

POLICIES = ("fifo", "srtf", "fair", "pack")
WORK_S = 90.0
"""Device time of all jobs together, at a scale of 1."""
SHORTEST = 3
FEWEST = 8
"""Jobs, of which one could be like the paper's."""
QUANTUM_S = 0.02
SIZES = ("small", "medium", "large")
"""As the trace names those of a model whose batches have no numbers there."""
ALONE_S = 1.5
TYPICAL_S = {"cuda": 0.05, "cpu": 0.005}
"""An iteration, before it has been measured."""
PARTS = 50
LIKE_THE_PAPERS = (3.25, 3.75)
"""How much better than FIFO SRTF is on a perfect GPU."""
SEEDS = 300
SIDE_BY_SIDE = (0.4, 2.5)
"""Between these the simulator's is looked for."""
TARGETS = {"srtf_to_one_by_one": 3.19, "simulated_off_by": 0.10}


def run(settings: Settings, steps: Steps, say: Say) -> dict[str, Any]:
    count = settings.jobs or (100 if settings.device == "cuda" else 12)
    trace = _trace(count, settings)
    kinds = [_kind(job.name, number, settings) for number, job in enumerate(trace)]
    say("each model alone")
    alone = [Job(f"{model}_{batch}", model, batch, SHORTEST, seconds=ALONE_S) for model, batch in dict.fromkeys(kinds)]
    measured = {
        one.name: one
        for one in steps.runs("alone", lambda: one_by_one(alone, settings.device, say, watch=True))
        if not one.failed
    }
    jobs = []
    for job, (model, batch) in zip(trace, kinds, strict=True):
        if f"{model}_{batch}" not in measured:
            continue
        iteration_s = measured[f"{model}_{batch}"].iteration_s
        iterations = max(SHORTEST, round(job.duration_s / iteration_s))
        jobs.append(
            Job(
                f"{job.job_id} {model}_{batch}", model, batch, iterations, job.submit_s,
                alone_s=iterations * iteration_s, ephemeral=settings.lane,
            )
        )  # fmt: skip
    if not jobs:
        raise RequestRejected("none of the models runs on this machine, not even alone; salus doctor may say why")
    loads = {job.name: measured[job.name.split()[-1]].busy for job in jobs}
    found: dict[str, Any] = {}
    found["one by one"] = _summary(steps.runs("one by one", lambda: one_by_one(jobs, settings.device, say)))
    found["time-slicing"] = _summary(steps.runs("time-slicing", lambda: at_once(jobs, settings.device, say)))
    if has_mps(settings.device):
        found["MPS"] = _summary(steps.runs("MPS", lambda: at_once(jobs, settings.device, say, mps=True)))
    together = _side_by_side(jobs, loads, found["time-slicing"])
    for policy in POLICIES:
        options = settings.service(policy)
        ran = steps.runs(policy, lambda options=options: at_once(jobs, settings.device, say, options))  # type: ignore[misc]
        found[policy] = {
            **_summary(ran),
            "simulated_avg_jct_s": _simulated(jobs, ran, policy, loads, together, settings),
        }
    base = found["one by one"]["avg_jct_s"]
    for row in found.values():
        row["times_better"] = base / row["avg_jct_s"] if base and row["avg_jct_s"] else None
    as_they_were = [TraceJob(job.name, job.arrives_s, 1, job.alone_s or 0.0, Footprint(0, 1)) for job in jobs]
    return {
        "jobs": len(jobs), "left_out": count - len(jobs), "possible": _possible(as_they_were), "loads": loads,
        "side_by_side": together, "sides": found, "targets": TARGETS,
    }  # fmt: skip


def _trace(count: int, settings: Settings) -> list[TraceJob]:
    """The jobs, as short as they will be: the first that are like the paper's, or else those that come closest."""
    closest: tuple[float, list[TraceJob]] | None = None
    for seed in range(1, SEEDS):
        trace = generate(count, seed=seed)
        shrink = WORK_S * settings.scale / sum(job.duration_s for job in trace)
        short = [
            replace(
                job, submit_s=job.submit_s * shrink, iterations=1,
                iteration_s=max(SHORTEST * TYPICAL_S[settings.device], job.duration_s * shrink),
            )
            for job in trace
        ]  # fmt: skip
        possible = _possible(short)
        off = max(LIKE_THE_PAPERS[0] - possible, possible - LIKE_THE_PAPERS[1], 0.0)
        if closest is None or off < closest[0]:
            closest = off, short
        # Of a few jobs, none may be like it.
        if not off or count < FEWEST:
            break
    assert closest is not None
    return closest[1]


def _possible(trace: list[TraceJob]) -> float:
    """How much better than FIFO SRTF would be if a GPU switched for nothing, at any time, and had endless memory."""

    def average_s(policy: str) -> float:
        # In so many parts, between which it can be preempted.
        light = [
            replace(job, iterations=PARTS, iteration_s=job.duration_s / PARTS, footprint=Footprint(0, 1))
            for job in trace
        ]
        perfect = Hardware(1, len(light) + 1, quantum_s=0.0, switch_s=0.0)
        return summarize(Simulation(light, lambda: load_policy(policy), perfect).run()).avg_jct_s

    return average_s("fifo") / average_s("srtf")


def _kind(name: str, number: int, settings: Settings) -> tuple[str, int]:
    if settings.device == "cpu":
        return ON_THE_PROCESSOR[number % len(ON_THE_PROCESSOR)], 64
    model, _, size = name.partition("_")
    return model, BATCHES[model][SIZES.index(size)] if size in SIZES else int(size)


def _summary(ran: list[Ran]) -> dict[str, Any]:
    done = [one for one in ran if not one.failed]
    jcts = [one.jct_s for one in done]
    return {
        "avg_jct_s": statistics.mean(jcts) if jcts else None,
        "p95_jct_s": sorted(jcts)[int(0.95 * (len(jcts) - 1))] if jcts else None,
        "makespan_s": max((one.ends_s[-1] for one in done), default=None),
        "jcts_s": jcts,
        "failed": len(ran) - len(done),
        "why": next((one.failed for one in ran if one.failed), None),
    }


def _side_by_side(jobs: list[Job], loads: dict[str, float | None], sliced: dict[str, Any]) -> float:
    """For the simulator: with how much of their work done together all at once take as long as they did."""
    if sliced["failed"] or not sliced["avg_jct_s"]:
        return 1.0
    trace = [
        TraceJob(
            str(number), job.arrives_s, job.iterations, (job.alone_s or 0.0) / job.iterations, Footprint(0, 1),
            load=loads[job.name],
        )
        for number, job in enumerate(jobs)
    ]  # fmt: skip

    def average_s(together: float) -> float:
        roomy = Hardware(1, len(trace) + 1, quantum_s=QUANTUM_S, side_by_side=together)
        return summarize(Simulation(trace, lambda: load_policy("pack"), roomy).run()).avg_jct_s

    low, high = SIDE_BY_SIDE
    while high - low > 0.005:
        middle = (low + high) / 2
        low, high = (middle, high) if average_s(middle) > sliced["avg_jct_s"] else (low, middle)
    return (low + high) / 2


def _simulated(
    jobs: list[Job],
    ran: list[Ran],
    policy: str,
    loads: dict[str, float | None],
    together: float,
    settings: Settings,
) -> float | None:
    """What the simulator says of the same jobs with the measured times and sizes; None where one failed."""
    if any(one.failed or (settings.lane is None and one.row is None) for one in ran):
        return None
    trace = [
        TraceJob(
            str(number), job.arrives_s, job.iterations, (job.alone_s or 0.0) / job.iterations, _size(one, settings),
            utilization=None if one.row is None else one.row["utilization"], load=loads[job.name],
        )
        for number, (job, one) in enumerate(zip(jobs, ran, strict=True))
    ]  # fmt: skip
    memory_bytes = parse_bytes(settings.capacity) if settings.capacity else _memory_bytes(settings.device)
    gpu = Hardware(1, memory_bytes, quantum_s=QUANTUM_S, side_by_side=together)
    outcome = Simulation(trace, lambda: load_policy(policy), gpu).run()
    return summarize(outcome).avg_jct_s


def _size(one: Ran, settings: Settings) -> Footprint:
    if settings.lane is not None:
        return Footprint(0, parse_bytes(settings.lane))
    assert one.row is not None
    return Footprint(one.row["persistent_bytes"], one.row["ephemeral_bytes"], one.row["internal_bytes"])


def _memory_bytes(device: str) -> int:
    gpu = choose(Nvml().gpus(), None) if device == "cuda" else None
    return parse_bytes("4GiB") if gpu is None else gpu.total_bytes - gpu.used_bytes


def verdicts(result: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    rows = []
    for side, row in result["sides"].items():
        if row["avg_jct_s"] is None:
            rows.append((side, f"none finished: {row['why']}", "", False))
            continue
        value = f"average {row['avg_jct_s']:.1f} s, {row['times_better']:.2f} times better than one by one"
        rows.append((side, value + (f", {row['failed']} failed" if row["failed"] else ""), "", True))
        simulated = row.get("simulated_avg_jct_s")
        if simulated is not None:
            off = abs(simulated / row["avg_jct_s"] - 1)
            target = TARGETS["simulated_off_by"]
            rows.append((f"{side}, simulated", f"{simulated:.1f} s, off by {off:.0%}", f"{target:.0%}", off <= target))
    better, target = result["sides"]["srtf"]["times_better"] or 0.0, TARGETS["srtf_to_one_by_one"]
    value = f"{better:.2f}; {result['possible']:.2f} with these jobs on a perfect GPU"
    rows.append(("srtf against one by one", value, f"at least {target}", better >= target))
    for side in ("time-slicing", "MPS"):
        other, ours = result["sides"].get(side), result["sides"]["srtf"]
        if other is not None and other["avg_jct_s"] and ours["avg_jct_s"]:
            ahead = other["avg_jct_s"] / ours["avg_jct_s"]
            rows.append((f"srtf against {side}, average JCT", f"{ahead:.2f}", "more than 1", ahead > 1))
    failed = sum(result["sides"][policy]["failed"] for policy in POLICIES)
    rows.append(("jobs that failed under Salus", str(failed), "0", failed == 0))
    return rows


def draw(result: dict[str, Any], path: Path) -> None:
    from salus.bench.plots import bars

    done = {side: row for side, row in result["sides"].items() if row["avg_jct_s"] is not None}
    keys = {"average JCT": "avg_jct_s", "95 % JCT": "p95_jct_s", "makespan": "makespan_s"}
    bars(path, {label: {side: row[key] for side, row in done.items()} for label, key in keys.items()}, "seconds")
