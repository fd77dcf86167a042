"""Deaths, hostile messages and bad surroundings: they end what they must and nothing else."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest

from salus.errors import RequestRejected, ServiceUnavailable
from salus.protocol import messages as msg
from salus.protocol.errors import NoSuchJob, VersionMismatch
from tests.service.harness import SOURCE, eventually, finish

ONE_LANE = ("--ephemeral", "3GiB")


SOCKETS: list[socket.socket] = []


@pytest.fixture(autouse=True)
def _close_sockets():
    yield
    while SOCKETS:
        SOCKETS.pop().close()


def raw(service) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    SOCKETS.append(sock)
    sock.settimeout(5)
    sock.connect(str(service.socket))
    return sock


def ends(sock: socket.socket) -> bool:
    """The service closes the connection, after a last word or without."""
    try:
        while sock.recv(1 << 17):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize("moment", ["running", "waiting", "yielding"])
def test_a_job_that_is_killed_frees_its_lane_at_once_and_leaves_nothing_behind(serve, moment):
    service = serve("--policy", "fair", "--capacity", "4GiB", "--quantum", "5ms")
    before = service.descriptors()
    victim = service.job("--name", "victim", *ONE_LANE, iterations=100_000, seconds=0.004)
    other = service.job("--name", "other", *ONE_LANE, iterations=300, seconds=0.002)
    for name in ("victim", "other"):
        eventually(lambda name=name: service.jobs().get(name, {}).get("pid"), f"{name} is attached")
    rng = random.Random(moment)
    if moment == "running":
        eventually(lambda: service.jobs()["victim"]["state"] == "running", "it runs")
    elif moment == "waiting":
        eventually(lambda: service.jobs()["victim"]["state"] == "ready", "it waits")
    else:
        time.sleep(rng.uniform(0.05, 0.15))
    os.kill(service.jobs()["victim"]["pid"], signal.SIGKILL)
    finish(other)
    assert victim.wait(timeout=10) == 128 + signal.SIGKILL
    assert service.jobs()["victim"]["exit_code"] == -signal.SIGKILL
    eventually(lambda: service.descriptors() <= before + 1, "its descriptors are closed")
    status = service.status()
    assert status["lanes"] == []
    assert status["free_bytes"] == status["capacity_bytes"]


@pytest.mark.parametrize(
    "packet",
    [
        b"not json",
        b'{"type":"hello","version":1,"salus":"x","uid":0}',
        b'{"type":"ready"}',
        b'{"type":"finished","exit_code":0}',
        b'{"type":"hello"',
        b"x" * 100_000,
    ],
)
def test_a_wrong_message_ends_that_connection_and_no_other(serve, packet):
    service = serve()
    with service.connect() as bystander:
        sock = raw(service)
        sock.send(packet)
        assert ends(sock)
        assert bystander.jobs() == []


def test_ten_megabytes_are_not_even_sent(serve):
    service = serve()
    sock = raw(service)
    with pytest.raises(OSError, match="too long"):
        sock.send(b"x" * 10_000_000)


def test_another_s_job_cannot_be_claimed(serve):
    service = serve()
    service.job("--name", "mine", iterations=100_000, seconds=0.005)
    row = service.when("mine", "running")
    with service.connect() as connection:
        connection.send(msg.Attach(row["id"], "0" * 32))
        with pytest.raises(NoSuchJob, match="that this process belongs to"):
            connection.receive()
        connection.send(msg.Yielded(True))
        with pytest.raises(msg.ProtocolError, match="not attached"):
            connection.receive()
    assert service.jobs()["mine"]["state"] == "running"


def test_descriptors_that_nobody_asked_for_do_not_pile_up(serve):
    service = serve()
    before = service.descriptors()
    for _ in range(20):
        with raw(service) as sock, contextlib.suppress(PermissionError):  # the kernel may refuse to carry them
            socket.send_fds(sock, [msg.encode(msg.Hello(msg.VERSION, "x"))], [0, 1, 2])
            sock.recv(1 << 16)
    eventually(lambda: service.descriptors() <= before + 1, "nothing of what was sent is kept")


def test_a_client_that_stops_reading_is_cut_off(serve):
    service = serve()
    sock = raw(service)
    sock.send(msg.encode(msg.Hello(msg.VERSION, "x")))
    sock.setblocking(False)
    for _ in range(20_000):
        try:
            sock.send(msg.encode(msg.GetStatus()))
        except BlockingIOError:
            time.sleep(0.001)
        except OSError:
            break
    assert service.jobs() == {}


def test_a_hundred_thousand_hostile_messages_hurt_nobody(serve):
    service = serve("--policy", "fair")
    job = service.job("--name", "bystander", iterations=100_000, seconds=0.002)
    service.when("bystander", "running")
    before = service.descriptors()
    rng = random.Random(20261115)
    words = [
        b'"type"',
        b'"hello"',
        b'"ready"',
        b'"yielded"',
        b'"attach"',
        b"{",
        b"}",
        b"[",
        b":",
        b",",
        b"1",
        b"-1",
        b"null",
    ]
    hello = msg.encode(msg.Hello(msg.VERSION, "fuzz"))
    sent = 0
    while sent < 100_000:
        sock = raw(service)
        sock.setblocking(False)
        try:
            if rng.random() < 0.7:
                sock.send(hello)
            for _ in range(200):
                kind = rng.random()
                if kind < 0.3:
                    packet = rng.randbytes(rng.randint(1, 200))
                elif kind < 0.6:
                    packet = b"".join(rng.choices(words, k=rng.randint(1, 12)))
                elif kind < 0.8:
                    packet = (
                        b'{"type":"'
                        + rng.choice([b"register", b"cancel-job", b"await-job", b"set-policy"])
                        + b'","x":1}'
                    )
                else:
                    packet = b'{"type":"list-jobs"}' if rng.random() < 0.5 else b'{"type":"cancel-job","job_id":"9999"}'
                sock.send(packet)
                sent += 1
        except (BrokenPipeError, ConnectionResetError, BlockingIOError):
            sent += 1
        sock.close()
    assert service.process.poll() is None
    row = service.when("bystander", "running")
    assert row["iterations"] > 0
    job.kill()
    eventually(lambda: service.descriptors() < before, "connections are closed")


def test_another_version_is_told_so_plainly(serve):
    service = serve()
    sock = raw(service)
    sock.send(b'{"type":"hello","version":99,"salus":"9.9"}')
    answer = msg.decode(sock.recv(1 << 16), msg.FROM_SERVICE)
    assert answer.code == VersionMismatch.code
    assert "Salus 9.9 (protocol 99)" in answer.message
    assert ends(sock)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(serve):
    service = serve()
    for folder in (service.socket.parent, *service.socket.parent.parents):
        if len(folder.parts) > 2:
            folder.chmod(0o755)
    service.socket.chmod(0o666)
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from salus.client.connection import ServiceConnection\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: ServiceConnection(Path(sys.argv[2]))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(SOURCE), str(service.socket)], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("NotLetIn the service at") and "belongs to user 0" in done.stdout, (
        done.stdout + done.stderr
    )


def test_the_socket_and_the_state_are_closed_to_others(serve):
    service = serve()
    assert service.socket.parent.stat().st_mode & 0o777 == 0o700
    assert (service.folder / "state").stat().st_mode & 0o777 == 0o700
    assert service.socket.stat().st_mode & 0o777 == 0o600


def test_a_second_service_on_the_same_socket_is_refused_by_name(serve):
    service = serve()
    second = service.salus("serve")
    assert second.returncode == 2
    assert f"already (process {service.process.pid})" in second.stderr
    assert second.stderr.count("\n") == 1


def test_the_socket_of_a_service_that_was_killed_is_taken_over(serve):
    service = serve()
    service.process.kill()
    service.process.wait()
    again = service.salus_in_background("serve")
    eventually(lambda: service.socket.exists() and _answers(service), "the new one answers")
    again.terminate()
    again.wait(timeout=10)


def _answers(service) -> bool:
    try:
        service.connect().close()
    except ServiceUnavailable:
        return False
    return True


@pytest.mark.parametrize("command", [["top"], ["policy", "--once", "fifo"]])
def test_without_a_service_there_is_one_clear_line(serve, command):
    done = serve(start=False).salus(*command)
    assert done.returncode == 2
    assert "no service runs at" in done.stderr and "salus run starts one" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("command", [["wait", "77"], ["cancel", "77"], ["logs", "77"]])
def test_an_unknown_job_is_one_clear_line(serve, command, start):
    done = serve(start=start).salus(*command)
    assert done.returncode == 2
    assert "there is no job 77" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_state_folder_that_cannot_be_written_is_one_clear_line(serve):
    service = serve(start=False)
    service.environment["SALUS_STATE_DIR"] = "/proc/salus"
    for arguments in (["serve"], ["run", "--", "true"]):
        done = service.salus(*arguments)
        assert done.returncode == 2
        assert "SALUS_STATE_DIR" in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_for_the_journal_is_one_clear_line(serve):
    service = serve(start=False)
    journal = service.folder / "state" / "journal"
    journal.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(journal)], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        (journal / "filler").write_bytes(b"x" * 4096)
        done = service.salus("serve")
        assert done.returncode == 2
        assert "the journal cannot be written (No space left on device)" in done.stderr
        assert done.stderr.count("\n") == 1
    finally:
        subprocess.run(["umount", str(journal)], check=True)


def test_when_the_service_goes_jobs_go_on_unmanaged_and_say_so_once(serve):
    service = serve("--policy", "fifo", "--capacity", "4GiB")
    first = service.job("--name", "a", *ONE_LANE, iterations=1500, seconds=0.005)
    service.when("a", "running")
    second = service.job("--name", "b", *ONE_LANE, iterations=100, seconds=0.005)
    service.when("b", "ready")
    service.process.terminate()
    for job in (first, second):
        output, errors = job.communicate(timeout=30)
        assert job.returncode == 0
        assert "finished" in output
        assert errors.count("goes on unmanaged") == 1, errors


FORKS = """
import os, sys
sys.path.insert(0, sys.argv[1])
from salus.client.lease import of_this_process

