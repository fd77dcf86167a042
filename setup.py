"""Builds the arena, a plain shared library that any Python loads with ctypes, into the package.

The rest of the settings is in pyproject.toml.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        # No tag of a Python version: it has nothing of Python in it.
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


arena = Extension(
    "salus.client._arena",
    sources=sorted(map(str, Path("csrc").glob("*.c"))),
    depends=sorted(map(str, Path("csrc").glob("*.h"))),
    extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"],
    libraries=["dl", "pthread"],
)
setup(ext_modules=[arena], cmdclass={"build_ext": BuildLibrary})
