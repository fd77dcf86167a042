"""Real processes share real memory on the host device, through the real service and the real C code."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.service.harness import SOURCE, Service, eventually

JOB = Path(__file__).parent / "arena_job.py"


def start(service: Service, name: str, iterations: int, seed: int, *options: str, prefix: list[str] | None = None):
    go = str(service.folder / "go")
    command = [*(prefix or []), sys.executable, str(JOB), str(SOURCE), name, str(iterations), str(seed), go]
    return service.salus_in_background("run", "--name", name, *options, "--", *command)


def finish(service: Service, *jobs) -> list[int]:
    """Lets them go once all are there. How often each was given a lease."""

    def all_are_there() -> bool:
        rows = service.jobs(everything=False).values()
        return len(rows) >= len(jobs) and all(row["pid"] for row in rows)

    if not (service.folder / "go").exists():
        eventually(all_are_there, "all are attached")
        (service.folder / "go").touch()
    leases = []
    for job in jobs:
        output, errors = job.communicate(timeout=100)
        assert job.returncode == 0, errors
        leases.append(int(output.split()[-1]))
    return leases


def test_three_jobs_in_one_lane_never_see_or_lose_a_byte(serve):
    service = serve("--policy", "rr", "--quantum", "0", "--capacity", "520MiB")
    options = ("--persistent", "100MiB", "--ephemeral", "200MiB")
    jobs = [start(service, f"j{seed}", 150, seed, *options) for seed in (1, 2, 3)]
    leases = finish(service, *jobs)
    assert min(leases) > 50, "they switched at nearly every boundary"
    status = service.status()
    assert status["free_bytes"] == status["capacity_bytes"]
    assert status["lane_chunks"] == 0


def test_jobs_that_declare_nothing_grow_as_they_need(serve):
    service = serve("--policy", "fair", "--quantum", "2ms", "--capacity", "2GiB")
    finish(service, *(start(service, f"j{seed}", 100, seed) for seed in (1, 2, 3)))
    rows = service.jobs()
    for seed in (1, 2, 3):
        assert rows[f"j{seed}"]["persistent_bytes"] >= 2 << 20
        assert rows[f"j{seed}"]["ephemeral_bytes"] >= 2 << 20


def test_a_killed_job_leaves_no_chunk_behind(serve):
    service = serve("--policy", "rr", "--quantum", "0", "--capacity", "520MiB")
    before = service.descriptors()
    options = ("--persistent", "100MiB", "--ephemeral", "200MiB")
    victim = start(service, "victim", 100_000, 1, *options)
    other = start(service, "other", 400, 2, *options)
    for name in ("victim", "other"):
        eventually(lambda name=name: service.jobs().get(name, {}).get("pid"), f"{name} is attached")
    (service.folder / "go").touch()
    for name in ("victim", "other"):
        eventually(lambda name=name: service.jobs().get(name, {}).get("iterations", 0) > 20, f"{name} runs")
    victim_pid = service.jobs()["victim"]["pid"]
    os.kill(victim_pid, signal.SIGKILL)
    finish(service, other)
    victim.communicate(timeout=20)
    eventually(lambda: service.status()["lane_chunks"] == 0, "all chunks are let go of")
    eventually(lambda: service.descriptors() <= before + 1, "no descriptor is left")
    status = service.status()
    assert status["free_bytes"] == status["capacity_bytes"]


def test_a_job_that_waits_for_its_first_memory_has_room_made_for_it(serve):
    """The first ones spread out over lanes of their own, and nothing is left for the persistent memory of others."""
    service = serve("--policy", "rr", "--quantum", "0", "--capacity", "520MiB")
    memory = ("--persistent", "50MiB", "--ephemeral", "100MiB")
    jobs = []
    for seed in range(1, 7):
        jobs.append(start(service, f"j{seed}", 60, seed, *memory))
        eventually(lambda seed=seed: service.jobs().get(f"j{seed}", {}).get("pid"), "it is attached")
    for seed in range(1, 7):
        eventually(lambda seed=seed: service.jobs()[f"j{seed}"]["persistent_bytes"] > 0, f"j{seed} has memory")
    finish(service, *jobs)
    status = service.status()
    assert status["free_bytes"] == status["capacity_bytes"]


def test_when_the_service_dies_one_job_keeps_the_lane_and_the_others_take_memory_of_their_own(serve):
    service = serve("--policy", "rr", "--quantum", "0", "--capacity", "520MiB")
    service.environment["SALUS_RECONNECT_S"] = "0.3"
    memory = ("--persistent", "100MiB", "--ephemeral", "200MiB")
    jobs = [start(service, f"j{seed}", 3000, seed, *memory) for seed in (1, 2, 3)]
    for seed in (1, 2, 3):
        eventually(lambda seed=seed: service.jobs().get(f"j{seed}", {}).get("pid"), "it is attached")
    (service.folder / "go").touch()
    eventually(lambda: min(row["iterations"] for row in service.jobs().values()) > 20, "all of them run")
    service.process.kill()
    for job in jobs:
        output, errors = job.communicate(timeout=100)
        assert job.returncode == 0 and output.startswith("finished"), errors
        assert "goes on unmanaged" in errors


def how_often(service: Service, action: str) -> int:
    """In the journal, which is whole once the service has ended."""
    service.stop()
    return sum(one["kind"] == action for line in service.decisions() for one in line["actions"])


def has_bytes(service: Service, name: str) -> int:
    return service.jobs().get(name, {}).get("persistent_bytes", 0)


@pytest.mark.parametrize("policy", ["rr:patience=0.5", "fair:patience=0.5", "srtf"])
def test_jobs_that_do_not_fit_together_are_paged_and_all_finish(serve, policy, monkeypatch):
    monkeypatch.setenv("ARENA_JOB_PRIVATE_MIB", "96")
    monkeypatch.setenv("ARENA_JOB_ITERATION_S", "0.01")
    service = serve("--policy", policy, "--quantum", "10ms", "--capacity", "420MiB", "--host-memory", "2GiB")
    sizes = ("--persistent", "150MiB", "--ephemeral", "120MiB")
    # Under srtf, those that come later are shorter.
    jobs = []
    for n in range(1, 6):
        jobs.append(start(service, f"j{n}", 60, n, *sizes, "--duration", f"{9 - n}s"))
        eventually(lambda n=n: f"j{n}" in service.jobs(), "it is registered")
    finish(service, *jobs)
    status = service.status()
    assert status["free_bytes"] == status["capacity_bytes"]
    assert status["paged_out_bytes"] == status["lane_chunks"] == 0
    assert how_often(service, "PageOut") >= 1


def test_jobs_that_declare_nothing_grow_into_one_another_and_all_finish(serve, monkeypatch):
    monkeypatch.setenv("ARENA_JOB_PRIVATE_MIB", "96")
    monkeypatch.setenv("ARENA_JOB_ITERATION_S", "0.01")
    service = serve("--policy", "fair", "--quantum", "10ms", "--capacity", "420MiB", "--host-memory", "2GiB")
    jobs = [start(service, f"j{seed}", 60, seed) for seed in range(1, 6)]
    # All five at once would need more than there is: those that wait for the others to come go to the host.
    for seed in range(1, 6):
        eventually(lambda seed=seed: has_bytes(service, f"j{seed}") >= 96 << 20, "it has its memory")
    finish(service, *jobs)
    assert how_often(service, "PageOut") >= 1


def test_a_job_that_had_to_step_aside_to_grow_comes_back_when_there_is_room(serve):
    service = serve("--policy", "fair", "--capacity", "320MiB", "--host-memory", "2GiB")
    script = str(JOB.parent / "growing_job.py")

    def grows(name: str, blocks: int, seconds: float):
        command = [sys.executable, script, str(SOURCE), str(blocks), str(seconds)]
        return service.salus_in_background("run", "--name", name, "--", *command)

    # One that cannot be moved, and another that needs more than it leaves.
    stays = grows("stays", 12, 8.0)
    eventually(lambda: has_bytes(service, "stays") >= 192 << 20, "it has its memory")
    wants = grows("wants", 12, 0.0)
    for job in (stays, wants):
        output, errors = job.communicate(timeout=60)
        assert job.returncode == 0 and "finished" in output, errors
    assert how_often(service, "PageOut") >= 1


SITS = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from host_memory import MIB, HostMemory
from salus.client.lease import of_this_process
lease, memory = of_this_process(), HostMemory()
assert lease.attach(memory)
memory.arena.alloc("private", 200 * MIB)
lease.begin()
lease.end()
threading.Event().wait(float(sys.argv[2]))
print("finished")
"""


