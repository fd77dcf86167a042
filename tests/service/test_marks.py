"""Marks in real jobs: in any framework or none, however Python was started, and together with torch's hooks."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.service.harness import SOURCE, Service

MARKS = SOURCE / "salus" / "marks.py"

PLAIN = """
import sys
import {module} as marks

@marks.step
def train(number):
    with marks.iteration():
        return number + 1

for number in range(15):
    with marks.iteration():
        pass
    assert train(number) == number + 1
assert "torch" not in sys.modules
print("finished")
"""

TORCH_LATER = """
import sys
import salus

for _ in range(5):
    with salus.iteration():
        pass
with salus.iteration():
    import torch
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()

for _ in range(10):
    train()
for _ in range(4):
    with salus.iteration():
        train()
        train()
print("finished")
"""

FORKED = """
import os
import salus

def iterate(times):
    for _ in range(times):
        with salus.iteration():
            pass

parent_first = {parent_first}
if parent_first:
    iterate(3)
    with salus.iteration():
        child = os.fork()
else:
    child = os.fork()
if child == 0:
    iterate(20)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("finished")
"""


@pytest.fixture
def service(serve) -> Service:
    started = serve()
    # Scripts are not told where Salus is: what `salus run` puts into their environment must be enough.
    del started.environment["PYTHONPATH"]
    return started


def run(service: Service, text: str, *python: str) -> tuple[int, str]:
    """How many iterations were counted, and what was said."""
    script = service.folder / "script.py"
    script.write_text(text)
    done = service.salus("run", "--name", "j", "--", *(python or (sys.executable,)), str(script))
    assert (done.returncode, done.stdout) == (0, "finished\n"), done.stderr
    return service.jobs()["j"]["iterations"], done.stderr


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of an environment with nothing in it."""
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, with_pip=False, symlinks=True)
    return str(home / "bin" / "python")


def test_marks_count_every_iteration_of_a_script_without_a_framework(service):
    assert run(service, PLAIN.format(module="salus")) == (30, "")


def test_marks_count_in_an_environment_without_salus(service, bare_python):
    assert run(service, PLAIN.format(module="salus.api"), bare_python) == (30, "")


@pytest.mark.parametrize("option", ["", "-I", "-E", "-S", "-IS"])
def test_copied_marks_count_however_python_was_started(service, bare_python, option):
    (service.folder / "salus_marks.py").write_text(MARKS.read_text())
    text = f"import sys; sys.path.insert(0, {str(service.folder)!r})" + PLAIN.format(module="salus_marks")
    iterations, said = run(service, text, bare_python, *([option] if option else []))
    assert iterations == 30
    assert "marks do nothing" not in said


def test_copied_marks_count_where_pythonpath_was_replaced(service, bare_python):
    (service.folder / "salus_marks.py").write_text(MARKS.read_text())
    iterations, _ = run(service, PLAIN.format(module="salus_marks"), "env", "PYTHONPATH=/nowhere", bare_python)
    assert iterations == 30


def test_outside_salus_copied_marks_do_nothing_and_load_nothing(tmp_path, bare_python):
    (tmp_path / "salus_marks.py").write_text(MARKS.read_text())
    script = tmp_path / "script.py"
    script.write_text(PLAIN.format(module="salus_marks") + "assert 'salus' not in sys.modules\n")
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([bare_python, str(script)], capture_output=True, text=True, check=False, env=clean)
    assert (done.returncode, done.stdout, done.stderr) == (0, "finished\n", "")


def test_where_the_marks_cannot_be_had_the_documented_fallback_runs(tmp_path, bare_python):
    page = (Path(__file__).parent.parent.parent / "docs" / "scripts.md").read_text()
    fallback = next(block for block in page.split("```python\n") if block.startswith("try:")).partition("```")[0]
    script = tmp_path / "script.py"
    script.write_text(fallback + "\nwith iteration():\n    print('finished')\n")
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([bare_python, str(script)], capture_output=True, text=True, check=False, env=clean)
    assert (done.returncode, done.stdout, done.stderr) == (0, "finished\n", "")


def test_marks_that_cannot_find_salus_say_so_once_and_do_nothing(tmp_path, bare_python):
    (tmp_path / "salus_marks.py").write_text(MARKS.read_text())
    script = tmp_path / "script.py"
    script.write_text(PLAIN.format(module="salus_marks"))
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    lost = {**clean, "SALUS_JOB": "1", "SALUS_BOOTSTRAP": str(tmp_path / "gone.py")}
    done = subprocess.run([bare_python, str(script)], capture_output=True, text=True, check=False, env=lost)
    assert (done.returncode, done.stdout) == (0, "finished\n")
    assert done.stderr.startswith("salus: marks do nothing in this process") and done.stderr.count("\n") == 1


def test_the_command_marks_prints_the_file_to_copy(service):
    done = service.salus("marks")
    assert (done.returncode, done.stdout, done.stderr) == (0, MARKS.read_text(), "")


@pytest.mark.skipif("torch" not in {d.name for d in importlib.metadata.distributions()}, reason="needs torch")
def test_torch_that_is_imported_after_the_first_mark_counts_together_with_the_marks(service):
    assert run(service, TORCH_LATER) == (5 + 1 + 10 + 4, "")


def test_marks_in_the_child_of_a_fork_count_if_the_parent_has_none(service):
    assert run(service, FORKED.format(parent_first=False)) == (20, "")


def test_marks_in_the_child_of_a_parent_that_has_some_are_unmanaged_and_that_is_said(service):
    iterations, said = run(service, FORKED.format(parent_first=True))
    assert iterations == 4
    assert said.count("\n") == 1 and "uses the device from another process already" in said
