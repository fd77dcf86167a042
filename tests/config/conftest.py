from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class Files:
    """The two settings files, in a folder of the test's own."""

    machine: Path
    user: Path


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    for name in [name for name in os.environ if name.startswith("SALUS_")]:
        monkeypatch.delenv(name)
    found = Files(tmp_path / "etc" / "config.toml", tmp_path / "user" / "config.toml")
    for path in (found.machine, found.user):
        path.parent.mkdir()
    monkeypatch.setenv("SALUS_SYSTEM_CONFIG_DIR", str(found.machine.parent))
    monkeypatch.setenv("SALUS_CONFIG", str(found.user))
    return found