def test_one_that_sits_there_with_a_lease_nobody_wants_makes_room_for_a_job_that_loads(serve):
    service = serve("--policy", "fair", "--capacity", "400MiB", "--host-memory", "2GiB")
    helpers = str(JOB.parent)
    sits = service.salus_in_background("run", "--name", "sits", "--", sys.executable, "-c", SITS, helpers, "15")
    eventually(lambda: service.jobs().get("sits", {}).get("iterations"), "it has run")
    command = [sys.executable, str(JOB.parent / "growing_job.py"), str(SOURCE), "14", "0"]
    loads = service.salus_in_background("run", "--name", "loads", "--", *command)
    output, errors = loads.communicate(timeout=60)
    assert loads.returncode == 0 and "finished" in output, errors
    assert service.jobs()["sits"]["finished_at"] is None, "it did not have to end for that"
    assert service.jobs()["sits"]["paged_out_bytes"] > 0
    assert sits.wait(timeout=60) == 0


def test_a_job_that_loads_more_than_is_free_pages_nobody_out_who_runs(serve, monkeypatch):
    monkeypatch.setenv("ARENA_JOB_PRIVATE_MIB", "96")
    monkeypatch.setenv("ARENA_JOB_ITERATION_S", "0.005")
    service = serve("--policy", "fair", "--capacity", "400MiB", "--host-memory", "2GiB")
    runs = start(service, "runs", 500, 1, "--persistent", "140MiB", "--ephemeral", "100MiB")
    eventually(lambda: has_bytes(service, "runs") >= 96 << 20, "it has its memory")
    (service.folder / "go").touch()
    service.when("runs", "running")
    command = [sys.executable, str(JOB.parent / "growing_job.py"), str(SOURCE), "14", "0"]
    loads = service.salus_in_background("run", "--name", "loads", "--", *command)
    eventually(lambda: "more memory" in (service.jobs().get("loads", {}).get("wait_reason") or ""), "it waits")
    before = service.jobs()["runs"]
    eventually(lambda: service.jobs()["runs"]["iterations"] > before["iterations"] + 20, "the other goes on")
    now = service.jobs()["runs"]
    assert (now["lane"], now["paged_out_bytes"]) == (before["lane"], 0)
    finish(service, runs)
    output, errors = loads.communicate(timeout=60)
    assert loads.returncode == 0 and "finished" in output, errors


