"""Jobs that Salus cannot see: what the command shows before it starts, and what a look at its processes shows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from salus.client import unseen
from salus.client.unseen import Cause, Unseen, cause_of, foreseen, options_of_python
from salus.protocol.page import Page

BOOTSTRAP = "/salus/adaptors/bootstrap/sitecustomize.py"
WHOLE = {"SALUS_JOB": "1", "SALUS_BOOTSTRAP": BOOTSTRAP, "PYTHONPATH": "/salus/adaptors/bootstrap:/mine"}
WAITS = "import sys; {}; print('ready', flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def no_hook(monkeypatch):
    monkeypatch.setattr(unseen, "is_hooked", lambda _python: False)


@pytest.mark.parametrize(
    ("command", "letters"),
    [
        ("python -I s.py", "I"),
        ("/usr/bin/python3.12 -uE -W ignore -S s.py", "uEWS"),
        ("python3 -Wignore -Xdev -m pkg -I", "WXm"),
        ("python3.13t -c pass -I", "c"),
        ("python s.py -I", ""),
        ("python -- -I", ""),
        ("bash -I", ""),
        ("torchrun -I", ""),
    ],
)
def test_options_of_python_are_those_before_the_script(command, letters):
    assert options_of_python(command.split()) == set(letters)


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        ("python -I s.py", Cause.ISOLATED),
        ("python -Eu s.py", Cause.NO_ENVIRONMENT),
        ("python -IS s.py", Cause.NO_SITE),
        ("env A=1 -u B python -I s.py", Cause.ISOLATED),
        ("env -i python s.py", Cause.CLEARED),
        ("env - A=1 python s.py", Cause.CLEARED),
        ("sudo -u me python s.py", Cause.CLEARED),
        ("env A=1 python s.py -i", None),
        ("python -u s.py", None),
        ("bash -c true", None),
        ("env", None),
    ],
)
def test_what_the_command_shows_is_known_before_it_starts(command, cause):
    assert foreseen(command.split()) is cause


def test_the_hook_is_found_next_to_the_packages_of_that_python(tmp_path, monkeypatch):
    monkeypatch.undo()
    for name in ("one", "other"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "pyvenv.cfg").touch()
        (tmp_path / name / "bin" / "python").symlink_to(sys.executable)
        (tmp_path / name / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    (tmp_path / "one" / "lib" / "python3.11" / "site-packages" / unseen.HOOK).touch()
    assert unseen.is_hooked(str(tmp_path / "one" / "bin" / "python"))
    assert not unseen.is_hooked(str(tmp_path / "other" / "bin" / "python"))
    assert not unseen.is_hooked(str(tmp_path / "one" / "bin" / "nothing"))
    assert not unseen.is_hooked("/bin/sh")


def test_a_python_with_the_hook_may_be_isolated_but_not_without_site(monkeypatch):
    monkeypatch.setattr(unseen, "is_hooked", lambda python: python == "/hooked/python")
    assert foreseen(["/hooked/python", "-I", "s.py"]) is None
    assert foreseen(["/other/python", "-I", "s.py"]) is Cause.ISOLATED
    assert foreseen(["/hooked/python", "-S", "s.py"]) is Cause.NO_SITE


@pytest.mark.parametrize(
    ("environment", "cause"),
    [
        (WHOLE, Cause.NO_ITERATION),
        ({}, Cause.CLEARED),
        ({**WHOLE, "PYTHONPATH": "/mine"}, Cause.REPLACED),
        ({key: value for key, value in WHOLE.items() if key != "PYTHONPATH"}, Cause.REPLACED),
        (None, Cause.NO_ITERATION),
    ],
)
def test_the_environment_of_a_process_shows_why_it_did_not_come(environment, cause):
    assert cause_of(["python", "s.py"], environment) is cause


@pytest.fixture
def start() -> Iterator:
    """Starts a Python that runs some code, and then waits; with an environment of its own."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str, environment: dict[str, str], *options: str) -> int:
        command = [sys.executable, *options, "-c", WAITS.format(code)]
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=()
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process.pid

    yield run
    for process in started:
        process.communicate()


def told(capsys, pids: Sequence[int], *, status: int = 0, came: bool = False, on_gpu: bool = False) -> str:
    job = Unseen("3", ["bash", "s.sh"], on_gpu=on_gpu)
    job.look(pids)
    job.tell(status, came=came)
    return capsys.readouterr().err


def test_a_job_whose_python_was_isolated_is_named_at_its_end_and_once(capsys, start):
    pytest.importorskip("torch")
    pid = start("import torch", WHOLE, "-I")
    said = told(capsys, [pid, pid])
    assert said == (
        "salus: job 3 ran without Salus: python was started with -I, which hides PYTHONPATH and so Salus from it; "
        f"leave -I out, or run once: salus install-hook --python {sys.executable}\n"
    )
    assert told(capsys, [pid], came=True) == "", "the service knows better"
    assert told(capsys, [pid], status=1) == said, "also if it failed"


def test_a_job_without_an_iteration_is_named_if_it_could_have_had_one(capsys, start):
    pytest.importorskip("torch")
    pid = start("import torch", WHOLE)
    assert "no iteration was seen" in told(capsys, [pid])
    assert told(capsys, [pid], status=1) == "", "it failed before that"
    assert told(capsys, [pid], on_gpu=True) == "", "it computes on the processor"


def test_a_job_that_uses_neither_torch_nor_a_gpu_is_not_named(capsys, start):
    assert told(capsys, [start("pass", {})]) == ""


def test_a_process_that_uses_a_gpu_is_named_whatever_its_framework(capsys, start, tmp_path, monkeypatch):
    device = tmp_path / "nvidia-uvm"
    device.touch()
    monkeypatch.setattr(unseen, "GPU_FILE", str(device))
    pid = start(f"kept = open({str(device)!r})", WHOLE)
    assert "no iteration was seen" in told(capsys, [pid], on_gpu=True)


def test_a_process_that_has_been_given_a_page_is_seen():
    page, descriptor = Page.create()
    job = Unseen("3", ["bash", "s.sh"], on_gpu=False)
    child = subprocess.Popen(
        [sys.executable, "-c", WAITS.format(f"import mmap; kept = mmap.mmap({descriptor}, 4096)")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[descriptor],
    )  # fmt: skip
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        assert job.look([child.pid])
    finally:
        child.communicate()
        page.close()


def test_processes_that_are_gone_are_no_error(capsys):
    assert told(capsys, [2**22 + 1]) == ""


def test_the_sources_agree_on_the_name_of_the_page():
    page = (Path(unseen.__file__).parent.parent / "protocol" / "page.py").read_text()
    assert unseen.PAGE.decode().removeprefix("/memfd:") in page
