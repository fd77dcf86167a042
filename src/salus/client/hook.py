"""The hook in an environment of Python, by which the adaptor loads also where PYTHONPATH does not reach (-I, -E).

Two files next to the packages of that environment: `salus_hook.pth`, a line that Python runs at every start and that
does nothing outside a job, and the module it imports. -S hides both.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from salus.client.unseen import HOOK
from salus.errors import RequestRejected

LINE_FILE, MODULE_FILE = HOOK, "_salus_hook.py"
LINE = "import os; os.environ.get('SALUS_JOB') and __import__('_salus_hook')\n"
MODULE = '''"""Runs in jobs of Salus only. Written by `salus install-hook`, and taken away by its --remove."""

import importlib.util

try:
    _spec = importlib.util.spec_from_file_location("_salus_bootstrap", {bootstrap!r})
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
except Exception:
    pass  # Salus has moved, or is gone: the job says so if it runs without
'''
WHERE = "import sys, sysconfig; print(sys.version_info >= (3, 10), sysconfig.get_path('purelib'))"
RUNS = "import sys; sys.exit(not any(type(finder).__name__ == '_SalusFinder' for finder in sys.meta_path))"
ASK_S = 30.0


def folder_of(python: str) -> Path:
    """Where that Python has its packages."""
    try:
        asked = subprocess.run(
            [python, "-I", "-c", WHERE], capture_output=True, text=True, timeout=ASK_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "strerror", None) or "it does not answer as Python does"
        raise RequestRejected(f"--python: {python}: {why}; name a Python, like .venv/bin/python") from None
    new_enough, _, folder = asked.strip().partition(" ")
    if new_enough != "True":
        raise RequestRejected(f"--python: {python} is older than 3.10; use a newer one for jobs")
    return Path(folder)


def install(python: str) -> Path:
    """The file that Python runs. Written before is written again: Salus may have moved."""
    folder = folder_of(python)
    bootstrap = Path(__file__).parent.parent / "adaptors" / "bootstrap" / "sitecustomize.py"
    try:
        # In this order: the line must find its module.
        (folder / MODULE_FILE).write_text(MODULE.format(bootstrap=str(bootstrap)))
        (folder / LINE_FILE).write_text(LINE)
    except OSError as error:
        raise RequestRejected(
            f"{folder}: cannot be written ({error.strerror}); make an environment of your own (python -m venv)"
        ) from None
    if not _runs(python):
        raise RequestRejected(f"{folder / LINE_FILE}: was written, and {python} does not run it; remove it by hand")
    return folder / LINE_FILE


def _runs(python: str) -> bool:
    try:
        command = [python, "-I", "-c", RUNS]
        done = subprocess.run(command, env={"SALUS_JOB": "0"}, capture_output=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def remove(python: str) -> Path | None:
    """The file that is gone now; None: there was none."""
    line = folder_of(python) / LINE_FILE
    there = line.exists()
    try:
        compiled = (line.parent / "__pycache__").glob(f"{Path(MODULE_FILE).stem}.*.pyc")
        for path in (line, line.with_name(MODULE_FILE), *compiled):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise RequestRejected(f"{line}: cannot be removed ({error.strerror})") from None
    return line if there else None
