"""Imports point inward, and `core` is pure: this walks the imports and keeps it so."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "salus"

CORE_MAY_IMPORT = {
    "__future__",
    "bisect",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "itertools",
    "typing",
    "salus.core",
    "salus.errors",
    "salus.units",
}
"""No clock, socket, thread, torch, logging, environment or randomness."""

MAY_IMPORT = {
    "core": {"core", "errors", "units"},
    "protocol": {"protocol", "errors"},
    "client": {
        "client",
        "protocol",
        "errors",
        "interpreter",
        "machine",
        "paths",
        "records",
        "registry",
        "processes",
        "ending",
        "units",
        "salus",
        "names",
    },
    "adaptors": {"adaptors", "client", "errors"},
    "config": {"config", "core", "errors", "units", "paths", "plugins"},
    "service": {
        "names",
        "machine",
        "service",
        "protocol",
        "core",
        "config",
        "errors",
        "paths",
        "plugins",
        "registry",
        "processes",
        "ending",
        "salus",
        "units",
    },
    "simulate": {"simulate", "core", "errors", "units"},
    "bench": {
        "bench",
        "simulate",
        "service",
        "adaptors",
        "client",
        "protocol",
        "core",
        "errors",
        "units",
        "plugins",
        "salus",
    },
    "cli": {
        "cli",
        "names",
        "config",
        "bench",
        "simulate",
        "service",
        "client",
        "protocol",
        "core",
        "errors",
        "interpreter",
        "units",
        "paths",
        "plugins",
        "registry",
        "processes",
        "ending",
        "doctor",
        "machine",
        "records",
        "salus",
    },
}
"""Packages of Salus that each package may import."""


def imports_of(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide where they point"
            names.add(node.module or "")
    return names


def files_of(package: str) -> list[Path]:
    files = sorted((SOURCE / package).rglob("*.py"))
    assert files, f"there is no package {package}"
    return files


@pytest.mark.parametrize("file", files_of("core"), ids=lambda file: str(file.relative_to(SOURCE)))
def test_core_is_pure(file):
    for name in imports_of(file):
        allowed = name in CORE_MAY_IMPORT or name.startswith("salus.core.")
        assert allowed, f"{file.relative_to(SOURCE)} imports {name}"


@pytest.mark.parametrize("name", ["errors", "units"])
def test_what_core_leans_on_is_pure_as_well(name):
    for imported in imports_of(SOURCE / f"{name}.py"):
        assert imported in {"__future__", "re", "salus.errors"}, f"{name}.py imports {imported}"


def test_what_runs_in_a_user_s_process_needs_the_standard_library_alone():
    files = [*files_of("client"), *files_of("protocol"), *files_of("adaptors")]
    single = (
        *("__init__", "errors", "units", "paths", "machine", "registry", "records"),
        *("api", "marks", "processes", "ending"),
    )
    files += [SOURCE / f"{name}.py" for name in single]
    for file in files:
        for name in imports_of(file):
            top = name.partition(".")[0]
            known = (
                top in sys.stdlib_module_names
                or top == "salus"
                or (top == "torch" and file.parent.name == "adaptors" and file.name.startswith("torch"))
            )
            assert known, f"{file.relative_to(SOURCE)} imports {name}"


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_point_inward(package):
    for file in files_of(package):
        for name in imports_of(file):
            if name == "salus" or name.startswith("salus."):
                target = name.split(".")[1] if "." in name else "salus"
                assert target in MAY_IMPORT[package], f"{file.relative_to(SOURCE)} imports {name}"


def test_every_package_is_watched():
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert packages == set(MAY_IMPORT)


def test_nothing_in_core_reads_files_or_prints():
    for file in files_of("core"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"open", "print", "input", "exec", "eval", "__import__"}, file
