"""Where the options of Salus end and those of the job's command begin."""

from __future__ import annotations

import json
import sys

import pytest

PRINT = (sys.executable, "-c", "import sys; print(sys.argv[1:])")


@pytest.mark.parametrize("between", [(), ("--",)])
def test_options_after_the_command_belong_to_the_command(serve, between):
    service = serve()
    done = service.salus("run", "--weight", "2", *between, *PRINT, "--name", "x", "--weight", "3", "--nonsense", "-h")
    assert done.stdout == "['--name', 'x', '--weight', '3', '--nonsense', '-h']\n", done.stderr
    (row,) = service.jobs().values()
    assert (row["weight"], row["name"]) == (2.0, "python")


def test_a_double_dash_after_the_command_reaches_the_command(serve):
    service = serve()
    assert service.salus("run", *PRINT, "a", "--", "b").stdout == "['a', '--', 'b']\n"
    assert service.salus("run", "--", *PRINT, "--", "b").stdout == "['--', 'b']\n"


def test_a_submitted_command_keeps_its_options(serve):
    service = serve()
    job_id = service.salus("submit", "--name", "night", *PRINT, "--name", "x").stdout.strip()
    assert service.salus("wait", job_id).returncode == 0
    assert service.salus("logs", job_id).stdout == "['--name', 'x']\n"
    (row,) = json.loads(service.salus("ps", "--all", "--json").stdout)
    assert row["name"] == "night"


@pytest.mark.parametrize("command", ["run", "submit"])
def test_an_unknown_option_before_the_command_is_still_an_error(serve, command):
    done = serve(start=False).salus(command, "--nmae", "x", "true")
    assert done.returncode == 2
    assert "No such option: --nmae" in done.stderr and done.stderr.count("\n") == 1