lease = of_this_process()

def iterate(times):
    for _ in range(times):
        lease.begin()
        lease.end()

iterate(10)
child = os.fork()
iterate(100)
if child == 0:
    os._exit(7)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
iterate(10)
print("finished", status)
"""


def test_the_child_of_a_fork_that_uses_the_device_says_so_and_goes_on_while_its_parent_keeps_its_lease(serve):
    service = serve("--policy", "rr", "--quantum", "0", "--capacity", "4GiB")
    beside = service.job("--name", "beside", *ONE_LANE, iterations=100, seconds=0.002)
    script = service.folder / "forks.py"
    script.write_text(FORKS)
    command = [sys.executable, str(script), str(SOURCE)]
    job = service.salus_in_background("run", "--name", "j", *ONE_LANE, "--", *command)
    output, errors = job.communicate(timeout=60)
    assert (job.returncode, output) == (0, "finished 7\n"), errors
    row = service.jobs()["j"]
    said = [line for line in errors.splitlines() if "unmanaged" in line]
    why = rf"job {row['id']} uses the device from another process already \(PID \d+\), and one at a time is managed"
    assert re.fullmatch(rf"salus: {why}; this process of job {row['id']} goes on unmanaged", "\n".join(said))
    assert row["iterations"] == 120, "those of the parent"
    finish(beside)


def test_sigterm_with_drain_waits_for_the_jobs(serve):
    service = serve("--on-stop", "drain")
    job = service.job("--name", "a", iterations=1000, seconds=0.005)
    service.when("a", "running")
    service.process.terminate()
    time.sleep(0.2)
    assert service.process.poll() is None
    late = service.salus("run", "--", "true")
    assert late.returncode == 2
    assert "takes no new ones" in late.stderr and late.stderr.count("\n") == 1
    without = service.salus("run", "--if-no-service", "run", "--", "echo", "hi")
    assert (without.returncode, without.stdout) == (0, "hi\n")
    assert without.stderr.count("\n") == 1 and "runs unmanaged" in without.stderr
    finish(job)
    assert service.process.wait(timeout=10) == 0


def test_a_job_too_large_for_the_device_is_refused_with_the_numbers(serve):
    service = serve("--capacity", "4GiB")
    done = service.salus("run", "--name", "huge", "--persistent", "8GiB", "--", "true")
    assert done.returncode == 2
    assert done.stderr == (
        "salus: job huge cannot run on this device: needs 8 GiB persistent = 8 GiB, the whole device has 4 GiB; "
        "ask for less (--persistent, --ephemeral), or serve with more (--capacity)\n"
    )
    with service.connect() as connection, pytest.raises(RequestRejected, match="weight"):
        connection.request(msg.Register("x", ["true"], "/", weight=-1))


def test_credentials_come_from_the_kernel(serve):
    service = serve()
    sock = raw(service)
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    assert (pid, uid) == (service.process.pid, os.getuid())
