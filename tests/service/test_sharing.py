"""Real jobs in real processes share a device under a policy."""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from salus.bench.sharing import jain
from salus.plugins import load_policy
from salus.service.replay import replay
from tests.service.harness import crowd, eventually, finish

ONE_LANE = ("--ephemeral", "3GiB")
"""On a device of 4 GiB, all jobs with this share one lane."""


def shares(service, names: list[str], seconds: float = 3.0) -> dict[str, float]:
    """Device time that each job gets while all of them compete."""
    for name in names:
        service.when(name, "running", "ready")
    eventually(lambda: all(service.jobs()[name]["iterations"] > 3 for name in names), "all of them run")
    before = service.jobs()
    time.sleep(seconds)
    after = service.jobs()
    assert all(after[name]["finished_at"] is None for name in names), "they must not end while they are measured"
    return {name: after[name]["gpu_time_s"] - before[name]["gpu_time_s"] for name in names}


def test_three_jobs_in_one_lane_get_equal_shares_under_fair(serve):
    service = serve("--policy", "fair", "--capacity", "4GiB")
    names = ["a", "b", "c"]
    jobs = [service.job("--name", name, *ONE_LANE, iterations=100_000, seconds=0.005) for name in names]
    had = shares(service, names)
    assert jain(list(had.values())) >= 0.98, had
    assert {service.jobs()[name]["lane"] for name in names} == {1}
    for job in jobs:
        job.kill()


@pytest.mark.parametrize("options", [(), ONE_LANE], ids=["own lanes", "one lane"])
def test_weights_one_two_three_give_one_two_three(serve, options):
    service = serve("--policy", "fair", "--capacity", "4GiB")
    weights = {"a": 1, "b": 2, "c": 3}
    for name, weight in weights.items():
        service.job("--name", name, "--weight", str(weight), *options, iterations=100_000, seconds=0.005)
    had = shares(service, list(weights), seconds=4.0)
    total = sum(had.values())
    for name, weight in weights.items():
        assert had[name] / total == pytest.approx(weight / 6, rel=0.08, abs=0.015), had


def test_under_srtf_a_short_job_does_not_wait_for_a_long_one_and_under_fifo_it_does(serve):
    service = serve("--policy", "srtf", "--capacity", "4GiB")
    service.job("--name", "long", "--duration", "10m", *ONE_LANE, iterations=100_000, seconds=0.005)
    service.when("long", "running")
    finish(service.job("--name", "short", "--duration", "1s", *ONE_LANE, iterations=100, seconds=0.005))
    short = service.jobs()["short"]
    assert short["started_at"] - short["submitted_at"] < 5
    assert short["gpu_time_s"] > 0.9 * (short["finished_at"] - short["started_at"]) - 0.5, "it was never switched out"
    assert service.salus("policy", "fifo").stdout.startswith("the policy is fifo now")
    service.job("--name", "next", "--duration", "1s", *ONE_LANE, iterations=100, seconds=0.005)
    waiting = service.when("next", "ready")
    assert "runs in lane" in waiting["wait_reason"]
    before = service.jobs()["next"]["iterations"]
    time.sleep(0.5)
    assert service.jobs()["next"]["iterations"] == before == 0


def test_quantum_zero_switches_at_every_boundary(serve):
    service = serve("--policy", "rr", "--quantum", "0", "--capacity", "4GiB")
    finish(*(service.job("--name", name, *ONE_LANE, iterations=60, seconds=0.01) for name in "ab"))
    rows = service.jobs()
    assert [rows[name]["iterations"] for name in "ab"] == [60, 60]
    service.stop()
    granted = [a["job_id"] for line in service.decisions() for a in line["actions"] if a["kind"] == "GrantLease"]
    switches = sum(before != after for before, after in pairwise(granted))
    assert switches > 40, "while both run, every boundary is a switch"


def test_a_job_that_sits_between_iterations_does_not_keep_others_waiting(serve):
    service = serve("--policy", "fifo", "--capacity", "4GiB")
    service.job("--name", "sleepy", *ONE_LANE, iterations=1000, seconds=0.001, idle=30)
    service.when("sleepy", "running", "idle")
    finish(service.job("--name", "busy", *ONE_LANE, iterations=50, seconds=0.005))
    assert service.jobs()["sleepy"]["finished_at"] is None


def test_nor_does_one_that_begins_to_sit_after_they_took_turns(serve, tmp_path):
    service = serve("--policy", "rr", "--quantum", "200ms", "--capacity", "4GiB")
    script = tmp_path / "sits.py"
    script.write_text(service.job_file.read_text() + "time.sleep(60)\n")
    run = ("--", sys.executable, str(script), "150", "0.01")
    service.salus_in_background("run", "--name", "sits", *ONE_LANE, *run)
    finish(service.job("--name", "busy", *ONE_LANE, iterations=300, seconds=0.01))
    rows = service.jobs()
    assert rows["sits"]["finished_at"] is None and rows["sits"]["iterations"] == 150


def test_a_job_gives_its_lease_up_when_its_script_is_done_not_when_its_process_is_gone(serve, tmp_path):
    service = serve()
    script = tmp_path / "slow_end.py"
    # Taken apart at the very end, when no thread runs any more; a framework takes its time there too.
    slow = "import time\nclass Slow:\n    def __del__(self, sleep=time.sleep): sleep(20)\nslow = Slow()\n"
    script.write_text(slow + service.job_file.read_text())
    service.salus_in_background("run", "--name", "slow", "--", sys.executable, str(script), "3", "0.001")
    row = service.when("slow", "idle")
    assert row["iterations"] == 3 and row["finished_at"] is None


