"""What another user of the machine may see: totals that are right, and nothing of whose jobs they are."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from salus.cli.top import Look, screen
from salus.registry import FILE
from tests.service.harness import SOURCE, Service, eventually

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
ALICE, BOB = 54321001, 54321002
SECRET = "zebra-project"
FIRST_ID = 987650

RUNS_AS = """
import os, sys
sys.path.insert(0, sys.argv[1])
# Before: the source may be in a folder that others cannot read.
import encodings.idna, json, socket, threading, time
from pathlib import Path
from salus import __version__
from salus.client.connection import ServiceConnection
from salus.client.lease import Lease
from salus.protocol import messages as msg
uid, folder = int(sys.argv[2]), sys.argv[3]
os.setgroups([]); os.setgid(uid); os.setuid(uid)
os.environ["HOME"] = folder
os.chdir(folder)
"""
JOB = (
    RUNS_AS
    + """
name, seconds, size = sys.argv[5], float(sys.argv[6]), int(sys.argv[7])
path = Path(sys.argv[4])
launcher = ServiceConnection(path, None)
job = launcher.request(msg.Register(name, [name + "-command", "--rate", "0.1"], folder, persistent_bytes=size,
                                    weight=float(sys.argv[8])))
lease = Lease(path, job.job_id, job.token)
end = time.monotonic() + seconds
while time.monotonic() < end:
    lease.begin()
    until = time.perf_counter() + 0.004
    while time.perf_counter() < until:
        pass
    lease.end()
launcher.send(msg.Finished(0))
while not isinstance(launcher.receive()[0], msg.Done):
    pass
"""
)
STRANGER = (
    RUNS_AS
    + """
# Every byte that is sent to this connection goes to stdout.
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[4])
sock.settimeout(1.0)
victim = sys.argv[5]
questions = [
    msg.Hello(msg.VERSION, __version__), msg.ListJobs(), msg.ListJobs(True), msg.GetStatus(),
    msg.GetUsage(["user", "day", "job"]), msg.GetUsage(["user"]),
    msg.SetPolicy("fifo"), msg.Stop(),
    msg.Register("mine", ["x"], "/", persistent_bytes=1 << 60),
    msg.Register("mine", ["x"], "/", persistent_bytes=3 << 30),
]
for question in questions:
    sock.send(msg.encode(question))
    try:
        while True:
            sys.stdout.write(sock.recv(1 << 20).decode() + "\\n")
    except TimeoutError:
        pass
# Whether there is a job of that number must not show: an answer that names it is the same for one that is nobody's.
answers = []
for number in (victim, "987999"):
    for question in (msg.CancelJob(number), msg.AwaitJob(number), msg.CancelJob(number, True)):
        sock.send(msg.encode(question))
        answers.append(sock.recv(1 << 20).decode().replace(number, "N"))
