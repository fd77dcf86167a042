"""What is kept on the disk stays within its limits, the oldest goes first, and what is in use never goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from salus.protocol.messages import Register
from salus.registry import FILE, Registry
from salus.service import storage
from salus.service.history import History, PastRun
from salus.service.storage import Item, Limits, tidy_files, tidy_records, too_much
from tests.service.harness import SOURCE, eventually

DAY_S = 86400.0
GOOD = PastRun(5, 1.0, 10, 20, 30)


def items(*sizes: int, in_use: tuple[int, ...] = ()) -> list[Item]:
    """The first is the oldest."""
    return [Item(Path(str(n)), size, float(n), n in in_use) for n, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "in_use", "limit", "oldest", "gone"),
    [
        ((10, 10, 10), (), 30, 0, ""),
        ((10, 10, 10), (), 29, 0, "0"),
        ((10, 10, 10), (), 0, 0, "012"),
        ((10, 10, 10), (), 30, 2, "01"),
        ((10, 10, 10), (), 9, 2, "012"),
        ((10, 10, 10), (0,), 10, 0, "1"),
        ((10, 10, 10), (0, 1, 2), 0, 9, ""),
        ((), (), 0, 0, ""),
    ],
)
def test_what_is_too_old_goes_and_then_the_oldest_until_the_rest_is_small_enough(sizes, in_use, limit, oldest, gone):
    found = too_much(items(*sizes, in_use=in_use), limit, oldest)
    assert "".join(sorted(str(item.path) for item in found)) == gone


def test_segments_are_small_against_the_limit_also_with_many_devices():
    assert Limits().segment_bytes(1) == 8 << 20
    for devices in (1, 8, 16):
        limits = Limits(journal_bytes=64 << 20)
        assert devices * limits.segment_bytes(devices) <= limits.journal_bytes / 8


# Output.


class State:
    """A state folder with jobs and what they have written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "output").mkdir(parents=True)
        self.registry = Registry(folder / FILE, "/run/salus.sock")

    def job(self, name: str, size: int, ended_days_ago: float | None, launcher: int = 0) -> Path:
        """`ended_days_ago`: None while it runs."""
        path = self.folder / "output" / f"{name}.log"
        path.write_bytes(b"x" * size)
        asked = Register(name, ["x"], "/", log=str(path))
        began_at = time.time() - 100 * DAY_S
        job_id = self.registry.add("t", os.getuid(), asked, began_at, launcher, "host0")
        if ended_days_ago is not None:
            at = time.time() - ended_days_ago * DAY_S
            row = {"id": job_id, "name": name, "state": "done", "exit_code": 0, "finished_at": at, "log": str(path)}
            self.registry.describe(row)
            os.utime(path, (at, at))
        return path

    def tidy(self, **limits: float) -> dict[str, storage.Tidied]:
        given = Limits(**limits)  # type: ignore[arg-type]
        return {one.kind: one for one in (*tidy_files(self.folder, given), *tidy_records(self.folder, given))}


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(tmp_path / "state")


def test_output_of_the_job_that_ended_first_is_removed_first(state):
    logs = [state.job(f"job{days}", 1000, days) for days in (3, 1, 2)]
    found = state.tidy(output_bytes=2500)["output"]
    assert [log.exists() for log in logs] == [False, True, True]
    assert (found.removed, found.removed_bytes, found.kept, found.kept_bytes) == (1, 1000, 2, 2000)


def test_output_that_is_too_old_is_removed_however_little_it_is(state):
    logs = [state.job(f"job{days}", 1, days) for days in (31, 29)]
    state.tidy(keep_s=30 * DAY_S)
    assert [log.exists() for log in logs] == [False, True]


def test_output_of_a_job_that_runs_is_never_removed_but_told_of_and_costs_others_nothing(state):
    ended = state.job("ended", 1000, 1)
    running = state.job("running", 5 << 20, None, launcher=os.getpid())
    os.utime(running, (0, 0))
    found = state.tidy(output_bytes=1 << 20, keep_s=DAY_S * 2)["output"]
    assert running.exists() and ended.exists()
    assert len(found.notes) == 1
    assert found.notes[0].startswith("job 2 has written 5 MiB and runs on:")
    state.tidy(output_bytes=0, keep_s=0.0)
    assert running.exists() and not ended.exists()


def test_output_of_a_job_that_was_lost_goes_like_that_of_one_that_ended(state):
    dead = subprocess.Popen(["true"])
    dead.wait()
    lost = state.job("lost", 1000, None, launcher=dead.pid)
    state.tidy(output_bytes=0)
    assert not lost.exists()


def test_output_that_belongs_to_no_record_any_more_is_limited_too(state):
    left = state.folder / "output" / "4711-00.log"
    left.write_bytes(b"x")
    os.utime(left, (1, 1))
    state.tidy()
    assert not left.exists()


# Records and history.


def test_records_of_jobs_that_ended_long_ago_are_forgotten_and_those_of_jobs_that_run_are_not(state):
    state.job("old", 1, 40)
    state.job("new", 1, 1)
    state.job("running", 1, None, launcher=os.getpid())
    found = state.tidy(keep_s=30 * DAY_S)["records"]
    assert (found.removed, found.kept) == (1, 2)
    assert [record.row["name"] for record in state.registry.all()] == ["new", "running"]


