"""Two real users and an administrator on one machine: they find its service, and nobody meets another's jobs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.harness import SOURCE, eventually

ALICE, BOB, DAEMON = 65501, 65502, 65503
"""Numbers that no real user of a machine has. Salus needs no names."""
HELLO = ("--", "sh", "-c", "echo hello from $SALUS_JOB; exit 3")


def python_for_all() -> str | None:
    """One that other users may run, and that finds what Salus needs. That of the tests may be in root's home."""
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            command = [python, "-c", "import salus.cli.main"]
            done = subprocess.run(command, user=ALICE, group=ALICE, extra_groups=[], env=ENVIRONMENT, cwd="/")
        except OSError:
            continue
        if done.returncode == 0:
            return python
    return None


ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONPATH": f"{SOURCE}{os.pathsep}{sysconfig.get_path('purelib')}",
    "PYTHONDONTWRITEBYTECODE": "1",
}
PYTHON = python_for_all() if os.getuid() == 0 else None
pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else"),
    pytest.mark.skipif(os.getuid() == 0 and PYTHON is None, reason="there is no Python that other users may run"),
]


class Person:
    def __init__(self, folder: Path, uid: int) -> None:
        self.uid = uid
        self.home = folder / f"home-{uid}"
        self.home.mkdir(mode=0o700)
        (self.home / "run").mkdir(mode=0o700)
        for path in (self.home, self.home / "run"):
            os.chown(path, uid, uid)
        self.environment = {
            **ENVIRONMENT,
            "HOME": str(self.home),
            "XDG_RUNTIME_DIR": str(self.home / "run"),
            "SALUS_SYSTEM_RUNTIME_DIR": str(folder / "run"),
            "SALUS_SYSTEM_STATE_DIR": str(folder / "var"),
            "SALUS_SYSTEM_CONFIG_DIR": str(folder / "etc"),
        }
        self.state = self.home / ".local" / "state" / "salus"

    def start(self, *arguments: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(PYTHON), "-m", "salus", *arguments],
            **({} if self.uid == 0 else {"user": self.uid, "group": self.uid, "extra_groups": []}),  # type: ignore[call-overload]
            env=self.environment | more,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def salus(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **more)
        output, errors = process.communicate(timeout=120)
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)

    def jobs(self, *options: str, **more: str) -> dict[str, dict]:
        done = self.salus("ps", "--json", *options, **more)
        assert done.returncode == 0, done.stderr
        return {row["id"]: row for row in json.loads(done.stdout)}


class Machine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o755)
        self.root, self.alice, self.bob = (Person(folder, uid) for uid in (0, ALICE, BOB))
        self.socket = folder / "run" / "service.sock"
        self._started: list[subprocess.Popen[str]] = []

    def serve(self, *options: str, by: Person | None = None) -> subprocess.Popen[str]:
        service = (by or self.root).start("serve", "--system", "--device", "host", "--capacity", "1GiB", *options)
        self._started.append(service)
        eventually(lambda: self.socket.exists() or service.poll() is not None, "the service listens")
        assert service.poll() is None, service.communicate()[1]
        return service

    def stop(self, service: subprocess.Popen[str]) -> None:
        service.terminate()
        service.communicate(timeout=30)

    def install(self) -> None:
        """As `salus install-service --system` marks it."""
        (self.folder / "etc").mkdir(exist_ok=True)
        (self.folder / "etc" / "machine-wide").touch()

    def run(self, person: Person, *arguments: str, **more: str) -> subprocess.Popen[str]:
        self._started.append(person.start(*arguments, **more))
        return self._started[-1]

    def close(self) -> None:
        for process in reversed(self._started):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
        shutil.rmtree(self.folder)


@pytest.fixture
def machine() -> Iterator[Machine]:
    found = Machine(Path(tempfile.mkdtemp(prefix="salus-machine-")))
    yield found
    found.close()


def test_users_find_it_without_a_variable_and_know_their_own_jobs_after_it_has_stopped(machine):
    alice, bob, root = machine.alice, machine.bob, machine.root
    own = alice.salus("submit", *HELLO)
    assert own.returncode == 0 and own.stdout == "1\n", own.stderr
    assert alice.salus("wait", "1").returncode == 3, "before there was a machine-wide service, she had her own"
    service = machine.serve()
    ids = {person.uid: person.salus("submit", *HELLO).stdout.strip() for person in (alice, bob)}
    long = alice.salus("submit", "--", "sh", "-c", "until [ -e $HOME/go ]; do sleep 0.1; done; exit 5").stdout.strip()
    mine = root.salus("submit", *HELLO).stdout.strip()
    assert sorted([*ids.values(), long, mine], key=int) == ["10", "20", "30", "40"]
    assert [person.salus("wait", ids[person.uid]).returncode for person in (alice, bob)] == [3, 3]
    assert set(alice.jobs("--all")) == {"1", ids[ALICE], long} and set(bob.jobs("--all")) == {ids[BOB]}
    assert set(root.jobs("--all")) == {*ids.values(), long, mine}
    assert "there is no job" in bob.salus("cancel", long).stderr
    root.salus("wait", mine)

    machine.stop(service)
    rows = alice.jobs("--all")
    assert {job_id: row["state"] for job_id, row in rows.items()} == {
        "1": "failed", ids[ALICE]: "failed", long: "unmanaged",
    }  # fmt: skip
    assert rows[ids[ALICE]]["exit_code"] == 3 and rows[ids[ALICE]]["command"].startswith("sh -c")
    assert alice.salus("logs", ids[ALICE]).stdout == f"hello from {ids[ALICE]}\n"
    assert set(bob.jobs("--all")) == {ids[BOB]}
    for command in ("wait", "logs", "cancel"):
        assert "there is no job" in bob.salus(command, ids[ALICE]).stderr
    assert set(root.jobs("--all")) == {*ids.values(), long, mine}, "an administrator still knows all"
    (alice.home / "go").touch()
    assert alice.salus("wait", long).returncode == 5
    assert alice.state.stat().st_mode & 0o077 == 0, "nobody else can read her records"

    later = alice.salus("submit", *HELLO).stdout.strip()
    assert later == "2", "her own service again, and no number twice"
    machine.serve()
    states = {job_id: row["state"] for job_id, row in alice.jobs("--all").items()}
    assert states[long] == "failed", "the service was not there when it ended, and its launcher was"