assert answers[:3] == answers[3:], answers
"""
)


@pytest.fixture
def machine() -> Iterator[Callable[..., Service]]:
    """A service in a folder that others can reach, whose next job has a number that is not found by chance."""
    folder = Path(tempfile.mkdtemp(prefix="salus-test-"))
    folder.chmod(0o755)
    services = []

    def start(*options: str) -> Service:
        service = Service(folder, "--users", "all", *options)
        services.append(service)
        with sqlite3.connect(folder / "state" / FILE) as database:
            database.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('jobs', ?)", (FIRST_ID,))
        return service

    yield start
    for service in services:
        service.stop()
    shutil.rmtree(folder)


def home(service: Service, name: str, uid: int) -> Path:
    folder = service.folder / name
    if not folder.exists():
        folder.mkdir()
        os.chown(folder, uid, uid)
    return folder


def run_as(service: Service, code: str, uid: int, name: str, *arguments: object) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(SOURCE), str(uid), str(home(service, name, uid)), str(service.socket),
         *map(str, arguments)],
        env={**service.environment, "SALUS_SOCKET": str(service.socket), "SALUS_STATE_DIR": str(service.folder / name)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    service.started.append(process)
    return process


def job_of(service: Service, uid: int, name: str, seconds: float, gib: float = 1.0, weight: float = 1.0):
    return run_as(service, JOB, uid, f"home-of-{name}", name, seconds, int(gib * 2**30), weight)


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output


@needs_root
@pytest.mark.parametrize("options", [(), ("--share-lanes-between-users",)], ids=["own lanes", "shared lanes"])
def test_nothing_of_another_user_s_job_is_in_any_byte_that_a_stranger_is_sent(machine, options):
    service = machine("--capacity", "4GiB", *options)
    victim = job_of(service, ALICE, SECRET, 600, gib=2)
    row = service.when(SECRET, "running", "ready")
    own = job_of(service, BOB, "own", 600, gib=0.5)
    service.when("own", "running", "ready")
    assert int(row["id"]) >= FIRST_ID
    heard = finish(run_as(service, STRANGER, BOB, "home-of-own", row["id"]))
    assert '"type":"status"' in heard and '"name":"own"' in heard, "it was answered"
    for what in (row["id"], SECRET, "zebra", str(ALICE), str(victim.pid), str(row["pid"]), "home-of-zebra"):
        assert what not in heard, f"{what} is in {heard}"
    for process in (victim, own):
        os.killpg(process.pid, signal.SIGKILL)


@needs_root
def test_a_stranger_sees_the_whole_s_memory_and_shares_as_totals_and_the_administrator_sees_the_jobs(machine):
    service = machine("--capacity", "8GiB", "--policy", "fair:by=user")
    jobs = [job_of(service, ALICE, f"{SECRET}{number}", 600) for number in range(2)]
    jobs.append(job_of(service, BOB, "own", 600, gib=0.5))
    for name in (f"{SECRET}0", f"{SECRET}1", "own"):
        service.when(name, "running", "ready")
    looks = RUNS_AS + (
        "connection = ServiceConnection(Path(sys.argv[4]))\n"
        "print(json.dumps(connection.request(msg.GetStatus()).status))\n"
    )

    def seen_by_bob() -> dict:
        return json.loads(finish(run_as(service, looks, BOB, "home-of-own")))

    others = eventually(
        lambda: (found := seen_by_bob()["others"])["share"] and found["share"] < 0.75 and found, "shares are known"
    )
    assert others["jobs"] == 2 and others["memory_bytes"] == 2 << 30
    assert others["share"] > 0.25 and others["gpu_time_s"] > 0
    status = service.status()
    assert status["others"]["jobs"] == 0 and status["jobs"] == 3
    twice = RUNS_AS + (
        "connection = ServiceConnection(Path(sys.argv[4]))\n"
        "for _ in range(2):\n"
        "    time.sleep(1)\n"
        "    print(json.dumps([connection.request(msg.GetStatus()).status, connection.jobs()]))\n"
    )
    before, after = (
        SimpleNamespace(status=status, jobs=jobs, used_s=dict, used_by_others_s=dict)
        for status, jobs in map(json.loads, finish(run_as(service, twice, BOB, "home-of-own")).splitlines())
    )
    for look in (before, after):
        look.used_s, look.used_by_others_s = partial(Look.used_s, look), partial(Look.used_by_others_s, look)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(screen(before, after, 200))
    shown = console.export_text()
    assert "others: 2 jobs, 2 GiB, " in shown and SECRET not in shown
    (own,) = (line for line in shown.splitlines() if " own " in line and "%" in line)
    assert "100%" not in own, "its share is of the whole, not of what bob sees"
    for process in jobs:
        os.killpg(process.pid, signal.SIGKILL)


@needs_root
def test_three_jobs_of_one_user_and_one_of_another_get_half_each_by_the_service_s_own_account(machine):
    service = machine("--capacity", "8GiB", "--policy", "fair:by=user", "--quantum", "5ms")
    jobs = [job_of(service, ALICE, f"alice{number}", 600, weight=1000) for number in range(3)]
    jobs.append(job_of(service, BOB, "bob", 600))
    names = ("alice0", "alice1", "alice2", "bob")
    for name in names:
        service.when(name, "running", "ready")

    def had() -> dict[str, float]:
        rows = service.jobs()
        return {name: rows[name]["gpu_time_s"] for name in names}

    before = had()

    def since() -> dict[str, float]:
        return {name: now - before[name] for name, now in had().items()}

    found = eventually(lambda: (gained := since()) and sum(gained.values()) > 12 and gained, "12 s of it", 120)
    alice, bob = sum(found[name] for name in names[:3]), found["bob"]
    assert alice / (alice + bob) == pytest.approx(0.5, abs=0.02), found
    assert max(found[name] for name in names[:3]) < 2 * min(found[name] for name in names[:3])
    for process in jobs:
        os.killpg(process.pid, signal.SIGKILL)
