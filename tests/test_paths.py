"""Where things are put, and what is left alone there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from salus.client.connection import ServiceConnection
from salus.errors import RequestRejected
from salus.paths import check_socket, lock_path, make_private, prepare_for_socket, socket_path, state_dir, take_over


def salus(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SALUS_")}
    command = [sys.executable, "-m", "salus", *arguments]
    return subprocess.run(
        command, env={**environment, **settings}, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("command", [["serve"], ["run", "--", "true"], ["ps"], ["submit", "--", "true"]])
def test_a_file_where_the_socket_should_be_is_left_alone(tmp_path, command):
    precious = tmp_path / "mine.txt"
    precious.write_text("precious")
    done = salus(*command, SALUS_SOCKET=str(precious), SALUS_STATE_DIR=str(tmp_path / "state"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "is no socket" in done.stderr
    assert precious.read_text() == "precious" and not lock_path(precious).exists()


@pytest.mark.parametrize("command", [["serve"], ["run", "--", "true"], ["ps"]])
def test_a_path_that_is_too_long_for_a_socket_is_one_clear_line(tmp_path, command):
    long = str(tmp_path / ("x" * 120))
    done = salus(*command, SALUS_SOCKET=long, SALUS_STATE_DIR=str(tmp_path / "state"))
    assert (done.returncode, done.stderr) == (
        2,
        f"salus: {long}: is too long for a socket; set SALUS_SOCKET to a shorter path\n",
    )


def test_a_folder_that_others_use_is_neither_closed_nor_used(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    (shared / "theirs").touch()
    done = salus("serve", SALUS_RUNTIME_DIR=str(tmp_path / "run"), SALUS_STATE_DIR=str(shared))
    assert done.returncode == 2 and "is open to other users" in done.stderr and "SALUS_STATE_DIR" in done.stderr
    assert shared.stat().st_mode & 0o777 == 0o755


def test_the_folder_of_a_socket_that_was_named_stays_as_it_is(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    (shared / "theirs").touch()
    monkeypatch.setenv("SALUS_SOCKET", str(shared / "service.sock"))
    assert not prepare_for_socket(shared / "service.sock")
    assert shared.stat().st_mode & 0o777 == 0o755
    assert prepare_for_socket(tmp_path / "new" / "service.sock"), "one that was not there is ours"
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_what_nobody_else_has_a_use_for_is_closed(tmp_path):
    for name, holds in (("empty", []), ("ours", ["service.sock", "service.sock.lock", "mps0"])):
        folder = tmp_path / name
        folder.mkdir(mode=0o755)
        for entry in holds:
            (folder / entry).touch()
        take_over(folder, "SALUS_RUNTIME_DIR")
        assert folder.stat().st_mode & 0o777 == 0o700


def test_what_cannot_be_made_is_said_with_the_setting_that_names_it():
    with pytest.raises(RequestRejected, match="SALUS_RUNTIME_DIR"):
        make_private(Path("/proc/nowhere"), "SALUS_RUNTIME_DIR")


def test_a_socket_that_is_there_or_is_not_is_fine(tmp_path):
    check_socket(tmp_path / "none")
    with pytest.raises(RequestRejected, match="is no socket"):
        ServiceConnection(tmp_path)


def test_a_folder_in_which_nothing_can_be_kept_is_a_fault_to_doctor(tmp_path):
    done = salus("doctor", SALUS_RUNTIME_DIR=str(tmp_path / "run"), SALUS_STATE_DIR="/proc/nowhere")
    assert done.returncode == 1
    assert "✗" in next(line for line in done.stdout.splitlines() if "/proc/nowhere" in line)


def test_why_a_service_that_was_started_for_a_job_could_not_is_said(tmp_path):
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / "jobs.sqlite").write_bytes(b"this is no database" * 100)
    done = salus("run", "--", "true", SALUS_RUNTIME_DIR=str(tmp_path / "run"), SALUS_STATE_DIR=str(state))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "has ended" in done.stderr and "jobs.sqlite" in done.stderr and "move the file away" in done.stderr


@pytest.mark.parametrize("name", ["theirs.lock", "link.lock"])
def test_a_file_where_the_lock_should_be_is_left_alone(tmp_path, name):
    precious = tmp_path / "theirs.lock"
    precious.write_text("precious")
    (tmp_path / "link.lock").symlink_to(precious)
    socket_of_it = str(tmp_path / name.removesuffix(".lock"))
    done = salus("serve", SALUS_SOCKET=socket_of_it, SALUS_STATE_DIR=str(tmp_path / "state"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and name in done.stderr
    assert precious.read_text() == "precious"


def test_another_programs_socket_is_left_alone(tmp_path):
    path = tmp_path / "theirs"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as theirs:
        theirs.bind(str(path))
        theirs.listen()
        before = path.stat().st_ino
        done = salus("run", "--", "true", SALUS_SOCKET=str(path), SALUS_STATE_DIR=str(tmp_path / "state"))
        assert done.returncode == 2 and "is another program's socket" in done.stderr
        assert path.stat().st_ino == before


def test_a_private_folder_with_other_things_in_it_is_not_opened_for_others(tmp_path):
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    (own / "diary").touch()
    done = salus("serve", "--users", "all", SALUS_RUNTIME_DIR=str(own), SALUS_STATE_DIR=str(tmp_path / "state"))
    assert done.returncode == 2 and "others cannot reach" in done.stderr
    assert own.stat().st_mode & 0o777 == 0o700


def test_a_file_where_the_state_should_be_is_one_clear_line(tmp_path):
    (tmp_path / "state").touch()
    for command in (["serve"], ["submit", "--", "true"]):
        done = salus(*command, SALUS_RUNTIME_DIR=str(tmp_path / "run"), SALUS_STATE_DIR=str(tmp_path / "state"))
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr


def test_a_socket_that_comes_and_goes_is_no_fault(tmp_path, monkeypatch):
    """A service that is started again takes the old one away and makes a new one, while jobs look for it."""
    monkeypatch.setattr(os.path, "exists", lambda _: True)
    check_socket(tmp_path / "gone")


def test_the_same_name_in_another_folder_is_another_socket(tmp_path, monkeypatch):
    monkeypatch.setenv("SALUS_SOCKET", "s.sock")
    monkeypatch.chdir(tmp_path)
    assert socket_path() == tmp_path / "s.sock"


def test_a_state_directory_is_the_same_from_anywhere(tmp_path, monkeypatch):
    """The log of a job is in there, and is asked for from another folder."""
    monkeypatch.setenv("SALUS_STATE_DIR", "state")
    monkeypatch.chdir(tmp_path)
    assert state_dir() == tmp_path / "state"
