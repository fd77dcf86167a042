"""Builds the arena, a plain shared library that any Python loads with ctypes, into the package.

The wheel is tagged for what it needs, which is the platform alone. The rest of the settings is in pyproject.toml.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCE_URL = ""
"""Where files of the repository can be read by their paths, like https://host/salus/blob/main/; empty: nowhere yet."""


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        # No tag of a Python version: it has nothing of Python in it.
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


class TaggedWheel(bdist_wheel):
    """One wheel serves every Python 3, on a Linux whose C library has what the arena was linked with."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        built = Path(self.get_finalized_command("build").build_lib) / "salus" / "client" / "_arena.so"
        # (An editable install asks before it builds, and throws the wheel away.)
        needed = _newest_glibc(built.read_bytes()) if built.exists() else None
        if needed is not None and platform.startswith("linux_"):
            platform = f"manylinux_{needed[0]}_{needed[1]}_{platform.removeprefix('linux_')}"
        return "py3", "none", platform


def _newest_glibc(library: bytes) -> tuple[int, int] | None:
    """The oldest C library that has every symbol which this one needs; None: it needs another one, like musl."""
    versions = re.findall(rb"\0GLIBC_([0-9]+)\.([0-9]+)", library)
    return max(((int(major), int(minor)) for major, minor in versions), default=None)


def _readme() -> str:
    """Links into the repository lead nowhere from the page of a package index."""
    text = Path("README.md").read_text("utf-8")
    relative = r"(?!#|[a-z]+:)([^)\s]+)"
    if SOURCE_URL:
        return re.sub(rf"\]\({relative}\)", rf"]({SOURCE_URL}\1)", text)
    text = re.sub(rf"!\[([^]]*)\]\({relative}\)", r"(\1: \2 in the source)", text)
    text = re.sub(rf"\[([^]]+)\]\({relative}\)", lambda m: m[1] if m[1] == m[2] else f"{m[1]} ({m[2]})", text)
    return text + "\nFiles that are named here are in the source distribution.\n"


arena = Extension(
    "salus.client._arena",
    sources=sorted(map(str, Path("csrc").glob("*.c"))),
    depends=sorted(map(str, Path("csrc").glob("*.h"))),
    # Warnings are errors in `make arena` alone: a newer compiler's new ones must not keep anybody from installing.
    extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra"],
    libraries=["dl", "pthread"],
)
setup(
    ext_modules=[arena],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": TaggedWheel},
    long_description=_readme(),
    long_description_content_type="text/markdown",
)
