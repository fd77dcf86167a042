"""The shape of the paper's results, on traces of its kind."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from salus.cli.simulate import auto_quantum
from salus.plugins import load_policy
from salus.simulate.engine import Hardware, Simulation
from salus.simulate.metrics import Summary, mean, summarize
from salus.simulate.trace import TraceJob, read_profile, read_trace
from salus.simulate.workloads import generate

SEEDS = range(5)
MEMORY = 16 * 2**30
DATA = Path(__file__).parent.parent.parent.parent / "shared" / "data"


def run(jobs: list[TraceJob], policy: str) -> Summary:
    hardware = Hardware(1, MEMORY, quantum_s=auto_quantum(jobs, 1))
    return summarize(Simulation(jobs, lambda: load_policy(policy), hardware).run())


@cache
def on_generated(policy: str, seed: int) -> Summary:
    return run(generate(100, seed=seed), policy)


def test_srtf_is_at_least_three_times_better_than_fifo_on_average_jct():
    ratios = [on_generated("fifo", seed).avg_jct_s / on_generated("srtf", seed).avg_jct_s for seed in SEEDS]
    assert mean(ratios) >= 3.0


@pytest.mark.parametrize("seed", SEEDS)
def test_fair_is_between_the_two(seed):
    fair = on_generated("fair", seed).avg_jct_s
    assert on_generated("srtf", seed).avg_jct_s < fair < on_generated("fifo", seed).avg_jct_s


@pytest.mark.parametrize("seed", SEEDS)
def test_pack_takes_no_longer_than_fifo_in_all(seed):
    assert on_generated("pack", seed).makespan_s <= on_generated("fifo", seed).makespan_s


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", ["srtf", "srtf:fill=off"])
def test_srtf_and_fifo_take_equally_long_in_all(policy, seed):
    fifo, srtf = on_generated("fifo", seed).makespan_s, on_generated(policy, seed).makespan_s
    assert srtf == pytest.approx(fifo, rel=0.03)


@pytest.mark.skipif(not DATA.is_dir(), reason="the public traces are not beside the checkout")
def test_the_order_of_the_policies_is_the_same_on_a_public_trace():
    profile = read_profile(DATA / "model-memory.csv")
    jobs = read_trace(DATA / "trace-60.csv", capacity_bytes=MEMORY, profile=profile, ignore_num_gpu=True)
    assert len(jobs) == 60
    jct = {policy: run(jobs, policy).avg_jct_s for policy in ("srtf", "fair", "pack", "fifo")}
    assert sorted(jct, key=jct.__getitem__) == ["srtf", "fair", "pack", "fifo"]