def test_a_command_that_was_seen_before_is_known_by_what_it_used_then(serve):
    service = serve("--policy", "srtf")
    command = ("--name", "again", "--persistent", "1GiB", "--ephemeral", "2GiB")
    finish(service.job(*command, iterations=30, seconds=0.002))
    again = service.job("--name", "again", iterations=30, seconds=0.002)
    row = eventually(lambda: next((r for r in _rows(service) if r["finished_at"] is None), None), "it runs again")
    assert (row["persistent_bytes"], row["ephemeral_bytes"]) == (2**30, 2**31)
    finish(again)


def _rows(service):
    with service.connect() as connection:
        return connection.jobs(everything=True)


def test_a_hundred_jobs_at_once_all_finish_and_their_journal_gives_the_same_actions_again(serve):
    service = serve("--policy", "fair", "--capacity", "6GiB")
    before = service.descriptors()
    crowd(service, 50)
    service.salus("policy", "srtf")
    crowd(service, 100)
    rows = _rows(service)
    assert len(rows) == 150
    assert all(row["iterations"] == 30 and row["exit_code"] == 0 for row in rows)
    eventually(lambda: service.descriptors() <= before + 1, "all descriptors are closed")
    lines = Path(f"/proc/{service.process.pid}/status").read_text().splitlines()
    peak_kb = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    assert peak_kb < 200_000
    service.stop()
    (journal,) = service.journals()
    (found,) = replay([journal], load_policy)
    assert found.difference is None
    assert found.events > 500
    told = service.salus("replay", str(journal))
    assert told.stdout.startswith(f"{found.run}: {found.events} events from 20")
    assert told.stdout.endswith(" give the same actions\n")


def test_a_journal_that_was_changed_is_found_out(serve):
    service = serve()
    crowd(service, 3)
    service.stop()
    (journal,) = service.journals()
    text = journal.read_text()
    journal.write_text(text.replace('"GrantLease"', '"RevokeLease"', 1))
    told = service.salus("replay", str(journal))
    assert "RevokeLease" in told.stderr and "now gives [['GrantLease'" in told.stderr
    assert told.returncode != 0
    journal.write_text("nonsense\n")
    told = service.salus("replay", str(journal))
    assert "1: is not a line of a journal" in told.stderr


def test_one_that_sits_gives_its_memory_up_for_a_job_that_waits_for_memory(serve, tmp_path):
    service = serve("--policy", "fifo", "--capacity", "4GiB")
    script = tmp_path / "sits.py"
    script.write_text(service.job_file.read_text() + "time.sleep(60)\n")
    own = ("--persistent", "3GiB")
    service.salus_in_background("run", "--name", "sits", *own, "--", sys.executable, str(script), "20", "0.005")
    service.when("sits", "running", "idle")
    finish(service.job("--name", "waits", *own, iterations=20, seconds=0.005))
    assert service.jobs()["sits"]["finished_at"] is None


def test_short_pauses_between_iterations_are_used_by_others(serve):
    service = serve("--policy", "fifo", "--capacity", "4GiB")
    service.job("--name", "pauses", *ONE_LANE, iterations=100_000, seconds=0.001, idle=0.03)
    service.when("pauses", "running", "idle")
    finish(service.job("--name", "busy", *ONE_LANE, iterations=100, seconds=0.005))
    assert service.jobs()["pauses"]["finished_at"] is None


def test_nor_does_one_whose_iterations_were_all_alike(serve, tmp_path):
    """Nobody sees any more where its iterations begin, and the helper still gives its lease up."""
    service = serve("--policy", "fifo", "--capacity", "4GiB")
    script = tmp_path / "alike.py"
    script.write_text(
        "import time, torch\n"
        "torch.set_num_threads(1)\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(200):\n"
        "    optimizer.zero_grad(); model(torch.ones(2, 8)).sum().backward(); optimizer.step()\n"
        "from salus.adaptors import torch as adaptor\n"
        "assert adaptor.installed().follows\n"
        "time.sleep(600)\n"
    )
    service.salus_in_background("run", "--name", "alike", *ONE_LANE, "--", sys.executable, str(script))
    service.when("alike", "running", "idle")
    eventually(lambda: service.jobs()["alike"]["iterations"] == 200, "all of its iterations")
    finish(service.job("--name", "busy", *ONE_LANE, iterations=50, seconds=0.005))
    assert service.jobs()["alike"]["finished_at"] is None


def test_those_that_run_on_and_pause_and_evaluate_now_and_then_all_come_to_their_end(serve, tmp_path):
    service = serve("--policy", "fair", "--capacity", "4GiB")
    script = tmp_path / "pauses.py"
    script.write_text(
        "import random, sys, time, torch\n"
        "torch.set_num_threads(1)\n"
        "torch.manual_seed(0)\n"
        "rng = random.Random(sys.argv[1])\n"
        "model, teacher = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8).eval()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for number in range(1500):\n"
        "    loss = model(torch.ones(2, 8)).square().sum(); loss.backward()\n"
        "    optimizer.step(); optimizer.zero_grad()\n"
        "    if rng.random() < 0.005:\n"
        "        time.sleep(rng.choice([0.01, 0.3]))\n"
        "    if rng.random() < 0.005:\n"
        "        with torch.no_grad():\n"
        "            for _ in range(50): teacher(torch.ones(2, 8))\n"
        "print(loss.item())\n"
    )
    jobs = [
        service.salus_in_background("run", "--name", name, *ONE_LANE, "--", sys.executable, str(script), name)
        for name in "abc"
    ]
    told = [job.communicate(timeout=60)[0].strip() for job in jobs]
    assert len(set(told)) == 1 and float(told[0]) >= 0, told
    rows = service.jobs()
    assert all(rows[name]["iterations"] >= 1500 for name in "abc")
    assert {rows[name]["exit_code"] for name in "abc"} == {0}
