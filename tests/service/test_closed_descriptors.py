"""Scripts that close every descriptor they do not know, daemonize, or were started without stdin, stdout or stderr."""

from __future__ import annotations

import sys

import pytest

from tests.service.harness import Service, eventually

ITERATE = """
import os, sys
import salus

def iterate(times):
    for _ in range(times):
        with salus.iteration():
            pass
"""
CLOSES_ALL = """
iterate(5)
os.closerange(3, 4096)
# Files of its own get the numbers that were free, and those that ours had.
theirs = [os.open(f"{sys.argv[1]}/{number}", os.O_CREAT | os.O_RDWR) for number in range(20)]
for number in range(600, 1000):
    os.dup2(theirs[0], number)
iterate(5)
child = os.fork()
if child == 0:
    os.fstat(theirs[0]), os.fstat(700), os.fstat(701), os.fstat(702)
    iterate(5)
    os._exit(0)
status = os.waitpid(child, 0)[1]
assert status == 0, status
iterate(5)
for number in theirs:
    assert os.fstat(number).st_size == 0, "something was written to a file of the script"
print("finished")
"""
DAEMON = """
iterate(0)
reader, writer = os.pipe()
if os.fork():
    os.close(writer)
    sys.exit(0 if os.read(reader, 1) == b"x" else 1)
os.setsid()
for number in (0, 1, 2):
    os.close(number)
for number in range(3, 1024):
    if number != writer:
        try:
            os.close(number)
        except OSError:
            pass
for _ in range(3):
    os.open("/dev/null", os.O_RDWR)
iterate(25)
os.write(writer, b"x")
"""

LOOKS_AT_LOW_NUMBERS = """
iterate(9)
found = []
for number in range(64):
    try:
        found.append(os.readlink(f"/proc/self/fd/{number}"))
    except OSError:
        pass
open(sys.argv[1], "w").write(" ".join(found))
"""


@pytest.fixture
def service(serve) -> Service:
    started = serve()
    del started.environment["PYTHONPATH"]
    return started


def test_a_script_that_closes_what_it_did_not_open_goes_on_and_finds_nothing_in_its_files(service, tmp_path):
    script = service.folder / "script.py"
    script.write_text(ITERATE + CLOSES_ALL)
    (tmp_path / "theirs").mkdir()
    done = service.salus("run", "--name", "j", "--", sys.executable, str(script), str(tmp_path / "theirs"))
    assert (done.returncode, done.stdout) == (0, "finished\n"), done.stderr
    assert "Traceback" not in done.stderr and "Error" not in done.stderr


def test_a_daemon_is_managed_after_it_has_closed_everything(service):
    script = service.folder / "script.py"
    script.write_text(ITERATE + DAEMON)
    done = service.salus("run", "--name", "j", "--", sys.executable, str(script))
    assert (done.returncode, done.stderr) == (0, "")
    assert eventually(lambda: service.jobs()["j"]["iterations"] == 25, "its iterations are counted")


@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&- 2>&-"])
def test_in_a_script_without_standard_streams_none_of_ours_has_their_numbers(service, closed, tmp_path):
    """What the script writes to its stderr would go to the service."""
    script, low = service.folder / "script.py", tmp_path / "low"
    script.write_text(ITERATE + LOOKS_AT_LOW_NUMBERS)
    line = f'exec "$0" "$1" "$2" {closed}'
    done = service.salus("run", "--name", "j", "--", "sh", "-c", line, sys.executable, str(script), str(low))
    assert done.returncode == 0
    assert service.jobs()["j"]["iterations"] == 9
    assert "socket" not in low.read_text() and "event" not in low.read_text()
