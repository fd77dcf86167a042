"""The machine-wide service: when commands use it, and whose socket they speak to."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from salus import machine
from salus.client.connection import ServiceConnection
from salus.errors import NoService, RequestRejected
from salus.paths import own_socket_path, socket_path

STRANGER = 4242
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The machine's folders, in the test's own; the state of a user who has set nothing."""
    for name in [name for name in os.environ if name.startswith("SALUS_")]:
        monkeypatch.delenv(name)
    for name, folder in (("RUNTIME", "run"), ("STATE", "var"), ("CONFIG", "etc")):
        monkeypatch.setenv(f"SALUS_SYSTEM_{name}_DIR", str(tmp_path / folder))
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(machine, "_turned_away", False)
    return tmp_path


def put_a_socket(path: Path) -> socket.socket:
    path.parent.mkdir(exist_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()
    return listener


def test_commands_use_the_machine_wide_service_where_it_is_there_and_their_own_elsewhere(places, monkeypatch):
    assert socket_path() == own_socket_path() == places / "salus" / "service.sock"
    with put_a_socket(machine.socket_path()):
        assert socket_path() == machine.socket_path()
        monkeypatch.setenv("SALUS_SERVICE", "own")
        assert socket_path() == own_socket_path()
        monkeypatch.delenv("SALUS_SERVICE")
        monkeypatch.setenv("SALUS_RUNTIME_DIR", str(places / "mine"))
        assert socket_path() == places / "mine" / "service.sock"
        monkeypatch.setenv("SALUS_SERVICE", "system")
        assert socket_path() == machine.socket_path()
        monkeypatch.setenv("SALUS_SOCKET", str(places / "named.sock"))
        assert socket_path() == places / "named.sock"


def test_one_that_is_installed_is_used_also_while_it_is_stopped(places):
    machine.mark().touch()
    assert socket_path() == machine.socket_path()
    with pytest.raises(NoService, match=r"^the machine-wide service .* does not run; an administrator starts it"):
        ServiceConnection(socket_path())


def test_a_user_whom_it_does_not_let_in_has_their_own(places):
    machine.mark().touch()
    machine.turned_away()
    assert socket_path() == own_socket_path()


def test_another_word_for_which_service_to_use_is_refused(places, monkeypatch):
    monkeypatch.setenv("SALUS_SERVICE", "mine")
    with pytest.raises(
        RequestRejected, match=r"^SALUS_SERVICE: 'mine' is not understood; expected auto, own or system"
    ):
        socket_path()


def may_serve(path: Path, uid: int) -> bool:
    try:
        machine.check_server(path, uid, own_socket_path().parent)
    except RequestRejected:
        return False
    return True


def test_root_and_oneself_may_be_behind_any_socket_and_a_stranger_behind_none(places):
    named = places / "named" / "service.sock"
    named.parent.mkdir()
    own_socket_path().parent.mkdir()
    for path in (named, machine.socket_path(), own_socket_path(), places / "not-there" / "service.sock"):
        assert may_serve(path, 0) and may_serve(path, os.getuid())
        assert not may_serve(path, STRANGER)


@needs_root
def test_the_owner_of_a_folder_that_the_user_named_may_serve_there(places):
    named = places / "named" / "service.sock"
    named.parent.mkdir(mode=0o755)
    os.chown(named.parent, STRANGER, STRANGER)
    assert may_serve(named, STRANGER) and not may_serve(named, STRANGER + 1)
    named.parent.chmod(0o777)
    assert not may_serve(named, STRANGER), "anybody could have put a socket there"


@needs_root
def test_in_the_users_own_folder_no_stranger_may_serve_though_the_folder_is_theirs(places):
    """In /tmp a stranger may have been the first to make it."""
    own_socket_path().parent.mkdir()
    os.chown(own_socket_path().parent, STRANGER, STRANGER)
    assert not may_serve(own_socket_path(), STRANGER)


@needs_root
def test_the_dedicated_user_may_serve_where_root_has_made_the_folder(places):
    os.chown(machine.runtime_dir(), STRANGER, STRANGER)
    places.chmod(0o755)
    assert may_serve(machine.socket_path(), STRANGER)
    places.chmod(0o777)
    assert not may_serve(machine.socket_path(), STRANGER), "a stranger could have made it"
    places.chmod(0o755)
    os.chown(places, STRANGER, STRANGER)
    assert not may_serve(machine.socket_path(), STRANGER), "a stranger could have made it"
    os.chown(places, 0, 0)
    machine.runtime_dir().chmod(0o775)
    assert not may_serve(machine.socket_path(), STRANGER), "others may put a socket there"


def test_a_link_is_no_folder_of_the_machine(places):
    machine.runtime_dir().rmdir()
    (places / "elsewhere").mkdir()
    machine.runtime_dir().symlink_to(places / "elsewhere")
    assert not may_serve(machine.socket_path(), STRANGER)
    with pytest.raises(RequestRejected, match="run"):
        machine.prepare_runtime_dir()


@needs_root
def test_the_folder_of_another_user_is_not_served_in(places):
    os.chown(machine.runtime_dir(), STRANGER, STRANGER)
    with pytest.raises(RequestRejected, match=f"belongs to user {STRANGER}; run the service as that user"):
        machine.prepare_runtime_dir()


@needs_root
def test_code_that_others_could_change_is_found(places):
    code = places / "venv" / "python"
    code.parent.mkdir()
    code.touch()
    assert machine.writable_by_others(code) is None
    code.chmod(0o666)
    assert machine.writable_by_others(code) == code
    code.chmod(0o644)
    os.chown(code.parent, STRANGER, STRANGER)
    assert machine.writable_by_others(code) == code.parent
