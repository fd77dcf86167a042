"""Every command, in every situation that a user may be in: clean output or one clear line, a status, no traceback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from salus.cli.main import app
from tests.service.harness import Service, eventually

OTHER_UID = 65534
RUNNER = Path(__file__).parent / "runner.py"
ANOTHER_USER = ("another user's service", "turned away")
"""The user may not even open the socket; or may, and is refused there."""
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
REFUSED = ("--device", "moon")

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "run": ("run", "true"),
    "submit": ("submit", "true"),
    "ps": ("ps", "--all"),
    "usage": ("usage",),
    "top": ("top", "--once", "--interval", "50ms"),
    "logs": ("logs", "1"),
    "wait": ("wait", "1"),
    "cancel": ("cancel", "1"),
    "set": ("set", "1", "--weight", "2"),
    "pause": ("pause", "1"),
    "resume": ("resume", "1"),
    "policy": ("policy",),
    "serve": ("serve", "--quantum", "20"),
    "doctor": ("doctor",),
    "simulate": ("simulate", "--generate", "3"),
    "demo": ("demo", *REFUSED),
    "replay": ("replay", "nowhere.jsonl"),
    "clean": ("clean", "--dry-run"),
    "marks": ("marks",),
    "install-service": ("install-service", "--user", "--print"),
    "install-hook": ("install-hook", "--python", "/nowhere/python"),
    "config": ("config",),
    "config set": ("config", "set", "service.policy", "nonsense"),
    "config unset": ("config", "unset", "nonsense"),
    "config path": ("config", "path"),
    "bench switch": ("bench", "switch", *REFUSED),
    "bench hooks": ("bench", "hooks", *REFUSED),
    "bench arena": ("bench", "arena", *REFUSED),
    "bench crowd": ("bench", "crowd", "--jobs", "0"),
    "bench sharing": ("bench", "sharing", "--seconds", "0"),
    "bench overhead": ("bench", "overhead", *REFUSED),
    "bench fairness": ("bench", "fairness", *REFUSED),
    "bench jct": ("bench", "jct", *REFUSED),
    "bench preemption": ("bench", "preemption", *REFUSED),
    "bench pair": ("bench", "pair", *REFUSED),
    "bench memory": ("bench", "memory", *REFUSED),
    "bench paging": ("bench", "paging", *REFUSED),
    "bench tuning": ("bench", "tuning", *REFUSED),
    "bench report": ("bench", "report", "--results", "nowhere"),
}
"""How each command is called here: something that ends by itself within seconds."""
PRINTS = ("run", "submit", "ps", "top", "logs", "policy", "doctor", "simulate", "config")
"""Commands that print to stdout where there is a service and job 1 has ended."""


def commands() -> list[str]:
    """All that the program has, also those that were added after this was written."""
    found = []
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        below = getattr(command, "commands", None)
        alone = below is None or command.invoke_without_command
        found += [name] * alone + [f"{name} {other}" for other in below or ()]
    return found


def test_every_command_is_swept():
    assert set(ARGUMENTS) == set(commands()), "write down above how the command is called in the sweep"


@pytest.fixture(scope="module")
def shared() -> Iterator[Callable[..., Service]]:
    """Services in folders that other users can reach."""
    services: list[Service] = []
    folders = []

    def start(*options: str, start: bool = True) -> Service:
        folder = Path(tempfile.mkdtemp(prefix="salus-sweep-"))
        folder.chmod(0o755)
        folders.append(folder)
        services.append(Service(folder, *options, start=start))
        return services[-1]

    yield start
    for service in services:
        service.stop()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def swept(shared: Callable[..., Service]) -> Callable[[str], dict[str, dict[str, Any]]]:
    """What every command does in a situation, by command."""
    known: dict[str, dict[str, dict[str, Any]]] = {}

    def sweep(situation: str) -> dict[str, dict[str, Any]]:
        if situation not in known:
            known[situation] = _sweep(situation, shared)
        return known[situation]

    return sweep


def _sweep(situation: str, shared: Callable[..., Service]) -> dict[str, dict[str, Any]]:
    options = ("--users", "1") if situation == "turned away" else ()
    service = shared(*options, start=situation != "no service")
    environment = dict(service.environment)
    if situation in ("ascii", "closed stdout", "full output", "no jobs"):
        # Job 1 has ended. A name that is not ASCII has to be shown somehow.
        name = "ü…✓" if situation == "ascii" else "first"
        assert service.salus("submit", "--name", name, "--", "echo", "hello").stdout == "1\n"
        eventually(lambda: not service.jobs(everything=False), "job 1 ended")
    if situation in ANOTHER_USER:
        environment["SALUS_SOCKET"] = str(service.socket)
        environment["SALUS_STATE_DIR"] = "/nowhere"
    case = {
        "environment": environment,
        "directory": str(service.folder),
        "deleted": situation == "deleted directory",
        "uid": OTHER_UID if situation in ANOTHER_USER else 0,
        "stdout": {"closed stdout": "closed", "full output": "full"}.get(situation, "open"),
        "encoding": "ascii" if situation == "ascii" else "utf-8",
    }
    # Those that start a service come last.
    order = sorted(commands(), key=lambda command: command in ("run", "submit"))
    results = run_cases(service, [{**case, "arguments": ARGUMENTS[command]} for command in order])
    return dict(zip(order, results, strict=True))


def run_cases(service: Service, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(RUNNER)],
        env=service.environment,
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def is_clear(command: str, result: dict[str, Any]) -> bool:
    """Clean output, or one line that says what is wrong."""
    lines = result["err"].splitlines()
    if result["status"] == 0 or (command == "doctor" and result["status"] == 1):
        return all(line.startswith("salus: ") for line in lines)
    return len(lines) == 1 and lines[0].startswith("salus: ") and len(lines[0]) > len("salus: ") + 10


@pytest.mark.parametrize("command", commands())
@pytest.mark.parametrize(
    "situation",
    [
        "no service",
        "an empty service",
        "no jobs",
        "closed stdout",
        "ascii",
        "deleted directory",
        "full output",
        *(pytest.param(situation, marks=needs_root) for situation in ANOTHER_USER),
    ],
)
def test_a_command_ends_with_clean_output_or_one_clear_line(swept, situation, command):
    result = swept(situation)[command]
    told = result["out"] + result["err"]
    assert "Traceback" not in told and "Exception ignored" not in told, told
    assert result["status"] in (0, 1, 2), result
    assert is_clear(command, result), result
    if situation == "ascii":
        assert told.isascii(), told
    if situation == "full output" and command in PRINTS and command != "run":
        assert result["status"] == 2 and "the output cannot be written (No space left on device)" in result["err"]
    if situation == "closed stdout" and command in PRINTS:
        assert (result["status"], result["out"], result["err"]) == (0, "", ""), result
    if situation == "no service" and command in ("ps", "run", "submit"):
        assert result["status"] == 0, "these need no service that runs already"
    if situation == "deleted directory" and command in PRINTS and command != "logs":
        assert result["status"] == 0, "what needs no working directory works without one"


def _one(service: Service, *arguments: str, **case: Any) -> dict[str, Any]:
    usual = {"deleted": False, "uid": 0, "stdout": "open", "encoding": "utf-8", "directory": str(service.folder)}
    (result,) = run_cases(service, [{"environment": service.environment, **usual, "arguments": arguments, **case}])
    return result


@needs_root
def test_the_output_of_another_users_job_is_refused_in_one_line(shared):
    service = shared("--users", "all", "--visible")
    job = service.salus("submit", "--", "echo", "secret").stdout.strip()
    eventually(lambda: not service.jobs(everything=False), "the job ended")
    environment = {**service.environment, "SALUS_SOCKET": str(service.socket)}
    result = _one(service, "logs", job, uid=OTHER_UID, environment=environment)
    assert (result["status"], result["out"]) == (2, ""), result
    assert result["err"].count("\n") == 1
    assert f"the output of job {job}, which is root's, cannot be read here (Permission denied)" in result["err"]


def test_a_file_that_is_named_relative_to_a_deleted_directory_is_an_error_that_says_so(shared):
    result = _one(shared(start=False), "simulate", "--generate", "3", "--save-trace", "x.csv", deleted=True)
    assert result["status"] == 2
    assert result["err"] == (
        "salus: the working directory was deleted; go to another one, or name files with their whole path\n"
    )


def test_a_job_runs_in_a_deleted_directory_if_it_can_do_without(shared):
    result = _one(shared(), "run", "echo", "hello", deleted=True)
    assert (result["status"], result["out"], result["err"]) == (0, "hello\n", "")


@pytest.mark.parametrize("command", [("--help",), ("--version",), ("ps", "--all"), ("bench",)])
def test_an_interpreter_of_its_own_says_nothing_at_its_end_about_a_full_device(shared, command):
    service = shared(start=False)
    for unbuffered in ("", "1"):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [sys.executable, "-m", "salus", *command],
                env={**service.environment, "PYTHONUNBUFFERED": unbuffered},
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
                timeout=60,
            )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1 and "cannot be written" in done.stderr


def test_a_reader_that_goes_away_ends_a_command_without_a_word(shared):
    service = shared(start=False)
    process = subprocess.Popen(
        [sys.executable, "-m", "salus", "--help"],
        env=service.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", 141)


@pytest.mark.parametrize("command", [(), ("bench",)])
def test_without_arguments_the_program_shows_its_help_and_ends_well(shared, command):
    done = shared(start=False).salus(*command)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage:" in done.stdout and "Commands" in done.stdout


def test_a_job_finds_its_standard_output_closed_where_the_caller_closed_it(shared):
    service = shared()
    code = "import sys; sys.exit(7 if sys.stdout is None else 0)"
    result = _one(service, "run", sys.executable, "-c", code, stdout="closed")
    assert result["status"] == 7, result
