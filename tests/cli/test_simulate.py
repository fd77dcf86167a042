"""`salus simulate` and its neighbours as a person at a terminal meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def salus(*arguments: str | Path, **more) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "salus", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **more)


def test_json_is_the_only_thing_on_stdout_and_has_every_measure():
    done = salus("simulate", "--generate", "30", "--policy", "fifo,srtf", "--seed", "2", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    policies = json.loads(done.stdout)["policies"]
    assert list(policies) == ["fifo", "srtf"]
    for summary in policies.values():
        assert set(summary) == {"makespan_s", "avg_queuing_s", "avg_jct_s", "p95_jct_s", "utilization", "jobs"}
        assert summary["jobs"] == 30
        assert 0 < summary["utilization"] <= 1


def test_the_table_has_a_row_for_each_policy_also_with_parameters():
    done = salus("simulate", "--generate", "20", "--policy", "fair:by=memory,patience=60,srtf:fill=off,pack")
    assert done.returncode == 0, done.stderr
    for name in ("fair:by=memory,patience=60", "srtf:fill=off", "pack", "makespan", "avg JCT", "GPU utilization"):
        assert name in done.stdout


def test_a_plot_a_timeline_and_the_trace_are_written(tmp_path):
    plot, timeline, trace = tmp_path / "p.png", tmp_path / "t.html", tmp_path / "t.csv"
    made = salus(
        "simulate", "--generate", "15", "--plot", plot, "--timeline", timeline, "--save-trace", trace, "--json"
    )
    assert made.returncode == 0, made.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    page = timeline.read_text()
    assert '"policy":"srtf"' in page
    assert "http://" not in page and "https://" not in page, "it opens without a network"
    again = salus("simulate", trace, "--json")
    assert json.loads(again.stdout) == json.loads(made.stdout)


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others():
    first, second, other = (
        salus("simulate", "--generate", "20", "--seed", seed, "--json", "--policy", "fair").stdout for seed in "113"
    )
    assert first == second != other


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere.csv"], "nowhere.csv: there is no such file"),
        ([], "either a TRACE.csv or --generate N"),
        (["t.csv", "--generate", "3"], "either a TRACE.csv or --generate N"),
        (["--generate", "0"], "--generate: 0 is too few"),
        (["--generate", "3", "--policy", "fare"], "there is no policy 'fare'; there are: fair, fifo"),
        (["--generate", "3", "--policy", "fair:by=x"], "policy fair: by='x' is not understood"),
        (["--generate", "3", "--policy", ","], "--policy: expected at least one"),
        (["--generate", "3", "--memory", "much"], "--memory: 'much' is not a size"),
        (["--generate", "3", "--memory", "0"], "--memory: 0 is no GPU"),
        (["--generate", "90", "--memory", "8GiB"], "expected a GPU that it fits on"),
        (["--generate", "3", "--quantum", "soon"], "--quantum: 'soon' is not a time"),
        (["--generate", "3", "--page-rate", "0"], "--page-rate: nothing can be paged"),
        (["--generate", "3", "--load", "0"], "--load: 0.0 is out of range"),
        (["--generate", "3", "--profile", "p.csv"], "--profile goes with a TRACE.csv"),
        (["--generate", "3", "--gpus", "0"], "--gpus"),
        (["--generate", "many"], "--generate"),
        (["--generate", "3", "--plot", "/nowhere/p.png"], "/nowhere/p.png: there is no folder /nowhere"),
        (["--generate", "3", "--plot", "p.foo"], "p.foo: a plot is written as .png, .pdf or .svg"),
        (["--generate", "3", "--timeline", "."], ".: is a folder; expected the name of a file"),
        (["--generate", "3", "--save-trace", "/proc/x.csv"], "/proc/x.csv: cannot be written"),
        (["--generate", "99999999999999999999"], "--generate: 99999999999999999999 is too many"),
        (["--generate", "3", "--load", "nan"], "--load: nan is out of range"),
        (["--generate", "3", "--load", "inf"], "--load: inf is out of range"),
        (["--generate", "3", "--policy", "fair:by=memory,by=time"], "by is given twice"),
        (["--wrong"], "No such option"),
    ],
)
def test_what_is_wrong_is_one_line_on_stderr_and_exit_status_2(arguments, complaint, tmp_path):
    done = salus("simulate", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert complaint in done.stderr
    assert done.stderr.startswith("salus: ")
    assert done.stderr.count("\n") == 1, done.stderr


def test_a_plot_without_matplotlib_says_how_to_get_it(tmp_path):
    code = "import sys; sys.modules['matplotlib'] = None; from salus.cli.main import main; main()"
    command = [sys.executable, "-c", code, "simulate", "--generate", "3", "--plot", str(tmp_path / "p.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'salus[plot]'" in done.stderr


@pytest.mark.parametrize("command", [[], ["simulate"], ["policy"]])
def test_help_is_there_with_an_example(command):
    done = salus(*command, "--help", env={"COLUMNS": "120", "PATH": "/usr/bin:/bin", "TERM": "dumb"})
    assert done.returncode == 0, done.stderr
    assert "Example:" in done.stdout or not command


def test_policy_lists_the_policies_with_their_parameters():
    done = salus("policy")
    for word in ("fair", "by=time|memory", "srtf", "fill=on|off", "patience"):
        assert word in done.stdout


def test_the_version_is_told():
    assert salus("--version").stdout.startswith("salus 0.")


def test_a_reader_that_goes_away_is_no_error_message():
    done = subprocess.run(
        f"{sys.executable} -m salus policy | head -1", shell=True, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
