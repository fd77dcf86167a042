"""Commands in a folder that holds files of somebody else's making."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.harness import Service, eventually

SHADOWED = ("typer", "rich", "json", "asyncio", "sqlite3", "salus", "socket", "logging")
COMMAND = "from salus.cli.main import main; main()"


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder with modules that leave a trace when they run."""
    folder = tmp_path / "downloads"
    folder.mkdir()
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\nraise SystemExit\n")
    return folder


def salus_in(folder: Path, service: Service, *arguments: str) -> subprocess.CompletedProcess[str]:
    # As the program `salus` that pip makes: that has the folder it lies in on its path, and no other.
    program = f"import sys; sys.path.pop(0); sys.argv[0] = 'salus'; {COMMAND}"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env=service.environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_no_file_of_the_folder_a_command_is_given_in_runs_in_its_name(serve, trap, tmp_path):
    service = serve(start=False)
    assert salus_in(trap, service, "run", "--", "true").returncode == 0
    submitted = salus_in(trap, service, "submit", "--", "true")
    assert submitted.stdout.strip().isdigit(), submitted
    eventually(lambda: salus_in(trap, service, "ps", "--all").stdout.count("done") == 2, "both have ended")
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
