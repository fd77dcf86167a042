"""Python runs this file at start-up because `salus run` put its folder on PYTHONPATH.

It makes the client importable (and nothing else of where Salus is installed), waits for torch to be imported, and then
loads the adaptor. A sitecustomize of the user's own runs as well. Nothing here may break a script: whatever fails is
left out, and old versions of Python must be able to read it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))


class _SalusFinder(importlib.abc.MetaPathFinder):
    """Finds the `salus` package where it is, without putting all its neighbours on the path of the user's script."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "salus":
            return None
        init = os.path.join(_PACKAGE, "__init__.py")
        return importlib.util.spec_from_file_location(name, init, submodule_search_locations=[_PACKAGE])


class _Loader(importlib.abc.Loader):
    """Runs the real loader, then the adaptor."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def create_module(self, spec: Any) -> Any:
        return self._real.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._real
        self._real.exec_module(module)
        try:
            from salus.adaptors import activate

            activate.torch_imported()
        except Exception as error:
            print(f"salus: the adaptor could not be loaded ({error}); the job goes on unmanaged", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _TorchFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _run_the_one_it_hides() -> None:
    """A sitecustomize further down the path has a right to run."""
    rest = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("SALUS_JOB"):
    if sys.version_info >= (3, 10):  # noqa: UP036 - the user's Python need not be ours
        sys.meta_path.append(_SalusFinder())
        sys.meta_path.insert(0, _TorchFinder())
    else:
        print("salus: this Python is older than 3.10; the job goes on unmanaged", file=sys.stderr)
_run_the_one_it_hides()
