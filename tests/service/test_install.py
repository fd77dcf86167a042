"""`salus install-service`: the unit, what is said about it, and taking it away again."""

from __future__ import annotations

import configparser
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from salus.service.systemd import tell_systemd


@pytest.fixture
def installer(serve, tmp_path):
    service = serve(start=False)
    service.environment |= {
        "SALUS_SYSTEM_UNIT_DIR": str(tmp_path / "units"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    return service


def unit(text: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(text)
    return parser


def test_a_unit_for_the_machine_is_written_marked_and_taken_away_again(installer, tmp_path):
    done = installer.salus("install-service", "--system")
    assert done.returncode == 0
    file, mark = (
        tmp_path / "units" / "salus.service",
        Path(installer.environment["SALUS_SYSTEM_CONFIG_DIR"]) / "machine-wide",
    )
    said = done.stdout.splitlines()
    assert said[0] == f"wrote {file}" and said[1].startswith(f"wrote {mark}: the commands of all users")
    assert "  systemctl daemon-reload && systemctl enable --now salus" in said
    service = unit(file.read_text())["Service"]
    assert service["ExecStart"] == f"{sys.executable} -m salus serve --system" and "User" not in service
    assert service["RuntimeDirectory"] == service["StateDirectory"] == "salus" and service["Type"] == "notify"
    assert service["RuntimeDirectoryPreserve"] == "restart", "jobs wait for a service whose socket is there"
    assert mark.stat().st_mode & 0o777 == 0o644
    done = installer.salus("install-service", "--system", "--remove")
    assert done.stdout.startswith(f"removed {file}\nremoved {mark}\n") and "disable --now" in done.stdout
    assert not file.exists() and not mark.exists()
    again = installer.salus("install-service", "--system", "--remove")
    assert (again.returncode, again.stderr) == (2, f"salus: {file}: nothing is installed\n")


def test_a_unit_of_ones_own_needs_no_root_and_marks_nothing(installer, tmp_path):
    done = installer.salus("install-service", "--user")
    file = tmp_path / "config" / "systemd" / "user" / "salus.service"
    assert done.returncode == 0 and done.stdout.startswith(f"wrote {file}\n") and "systemctl --user" in done.stdout
    assert unit(file.read_text())["Service"]["ExecStart"].endswith("-m salus serve")
    assert not (Path(installer.environment["SALUS_SYSTEM_CONFIG_DIR"]) / "machine-wide").exists()


def test_a_unit_can_be_looked_at_first(installer, tmp_path):
    done = installer.salus("install-service", "--system", "--print", "--run-as", "nobody")
    assert unit(done.stdout)["Service"]["User"] == "nobody" and not (tmp_path / "units").exists()


def test_what_cannot_be_is_one_clear_line(installer):
    for options, complaint in (
        (("--user", "--system"), "--user, --system: leave one of the two out"),
        (("--user", "--run-as", "nobody"), "--run-as: a service of your own runs as you"),
        (("--system", "--run-as", "no-such-user"), "--run-as: there is no user 'no-such-user' here; make one: useradd"),
    ):
        done = installer.salus("install-service", *options)
        assert done.returncode == 2 and complaint in done.stderr and done.stderr.count("\n") == 1
    installer.environment["SALUS_SYSTEM_UNIT_DIR"] = "/proc/nowhere"
    done = installer.salus("install-service", "--system")
    assert done.returncode == 2 and "/proc/nowhere/salus.service: cannot be written" in done.stderr


@pytest.mark.skipif(Path("/run/systemd/system").is_dir(), reason="systemd runs this machine")
def test_without_systemd_it_says_how_to_start_the_service_by_hand(serve):
    for whose, by_hand in (("--system", "salus serve --system"), ("--user", "salus serve")):
        done = serve(start=False).salus("install-service", whose)
        assert (done.returncode, done.stderr) == (
            2,
            f"salus: systemd does not run this machine; start the service by hand ({by_hand})\n",
        )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here to judge the units")
@pytest.mark.parametrize("whose", ["--system", "--user"])
def test_systemd_finds_no_fault_with_the_units(installer, tmp_path, whose):
    file = tmp_path / "salus.service"
    file.write_text(installer.salus("install-service", whose, "--print").stdout)
    options = ["--user"] if whose == "--user" else []
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    command = ["systemd-analyze", *options, "verify", "--recursive-errors=no", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    complaints = [line for line in done.stderr.splitlines() if "salus.service" in line]
    assert not complaints, done.stderr


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told_when_the_service_is_ready(tmp_path, monkeypatch, abstract):
    address = f"\0salus-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        listener.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", address.replace("\0", "@"))
        tell_systemd("READY=1")
        assert listener.recv(100) == b"READY=1"
    tell_systemd("READY=1")  # nobody listens any more: no fault
    monkeypatch.setenv("NOTIFY_SOCKET", "nonsense")
    tell_systemd("READY=1")
