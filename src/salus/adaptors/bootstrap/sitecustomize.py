"""Makes a Python process of a job ready for Salus. Old versions of Python must be able to read this file.

Python runs it at start-up, as `sitecustomize`, because `salus run` put its folder on PYTHONPATH. Where Python does not
look there (-I, -E), the hook of `salus install-hook` runs it, or else the first mark does (`salus.marks`). A second run
changes nothing.

It makes the client importable (and nothing else of where Salus is installed), waits for torch to be imported, and then
loads the adaptor. A sitecustomize of the user's own runs as well. Nothing here may break a script: what fails is left
out.
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
    """Runs torch's real loader, then the adaptor."""

    def __init__(self, real: Any, finder: Any) -> None:
        self._real, self._finder = real, finder

    def create_module(self, spec: Any) -> Any:
        return self._real.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._real
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._real.exec_module(module)
        _load_adaptor()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Stays until torch is imported: libraries ask whether there is a torch long before they import it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None


def _load_adaptor() -> None:
    try:
        from salus.adaptors import activate

        activate.torch_imported()
    except Exception as error:
        _say(f"the adaptor could not be loaded ({error}); the job goes on unmanaged")


def _say(text: str) -> None:
    try:
        if sys.stderr is not None:
            print(f"salus: {text}", file=sys.stderr)
    except Exception:
        pass  # a stream that is closed or full is no reason to fail


def _run_the_one_it_hides() -> None:
    """A sitecustomize further down the path has a right to run."""
    rest = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _is_ready() -> bool:
    return any(type(finder).__name__ == _SalusFinder.__name__ for finder in sys.meta_path)


if os.environ.get("SALUS_JOB") and not _is_ready():
    if sys.version_info >= (3, 10):  # noqa: UP036 - the user's Python need not be ours
        sys.meta_path.append(_SalusFinder())
        if "torch" in sys.modules:
            _load_adaptor()
        else:
            sys.meta_path.insert(0, _TorchFinder())
    else:
        _say("this Python is older than 3.10; the job goes on unmanaged")
if __name__ == "sitecustomize":
    _run_the_one_it_hides()
