"""`salus install-hook`: jobs of a Python that PYTHONPATH does not reach; and what a job says that cannot be reached."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.service.harness import Service

SCRIPT = """
import salus
for _ in range(12):
    with salus.iteration():
        pass
print("finished")
"""


@pytest.fixture
def service(serve) -> Service:
    started = serve()
    del started.environment["PYTHONPATH"]
    (started.folder / "script.py").write_text(SCRIPT)
    return started


@pytest.fixture
def python(tmp_path) -> str:
    home = tmp_path / "other"
    venv.create(home, with_pip=False, symlinks=True)
    return str(home / "bin" / "python")


def run(service: Service, *command: str) -> subprocess.CompletedProcess[str]:
    return service.salus("run", "--name", "j", "--", *command, str(service.folder / "script.py"))


@pytest.mark.parametrize("option", ["-I", "-E"])
def test_with_the_hook_salus_comes_into_a_python_that_looks_at_no_environment(service, python, option):
    without = run(service, python, option)
    assert without.returncode == 1 and "No module named 'salus'" in without.stderr
    assert without.stderr.splitlines()[0].startswith(
        f"salus: job 1 runs without Salus, unless its script has marks: python was started with {option}"
    )
    assert f"salus install-hook --python {python}" in without.stderr
    installed = service.salus("install-hook", "--python", python)
    assert installed.returncode == 0 and installed.stdout.strip().endswith("salus_hook.pth")
    done = run(service, python, option)
    assert (done.returncode, done.stdout, done.stderr) == (0, "finished\n", "")
    assert service.jobs()["j"]["iterations"] == 12
    done = run(service, "env", "PYTHONPATH=/nowhere", python)
    assert (done.returncode, done.stderr) == (0, "")


def test_outside_a_job_the_hook_does_nothing_and_it_can_be_taken_out_again(service, python):
    service.salus("install-hook", "--python", python)
    look = "import sys; print([m for m in sys.modules if 'salus' in m], sys.meta_path)"
    bare = subprocess.run([python, "-c", look], capture_output=True, text=True, check=True, env={})
    assert bare.stdout.startswith("[]") and "Salus" not in bare.stdout and bare.stderr == ""
    removed = service.salus("install-hook", "--remove", "--python", python)
    assert (removed.returncode, removed.stdout.startswith("removed ")) == (0, True)
    left = [path.name for path in Path(python).parent.parent.rglob("*salus*")]
    assert left == []
    again = service.salus("install-hook", "--remove", "--python", python)
    assert again.returncode == 0 and again.stdout.startswith("there is no hook in")


def test_a_hook_whose_salus_is_gone_is_no_error(service, python):
    service.salus("install-hook", "--python", python)
    module = next(Path(python).parent.parent.rglob("_salus_hook.py"))
    lines = module.read_text().splitlines()
    module.write_text("\n".join("" if "spec_from" in line else line for line in lines))
    done = subprocess.run(
        [python, "-I", "-c", "print(1)"], capture_output=True, text=True, check=True, env={"SALUS_JOB": "1"}
    )
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize("named", ["/nowhere/python", sys.executable + "x", "/bin/true"])
def test_what_is_no_python_is_refused_with_one_line(service, named):
    done = service.salus("install-hook", "--python", named)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert named in done.stderr


def test_a_cleared_environment_is_told_before_the_job_starts(service):
    done = service.salus("run", "--name", "j", "--", "env", "-i", "/bin/true")
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1 and "its environment was cleared" in done.stderr
