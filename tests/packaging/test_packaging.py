"""What is handed out: the source distribution, the wheel that is built from it, and an installation of that wheel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from email import message_from_bytes
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77")
pytest.importorskip("packaging")

from tests.packaging.wheels import make_wheel, with_what_they_need

ROOT = Path(__file__).parent.parent.parent
BUILT_HERE = shutil.ignore_patterns(
    ".venv", ".git", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "*.so"
)
NEEDED = [".ci", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "benchmarks"]
NEEDED += ["csrc", "docs", "pyproject.toml", "setup.py", "src", "tests"]

pytestmark = pytest.mark.slow


def run(*command: str | Path, **how: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=500, **how
    )  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def build(what: str, source: Path, out: Path) -> Path:
    """As pip would, with the tools of this environment."""
    out.mkdir(exist_ok=True)
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{what}(sys.argv[1]))"
    return out / run(sys.executable, "-c", code, out, cwd=source).stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def handed_out(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, unpacked, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("package")
    tree = folder / "tree"
    tree.mkdir()
    for name in NEEDED:
        there = ROOT / name
        if there.is_dir():
            shutil.copytree(there, tree / name, ignore=BUILT_HERE)
        else:
            shutil.copy(there, tree / name)
    with tarfile.open(build("sdist", tree, folder / "dist")) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    wheel = build("wheel", source, folder / "wheels")
    return source, wheel


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_source_distribution_has_every_file_of_the_repository(handed_out):
    source, _ = handed_out
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no repository")
    assert set(listed.stdout.splitlines()) - files_of(source) <= {".gitattributes", ".gitignore"}


def test_the_tests_of_the_source_distribution_run_with_its_own_files(handed_out, tmp_path):
    source, _ = handed_out
    copy = shutil.copytree(source, tmp_path / "elsewhere")
    run("make", "arena", cwd=copy)
    environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
    tests = ["tests/test_purity.py", "tests/test_units.py", "tests/core/test_lanes.py", "tests/protocol"]
    tests += ["tests/memory/test_arena.py"]
    code = "import salus; assert salus.__file__.startswith(sys.argv[1])"
    run(sys.executable, "-c", f"import sys; {code}", copy, env=environment)
    run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=copy, env=environment)


def test_one_wheel_serves_every_python_and_says_which_c_library_it_needs(handed_out):
    _, wheel = handed_out
    match = re.fullmatch(
        r"salus-[^-]+-py3-none-(?:manylinux_(\d+)_(\d+)|linux|musllinux_\d+_\d+)_(\w+)\.whl", wheel.name
    )
    assert match is not None, wheel.name
    with zipfile.ZipFile(wheel) as archive:
        library = archive.read("salus/client/_arena.so")
        names = archive.namelist()
    assert b"Py_Initialize" not in library and b"libpython" not in library
    if match[1] is not None:
        needed = {(int(a), int(b)) for a, b in re.findall(rb"\0GLIBC_(\d+)\.(\d+)", library)}
        assert max(needed) == (int(match[1]), int(match[2]))
    here = {f"salus/{name}" for name in files_of(ROOT / "src" / "salus") if not name.endswith((".pyc", ".so"))}
    assert here <= set(names), "every file of the package is in it"


def test_links_of_the_readme_lead_somewhere_outside_the_repository_too(handed_out):
    _, wheel = handed_out
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        told = message_from_bytes(archive.read(name))
    assert told["Description-Content-Type"] == "text/markdown"
    text = told.get_payload()
    assert isinstance(text, str) and "# Salus" in text and "docs/service.md" in text
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_links_of_the_readme_are_those_of_the_repository_where_it_has_an_address(tmp_path):
    for name in ("README.md", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    text = (
        (tmp_path / "setup.py").read_text().replace('SOURCE_URL = ""', 'SOURCE_URL = "https://host/salus/blob/main/"')
    )
    (tmp_path / "setup.py").write_text(text + "\nprint(_readme())\n")
    shown = run(sys.executable, "setup.py", "--name", cwd=tmp_path).stdout
    links = re.findall(r"\]\(([^)]*)\)", shown)
    assert "https://host/salus/blob/main/docs/service.md" in links
    assert all((ROOT / link.removeprefix("https://host/salus/blob/main/")).exists() for link in links)


# An installation.


def environment_in(folder: Path, *, with_pip: bool) -> tuple[Path, Path]:
    """Its Python, and where its packages are."""
    venv.create(folder, with_pip=with_pip, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    return folder / "bin" / "python", packages


@pytest.fixture(scope="module")
def installed(handed_out: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment in which nothing is but what pip has installed from the wheel."""
    _, wheel = handed_out
    folder = tmp_path_factory.mktemp("installed")
    links = folder / "wheels"
    links.mkdir()
    for one in with_what_they_need(["nvidia-ml-py", "rich", "typer"]):
        make_wheel(one, links)
    python, _ = environment_in(folder / "venv", with_pip=True)
    run(python, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", links, wheel)
    return python.parent


@pytest.fixture
def salus(installed: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    home = tmp_path / "home"
    home.mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SALUS_", "PYTHON", "XDG_"))}
    settings = {
        "HOME": str(home),
        "SALUS_RUNTIME_DIR": str(tmp_path / "run"),
        "SALUS_STATE_DIR": str(tmp_path / "state"),
    }

    def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return run(installed / "salus", *arguments, cwd=home, env={**clean, **settings})

    return call


def test_doctor_finds_an_installation_from_the_wheel_in_order(salus):
    done = salus("doctor")
    assert "_arena.so" not in done.stderr and "Traceback" not in done.stderr
    assert salus("--version").stdout.startswith("salus ")
    simulated = salus("simulate", "--generate", "5", "--policy", "fifo", "--json")
    assert json.loads(simulated.stdout)["policies"]["fifo"]["jobs"] == 5


def test_a_script_in_an_environment_without_salus_runs_under_an_installation_from_the_wheel(salus, tmp_path):
    python, packages = environment_in(tmp_path / "other", with_pip=False)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "salus" not in entry.name and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    assert subprocess.run([python, "-c", "import salus"], capture_output=True, check=False).returncode != 0
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(20):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "print('finished')\n"
    )
    done = salus("run", "--", python, script)
    assert (done.stdout, done.stderr) == ("finished\n", "")
    (row,) = json.loads(salus("ps", "--all", "--json").stdout)
    assert (row["name"], row["state"], row["iterations"]) == ("train", "done", 20)
    job_id = salus("submit", "--", python, "-c", "print('hello')").stdout.strip()
    salus("wait", job_id)
    assert salus("logs", job_id).stdout == "hello\n"
    assert "give the same actions" in salus("replay").stdout
    assert "the journal" in salus("clean").stdout