def test_one_that_is_installed_and_stopped_is_not_replaced_by_a_users_own(machine):
    machine.install()
    for command in ("run", "submit"):
        done = machine.alice.salus(command, "--", "echo", "ran")
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
        assert f"the machine-wide service ({machine.socket}) does not run" in done.stderr
    done = machine.alice.salus("run", "--if-no-service", "run", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (0, "ran\n") and "runs unmanaged" in done.stderr
    done = machine.alice.salus("run", "--", "sh", "-c", "echo $SALUS_JOB", SALUS_SERVICE="own")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert machine.alice.jobs() == {}


def test_a_user_who_is_not_let_in_is_told_and_has_a_service_of_their_own(machine):
    machine.install()
    machine.serve("--users", f"@{BOB}")
    done = machine.alice.salus("run", "--", "sh", "-c", "echo $SALUS_JOB")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "has not let you in" in done.stderr and "a service of your own" in done.stderr
    assert machine.root.jobs("--all") == {} and set(machine.alice.jobs("--all")) == {"1"}


def test_a_service_of_ones_own_is_not_started_by_hand_beside_it_unless_that_is_meant(machine):
    machine.serve()
    done = machine.alice.salus("serve")
    assert done.returncode == 2 and "this machine has a service for all users" in done.stderr
    own = machine.run(machine.alice, "serve", "--device", "host", SALUS_SERVICE="own")
    eventually((machine.alice.home / "run" / "salus" / "service.sock").exists, "it listens")
    assert own.poll() is None
    again = machine.root.salus("serve", "--system")
    assert again.returncode == 2 and f"a service runs on {machine.socket} already" in again.stderr


def test_only_an_administrator_changes_its_policy_and_the_next_one_has_it(machine):
    service = machine.serve()
    done = machine.alice.salus("policy", "rr")
    assert done.returncode == 2 and "only the user who runs the service" in done.stderr
    done = machine.root.salus("policy", "srtf")
    assert done.returncode == 0 and done.stdout.endswith(f"by {machine.folder}/etc/config.toml\n"), done.stderr
    machine.stop(service)
    (machine.alice.home / ".config" / "salus").mkdir(parents=True)
    (machine.alice.home / ".config" / "salus" / "config.toml").write_text('[service]\npolicy = "rr"\n')
    machine.serve()
    assert machine.alice.salus("policy").stdout.splitlines()[-1] == "the service runs srtf"


def test_it_may_run_as_a_user_for_it_alone(machine):
    for name in ("run", "var"):
        (machine.folder / name).mkdir(mode=0o755)
        os.chown(machine.folder / name, DAEMON, DAEMON)
    machine.serve(by=Person(machine.folder, DAEMON))
    job_id = machine.alice.salus("submit", *HELLO).stdout.strip()
    assert job_id == "10" and machine.alice.salus("wait", "10").returncode == 3
    assert (machine.folder / "var").stat().st_mode & 0o077 == 0
    assert set(machine.root.jobs("--all")) == {"10"} and machine.bob.jobs("--all") == {}


def test_no_command_speaks_to_a_stranger_who_serves_where_the_machine_should(machine):
    folder = machine.folder / "run"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    stranger = subprocess.Popen(
        [str(PYTHON), "-c", "import os, socket, sys\ns = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
         "s.bind(sys.argv[1]); os.chmod(sys.argv[1], 0o666); s.listen(); print('listens', flush=True)\n"
         "c, _ = s.accept(); print('heard', c.recv(1000), flush=True)", str(machine.socket)],
        user=BOB, group=BOB, extra_groups=[], stdout=subprocess.PIPE, text=True, cwd="/",
    )  # fmt: skip
    try:
        assert stranger.stdout is not None and stranger.stdout.readline() == "listens\n"
        done = machine.alice.salus("run", "--", "echo", "secret")
        assert done.returncode == 2 and f"belongs to user {BOB}, and anybody could have put it there" in done.stderr
        assert stranger.communicate(timeout=20)[0] in ("heard b''\n", ""), "not a word"
    finally:
        stranger.kill()
        stranger.communicate()


def test_a_user_cannot_serve_for_the_machine(machine):
    done = machine.alice.salus("serve", "--system", "--device", "host")
    assert done.returncode == 2 and "run the machine-wide service as root" in done.stderr
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(FileNotFoundError):
        probe.connect(str(machine.socket))
