"""Another package adds a policy: really installed, by pip, through its entry point."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from salus.errors import RequestRejected
from salus.plugins import load_policy, policy_classes

MODULE = '''
from salus.core.policies import Policy

class SmallestFirst(Policy):
    """The smallest model first."""

    def memory_order(self, job):
        return job.footprint.persistent_bytes

NOT_A_POLICY = 7
'''
ENTRY_POINTS = """
[salus.policies]
smallest = acme_policies:SmallestFirst
seven = acme_policies:NOT_A_POLICY
missing = acme_policies:Nothing
fifo = acme_policies:SmallestFirst
"""


def make_wheel(folder: Path) -> Path:
    """A wheel as any build tool would make it, without needing one, or a network."""
    info = "acme_policies-1.0.dist-info"
    contents = {
        "acme_policies.py": MODULE,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: acme-policies\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": ENTRY_POINTS,
    }
    record = []
    wheel = folder / "acme_policies-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in contents.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(text.encode())}")
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,"]) + "\n")
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin")
    site = folder / "site"
    install = ["install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", *install, str(make_wheel(folder))], check=True)
    return site


def test_an_installed_package_adds_a_policy_that_simulate_can_use(installed):
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from salus.cli.main import main; main()"
    command = [sys.executable, "-c", code, str(installed), "simulate", "--generate", "12", "--policy", "smallest,fifo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "smallest" in done.stdout


def test_a_broken_one_is_named_and_takes_nothing_else_away(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    assert load_policy("smallest").name == "smallest"
    with pytest.raises(RequestRejected, match=r"'seven' cannot be loaded: acme_policies:NOT_A_POLICY is not a sub"):
        load_policy("seven")
    with pytest.raises(RequestRejected, match=r"'missing' cannot be loaded: acme_policies:Nothing: AttributeError"):
        load_policy("missing")
    assert str(load_policy("fair:by=memory")) == "fair:by=memory"
    assert "seven" not in policy_classes()


def test_no_package_can_replace_a_shipped_policy(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    assert policy_classes()["fifo"].__module__ == "salus.core.policies.fifo"