HOLDER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from host_memory import MIB, HostMemory
from salus.client.lease import of_this_process
lease, memory = of_this_process(), HostMemory()
assert lease is not None and lease.attach(memory)
kept = None
while not os.path.exists(sys.argv[3] + "-ends"):
    if sys.argv[2] == "rests" and os.path.exists(sys.argv[3] + "-rests"):
        time.sleep(0.01)
        continue
    lease.begin()
    block = memory.arena.alloc("lane", 8 * MIB)
    if sys.argv[2] == "takes" and kept is None and os.path.exists(sys.argv[3] + "-takes"):
        kept = block
        memory.live[kept] = 8 * MIB
        print("took", flush=True)
    else:
        memory.arena.free("lane", block, 8 * MIB)
    lease.end()
    time.sleep(0.002)
"""


def chunks_of(pid: int) -> set[str]:
    """Inodes of the memory of lanes, and what was taken from them, that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:salus-chunk" in line}


def test_what_a_job_took_for_itself_does_not_stay_mapped_in_one_that_rests(serve, tmp_path):
    service = serve("--policy", "rr", "--quantum", "0", "--capacity", "520MiB")
    script, go = tmp_path / "job.py", str(tmp_path / "go")
    script.write_text(HOLDER)
    run = [sys.executable, str(script), str(JOB.parent)]
    names = ("rests", "takes", "runs")
    jobs = {
        name: service.salus_in_background(
            "run", "--name", name, "--persistent", "100MiB", "--ephemeral", "200MiB", "--", *run, name, go
        )
        for name in names
    }
    pids = {
        name: eventually(lambda name=name: (row := service.jobs().get(name)) and row["iterations"] and row["pid"], name)
        for name in names
    }
    eventually(lambda: len({row["lane"] for row in service.jobs().values()}) == 1, "they share a lane")
    Path(go + "-rests").touch()
    service.when("rests", "idle")
    had = chunks_of(pids["rests"])
    assert had
    Path(go + "-takes").touch()
    assert jobs["takes"].stdout.readline() == "took\n"

    def is_let_go() -> bool:
        taken = (chunks_of(pids["takes"]) & had) - chunks_of(pids["runs"])
        return bool(taken) and not taken & chunks_of(pids["rests"])

    eventually(is_let_go, "the one that rests has let go of it")
    Path(go + "-ends").touch()
    for job in jobs.values():
        assert job.wait(timeout=20) == 0


UNFETCHED = """
import sys, time
sys.path.insert(0, sys.argv[1])
from host_memory import MIB, HostMemory
from salus.client.arena import STAYS
from salus.client.lease import of_this_process
from salus.protocol import messages as msg

class Stays(HostMemory):
    def leave(self, word, ticket, wants_more):
        return STAYS, 0

lease, memory = of_this_process(), Stays()
assert lease.attach(memory)
lease._send(msg.Ready())
time.sleep(3)
lease.begin()
print("finished", memory.resumed)
"""


def test_one_that_got_a_lease_it_did_not_fetch_looks_at_the_lane_before_it_runs_there(serve):
    """Its helper gives such a lease back; and if it could not leave the lane, it still has not entered it."""
    service = serve("--policy", "fifo")
    helpers = str(JOB.parent)
    unfetched = service.salus_in_background("run", "--name", "u", "--", sys.executable, "-c", UNFETCHED, helpers)
    eventually(lambda: service.jobs().get("u", {}).get("pid"), "it is there")
    other = service.job("--name", "other", iterations=200, seconds=0.005)
    output, errors = unfetched.communicate(timeout=30)
    assert output == "finished 1\n", errors
    assert other.wait(timeout=30) == 0
