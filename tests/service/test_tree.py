"""A job is its process tree: however it ends, none of its processes is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from salus import processes
from salus.units import format_duration, parse_duration
from tests.faults.soak import processes_of
from tests.service.harness import Service, eventually
from tests.service.test_commands import on_a_terminal

SLEEPER = """
import os, signal, sys, time
from pathlib import Path
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(__file__).with_name(f"up-{os.getpid()}").touch()
time.sleep(600)
"""

SCATTERS = """
import os, subprocess, sys, time
from pathlib import Path
sleeper = [sys.executable, str(Path(__file__).with_name("sleeper.py"))]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sleeper[0], sleeper)
    os._exit(0)
os.wait()
subprocess.Popen(sleeper, start_new_session=True)
subprocess.Popen(["env", "-i", *sleeper])
subprocess.Popen([*sleeper, "stubborn"])
time.sleep(600)
"""


class Shape:
    """A command that starts processes; how many of them say that they are up."""

    def __init__(self, command: list[str], up: int, limit: str) -> None:
        self.command, self.up, self.limit = command, up, limit


def shape(kind: str, folder: Path) -> Shape:
    sleeper, scatters = folder / "sleeper.py", folder / "scatters.py"
    sleeper.write_text(SLEEPER)
    scatters.write_text(SCATTERS)
    python = sys.executable
    if kind == "bash":
        return Shape(["bash", "-c", f"{python} {sleeper}; touch {folder / 'next'}"], 1, "2s")
    if kind == "torchrun":
        run = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
        return Shape([*run, str(sleeper)], 2, "20s")
    return Shape([python, str(scatters)], 4, "3s")


def is_up(folder: Path, job: Shape) -> None:
    eventually(lambda: len(list(folder.glob("up-*"))) >= job.up, "all its processes are up", 60)


def submitted(service: Service, job: Shape, *options: str) -> str:
    done = service.salus("submit", "--name", "j", "--grace", "1s", *options, "--", *job.command)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


KINDS = pytest.mark.parametrize("kind", ["bash", "torchrun", "scatters"])


@KINDS
@pytest.mark.parametrize("force", [False, True])
def test_cancel_ends_every_process_of_a_job(serve, tmp_path, kind, force):
    service, job = serve(), shape(kind, tmp_path)
    job_id = submitted(service, job)
    is_up(tmp_path, job)
    assert service.salus("cancel", job_id, *(["--force"] if force else [])).returncode == 0
    assert service.salus("wait", job_id).returncode != 0
    assert processes_of(tmp_path) == [], "the job has ended when its last process has"
    assert service.jobs()["j"]["state"] == "cancelled"
    assert not (tmp_path / "next").exists(), "the shell did not go on to the next command"


@KINDS
def test_ctrl_c_ends_every_process_of_a_job(serve, tmp_path, kind):
    service, job = serve(), shape(kind, tmp_path)
    run, terminal = on_a_terminal(service, "run", "--name", "j", "--grace", "1s", "--", *job.command)
    is_up(tmp_path, job)
    os.write(terminal, b"\x03")
    status = run.wait(timeout=60)
    os.close(terminal)
    assert status != 0
    assert processes_of(tmp_path) == [] and not (tmp_path / "next").exists()


@KINDS
def test_when_salus_run_is_killed_every_process_of_its_job_ends(serve, tmp_path, kind):
    service, job = serve(), shape(kind, tmp_path)
    run = service.salus_in_background("run", "--name", "j", "--grace", "1s", "--", *job.command)
    is_up(tmp_path, job)
    run.kill()
    row = service.when("j", "failed")
    # (The keeper itself is still to end.)
    eventually(lambda: processes_of(tmp_path) == [], "every process has ended", 1.0)
    assert row["wait_reason"] == "its salus run was killed"


@KINDS
def test_at_its_time_limit_every_process_of_a_job_ends_and_it_is_said(serve, tmp_path, kind):
    service, job = serve(), shape(kind, tmp_path)
    run = service.salus_in_background(
        "run", "--name", "j", "--grace", "1s", "--time-limit", job.limit, "--", *job.command
    )
    _, errors = run.communicate(timeout=90)
    assert run.returncode != 0
    assert processes_of(tmp_path) == [] and not (tmp_path / "next").exists()
    limit = format_duration(parse_duration(job.limit))
    assert f"its time limit of {limit} is over; it is told to end" in errors
    row = service.jobs()["j"]
    assert (row["state"], row["wait_reason"]) == ("failed", f"its time limit of {limit} was over")


def keeper_of(run: subprocess.Popen[str]) -> int:
    (keeper,) = [process for process in processes.below(run.pid) if process.parent == run.pid]
    return keeper.pid


def test_when_the_keeper_of_a_job_is_killed_every_process_of_the_job_ends(serve, tmp_path):
    service, job = serve(), shape("scatters", tmp_path)
    run = service.salus_in_background("run", "--name", "j", "--grace", "1s", "--", *job.command)
    is_up(tmp_path, job)
    os.kill(keeper_of(run), signal.SIGKILL)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGKILL and "was killed" in errors
    assert processes_of(tmp_path) == []


def test_where_launcher_and_keeper_are_killed_the_service_ends_the_job(serve, tmp_path):
    service, job = serve(), shape("bash", tmp_path)
    run = service.salus_in_background("run", "--name", "j", "--grace", "1s", "--", *job.command)
    is_up(tmp_path, job)
    keeper = keeper_of(run)
    os.kill(run.pid, signal.SIGSTOP)
    os.kill(keeper, signal.SIGKILL)
    run.kill()
    eventually(lambda: processes_of(tmp_path) == [], "every process has ended")
    assert service.when("j", "failed")["wait_reason"] == "its salus run was killed"


def test_cancel_ends_a_job_that_is_stopped_as_by_ctrl_z(serve, tmp_path):
    service, job = serve(), shape("bash", tmp_path)
    run, terminal = on_a_terminal(service, "run", "--name", "j", "--", *job.command)
    is_up(tmp_path, job)
    os.write(terminal, b"\x1a")
    stopped = [run.pid, *map(int, (path.name[3:] for path in tmp_path.glob("up-*")))]
    eventually(lambda: all(processes.look_at(pid).state == "T" for pid in stopped), "they are stopped")
    assert service.salus("cancel", service.jobs()["j"]["id"]).returncode == 0
    run.wait(timeout=30)
    os.close(terminal)
    assert processes_of(tmp_path) == []
    assert service.jobs()["j"]["state"] == "cancelled"


def test_a_job_without_a_service_is_cancelled_whole(serve, tmp_path):
    service, job = serve(), shape("scatters", tmp_path)
    job_id = submitted(service, job)
    is_up(tmp_path, job)
    service.process.terminate()
    service.process.communicate()
    assert service.salus("cancel", job_id).stdout == f"job {job_id} was told to end\n"
    assert service.salus("wait", job_id).returncode == 128 + signal.SIGTERM
    assert processes_of(tmp_path) == []


def test_a_job_is_cancelled_whole_by_a_service_that_was_started_again(serve, tmp_path):
    service, job = serve(), shape("scatters", tmp_path)
    job_id = submitted(service, job)
    is_up(tmp_path, job)
    service.kill()
    service.start()
    service.when("j", "waiting", "starting", "idle", "ready")
    assert service.salus("cancel", job_id).returncode == 0
    service.salus("wait", job_id)
    assert processes_of(tmp_path) == []


def test_what_a_command_leaves_running_is_ended_with_a_word_about_it(serve, tmp_path):
    service, job = serve(), shape("bash", tmp_path)
    leaves = f"setsid {sys.executable} {tmp_path / 'sleeper.py'} & until ls {tmp_path}/up-*; do sleep 0.1; done; exit 3"
    done = service.salus("run", "--name", "j", "--", "bash", "-c", f"{{ {leaves}; }} > /dev/null 2>&1")
    is_up(tmp_path, job)
    assert done.returncode == 3, "the status is that of the command"
    assert processes_of(tmp_path) == []
    assert "its command has ended; what it left running is told to end: python" in done.stderr
    assert done.stderr.count("salus: ") == 1
    assert service.jobs()["j"]["exit_code"] == 3


def test_the_service_that_a_job_started_is_no_part_of_it(serve, tmp_path):
    service, job = serve(start=False), shape("bash", tmp_path)
    run = service.salus_in_background("run", "--name", "j", "--", *job.command)
    is_up(tmp_path, job)
    other = service.salus_in_background("run", "--name", "other", "--", "sh", "-c", "read x; echo finished")
    service.when("other", "waiting", "starting")
    assert service.salus("cancel", service.jobs()["j"]["id"]).returncode == 0
    run.wait(timeout=30)
    assert service.jobs()["other"]["state"] in ("waiting", "starting"), "its service is there"
    assert other.communicate("go\n", timeout=30)[0] == "finished\n"


def test_a_job_that_is_submitted_by_another_job_outlives_it(serve, tmp_path):
    service, job = serve(), shape("bash", tmp_path)
    submit = f"{sys.executable} -m salus submit --name inner -- {sys.executable} {tmp_path / 'sleeper.py'}"
    done = service.salus("run", "--name", "outer", "--", "bash", "-c", submit)
    assert done.returncode == 0, done.stderr
    is_up(tmp_path, job)
    assert done.stderr == ""
    service.salus("cancel", done.stdout.strip())
    service.when("inner", "cancelled")
    assert processes_of(tmp_path) == []
