"""Several users of one service: who may do what, who sees what, and that nothing of one is ever read by another."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from salus.protocol import messages as msg
from salus.service.history import History, PastRun, command_key
from tests.service.harness import SOURCE, Service, eventually, finish

SPY = Path(__file__).parent.parent / "memory" / "spy_job.py"
OTHER_UID = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")


@pytest.fixture
def shared() -> Iterator[Callable[..., Service]]:
    """A service in a folder that others can reach."""
    folder = Path(tempfile.mkdtemp(prefix="salus-test-"))
    folder.chmod(0o755)
    services = []

    def start(*options: str) -> Service:
        services.append(Service(folder, *options))
        return services[-1]

    yield start
    for service in services:
        service.stop()
    shutil.rmtree(folder)


def spy(service: Service, uid: int, name: str, pattern: str, other: str, iterations: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(SPY), str(SOURCE), str(uid), name, pattern, other, str(iterations)]
    return subprocess.Popen(
        command,
        env={**service.environment, "SALUS_SOCKET": str(service.socket)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def as_other(service: Service, code: str) -> subprocess.CompletedProcess[str]:
    text = (
        "import sys, os; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from salus.client.connection import ServiceConnection\n"
        "from salus.errors import SalusError\n"
        "from salus.protocol import messages as msg\n"
        "import encodings.idna\n"
        f"os.setgid({OTHER_UID}); os.setuid({OTHER_UID})\n"
        "try:\n"
        "    connection = ServiceConnection(Path(sys.argv[2]))\n"
        f"    print({code})\n"
        "except SalusError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", text, str(SOURCE), str(service.socket)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def in_one_lane(service: Service) -> bool:
    rows = service.jobs(everything=False).values()
    return len(rows) == 2 and len({row["lane"] for row in rows}) == 1


@needs_root
@pytest.mark.parametrize("scrub", [(), ("--scrub",)])
def test_what_one_user_leaves_in_a_shared_lane_never_arrives_at_another(shared, scrub):
    service = shared(
        "--users", str(OTHER_UID), "--share-lanes-between-users", "--policy", "rr", "--quantum", "0",
        "--capacity", "12MiB", *scrub,
    )  # fmt: skip
    one = spy(service, 0, "one", "SECRET-OF-ONE!", "SECRET-OF-TWO!", 200)
    two = spy(service, OTHER_UID, "two", "SECRET-OF-TWO!", "SECRET-OF-ONE!", 200)
    eventually(lambda: in_one_lane(service), "they share a lane")
    for process in (one, two):
        output, errors = process.communicate(timeout=60)
        assert output == "saw nothing\n", errors


@needs_root
def test_the_spy_would_see_it_if_nothing_were_cleared(shared):
    """Two jobs of one user in one lane: nobody clears anything, and the test above could fail."""
    service = shared("--policy", "rr", "--quantum", "0", "--capacity", "12MiB")
    one = spy(service, 0, "one", "SECRET-OF-ONE!", "SECRET-OF-TWO!", 200)
    two = spy(service, 0, "two", "SECRET-OF-TWO!", "SECRET-OF-ONE!", 200)
    assert "saw\n" in {process.communicate(timeout=60)[0] for process in (one, two)}


@needs_root
def test_a_job_that_is_killed_in_mid_iteration_leaves_nothing_to_see(shared):
    service = shared(
        "--users", str(OTHER_UID), "--share-lanes-between-users", "--policy", "rr", "--quantum", "0",
        "--capacity", "12MiB",
    )  # fmt: skip
    reader = spy(service, OTHER_UID, "reader", "mine", "SECRET-OF-THE-VICTIM!", 1500)
    for number in range(6):
        victim = spy(service, 0, f"victim{number}", "SECRET-OF-THE-VICTIM!", "nothing", 100_000)
        eventually(lambda n=number: service.jobs().get(f"victim{n}", {}).get("iterations", 0) > 3, "it runs")
        victim.send_signal(signal.SIGKILL)
        victim.communicate(timeout=10)
    output, errors = reader.communicate(timeout=90)
    assert output == "saw nothing\n", errors


@needs_root
def test_users_are_invisible_to_one_another_and_cannot_touch_what_is_not_theirs(shared):
    service = shared("--users", "nobody", "--capacity", "1GiB")
    job = service.job("--name", "secret-project", iterations=100_000, seconds=0.005)
    row = eventually(lambda: service.jobs().get("secret-project"), "it is there")
    assert as_other(service, "connection.jobs(everything=True)").stdout == "[]\n"
    status = as_other(service, "connection.request(msg.GetStatus()).status").stdout
    assert "secret-project" not in status and "'holder': None" in status
    assert "there is no job" in as_other(service, f"connection.request(msg.CancelJob({row['id']!r}))").stdout
    assert "there is no job" in as_other(service, f"connection.request(msg.AwaitJob({row['id']!r}))").stdout
    assert "only the user who runs the service" in as_other(service, "connection.request(msg.SetPolicy('fifo'))").stdout
    assert "only the user who runs the service" in as_other(service, "connection.request(msg.Stop())").stdout
    service.salus("cancel", row["id"])
    job.wait(timeout=10)


@needs_root
def test_the_administrator_may_allow_them_to_see_and_never_to_cancel(shared):
    service = shared("--users", "all", "--visible", "--capacity", "1GiB")
    job = service.job("--name", "open-project", iterations=100_000, seconds=0.005)
    row = eventually(lambda: service.jobs().get("open-project"), "it is there")
    assert "open-project" in as_other(service, "connection.jobs()").stdout
    assert "is another user's" in as_other(service, f"connection.request(msg.CancelJob({row['id']!r}))").stdout
    service.salus("cancel", row["id"])
    job.wait(timeout=10)


@needs_root
def test_without_being_let_in_a_user_is_turned_away_and_lanes_are_not_shared(shared):
    service = shared("--users", "daemon", "--capacity", "1GiB")
    assert "has not let you in" in as_other(service, "connection.jobs()").stdout
    finish(service.job("--name", "mine", iterations=5, seconds=0.001))


def test_a_user_that_does_not_exist_is_one_clear_line(serve):
    service = serve(start=False)
    done = service.salus("serve", "--users", "no-such-user")
    assert done.returncode == 2 and "--users: there is no user 'no-such-user' here" in done.stderr


REGISTER = """(
    connection.request(msg.Register("same", ["python", "train.py"], "/work"{declared})),
    print(next(row for row in connection.jobs() if row["name"] == "same")["{what}"]),
    connection.send(msg.Finished(0)),
)"""


@needs_root
def test_what_one_users_command_used_is_neither_known_nor_changed_by_another_user(shared):
    service = shared("--users", str(OTHER_UID))
    history = History(service.folder / "state" / "history.sqlite")
    run = PastRun(10, 1.0, 3 << 30, 1 << 30, 0)
    history.add(command_key(0, ["python", "train.py"], "/work"), "same", 0, run)
    history.close()
    asks = REGISTER.format(declared="", what="persistent_bytes")
    assert as_other(service, asks).stdout.splitlines()[0] == "0", "the command is new to the other user"
    with service.connect() as connection:
        connection.request(msg.Register("mine", ["python", "train.py"], "/work"))
        mine = next(row for row in connection.jobs() if row["name"] == "mine")
        assert mine["persistent_bytes"] == 3 << 30
