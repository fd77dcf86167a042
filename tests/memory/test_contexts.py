"""Jobs whose processes take memory that no arena knows of, as on a GPU; seen by a made-up NVML."""

from __future__ import annotations

import sys

import pytest

from tests.memory.test_lanes_across_processes import JOB
from tests.service.harness import SOURCE, eventually, finish

SIZES = ((2, 2), (8, 4), (18, 6), (32, 8))


@pytest.mark.parametrize("policy", ["rr:patience=0.2", "pack"])
def test_jobs_that_grow_while_their_contexts_are_seen_all_finish(serve, policy, monkeypatch):
    monkeypatch.setenv("SALUS_TEST_CONTEXT_MIB", "640")
    options = ("--policy", policy, "--capacity", "5400MiB", "--host-memory", "2GiB")
    service = serve(*options, module="tests.service.with_nvml")
    go = service.folder / "go"
    jobs = []
    for number in range(8):
        sizes = map(str, SIZES[number % len(SIZES)])
        command = [sys.executable, str(JOB.parent / "training_job.py"), str(SOURCE), str(go), *sizes, "100"]
        jobs.append(service.salus_in_background("run", "--name", f"j{number}", "--", *command))
    eventually(lambda: sum(bool(row["pid"]) for row in service.jobs().values()) == 8, "all are there", 60)
    go.touch()
    finish(*jobs)
    rows = service.jobs().values()
    assert {row["iterations"] for row in rows} == {100}
    assert sum(row["internal_bytes"] >= 500 << 20 for row in rows) >= 4, "the contexts of most were seen"