def test_a_job_that_has_run_for_a_hundred_days_is_not_forgotten_and_one_that_is_gone_is(state):
    dead = subprocess.Popen(["true"])
    dead.wait()
    state.job("gone", 1, None, launcher=dead.pid)
    state.job("running", 1, None, launcher=os.getpid())
    state.registry.trim()
    assert [record.row["name"] for record in state.registry.all()] == ["running"]


def test_records_of_long_commands_are_limited_by_their_size(state, monkeypatch):
    for number in range(20):
        state.job(f"job{number}", 1, 1)
    one = state.tidy()["records"].kept_bytes // 20
    monkeypatch.setattr("salus.registry.KEPT_BYTES", one * 5 + 10)
    found = state.tidy()["records"]
    assert 4 <= found.kept <= 5
    assert state.registry.all()[-1].row["name"] == "job19"


def test_of_a_command_the_last_runs_are_kept_and_before_all_those_that_went_well(tmp_path):
    history = History(tmp_path / "history.sqlite")
    history.add("a", "a", 0, GOOD)
    for _ in range(30):
        history.add("a", "a", 1, GOOD)
        history.add("b", "b", 0, GOOD)
    gone, _, kept, _ = history.forget(float("-inf"), dry_run=True)
    assert (gone, kept) == (41, 20)
    history.forget(float("-inf"))
    assert history.last("a") == GOOD and history.last("b") == GOOD
    assert history.forget(float("-inf"))[0] == 0
    assert history.forget(time.time() + 1)[2] == 0


# The log of the service.

ROTATES = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from salus.service.storage import rotate_log
log = Path(sys.argv[2])
print("before", file=sys.stderr, flush=True)
rotate_log(log, limit_bytes=7)
print("after", file=sys.stderr, flush=True)
rotate_log(log, limit_bytes=7)
"""


def test_the_log_of_a_service_is_begun_again_when_it_is_long_and_no_line_is_lost(tmp_path):
    log = tmp_path / "service.log"
    with log.open("ab") as output:
        subprocess.run([sys.executable, "-c", ROTATES, str(SOURCE), str(log)], stderr=output, check=True)
    assert log.read_text() == "after\n"
    assert (tmp_path / "service.log.1").read_text() == "before\n"


def test_a_log_that_is_not_that_of_this_process_is_left_alone(tmp_path):
    log = tmp_path / "service.log"
    log.write_text("x" * 100)
    storage.rotate_log(log, limit_bytes=10)
    storage.rotate_log(tmp_path / "missing", limit_bytes=10)
    assert [path.name for path in tmp_path.iterdir()] == ["service.log"]


# As a user has it.


def test_clean_says_what_it_would_remove_and_then_removes_it(serve):
    service = serve(start=False)
    job_id = service.salus("submit", "--", sys.executable, "-c", "print('x' * 5000)").stdout.strip()
    assert service.salus("wait", job_id).returncode == 0
    eventually(lambda: not service.socket.exists(), "the service ended")
    told = service.salus("clean", "--dry-run", "--older-than", "0").stdout
    assert "output of ended jobs: 1 file would be removed (4.9 KiB), 0 files stay\n" in told
    assert "records of ended jobs: 1 job would be removed" in told
    assert "would free" in told
    assert service.salus("logs", job_id).stdout == "x" * 5000 + "\n"
    told = service.salus("clean", "--older-than", "1h").stdout
    assert "output of ended jobs: 1 file stays (4.9 KiB)\n" in told
    assert "the journal: 1 file stays" in told or "the journal: 1 file compressed, 1 file stays" in told
    told = service.salus("clean", "--older-than", "0").stdout
    assert "the journal: 1 file removed" in told and "\nfreed " in told
    assert json.loads(service.salus("ps", "--all", "--json").stdout) == []
    assert list((service.folder / "state" / "output").iterdir()) == []


def test_clean_while_a_service_runs_leaves_what_is_in_use(serve):
    service = serve()
    job_id = service.salus("submit", "--", "sleep", "600").stdout.strip()
    done = service.salus("clean", "--older-than", "0", "--keep-journal", "0", "--keep-output", "0")
    assert done.returncode == 0, done.stderr
    assert "the journal: 1 file stays" in done.stdout
    assert service.journals()
    assert service.salus("logs", job_id).returncode == 0
    assert [row["state"] for row in service.jobs().values()] != []
    assert service.salus("cancel", job_id).returncode == 0
    service.salus("wait", job_id)
    service.stop()
    assert service.salus("replay").returncode == 0


def test_clean_where_nothing_has_run_yet_has_nothing_to_do(serve):
    done = serve(start=False).salus("clean")
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("freed 0 B in ")


@pytest.mark.parametrize("option", ["--older-than", "--keep-journal", "--keep-output"])
def test_clean_refuses_a_value_it_does_not_understand_in_one_line(serve, option):
    done = serve(start=False).salus("clean", option, "much")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"salus: {option}: 'much' is not a ")


def test_a_limit_that_is_next_to_nothing_is_refused_with_the_place_it_comes_from(serve):
    service = serve(start=False)
    service.environment["SALUS_STORAGE_OUTPUT_SIZE"] = "5k"
    for command in ("clean", "serve"):
        done = service.salus(command)
        assert done.returncode == 2
        assert done.stderr == "salus: SALUS_STORAGE_OUTPUT_SIZE: write at least 1 MiB\n"
