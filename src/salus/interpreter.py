"""This Python again, for a process of our own.

`python -m` and `python -c` put the folder that they are started in first on the path of modules. For a command that is
the folder the user happens to be in, and whatever file lies there with the name of a module would run in our name.
"""

from __future__ import annotations

import sys

_WITHOUT_THIS_FOLDER = "import sys; sys.path[:1] == [''] and sys.path.pop(0); "


def python_command(module: str, function: str, *arguments: str) -> list[str]:
    """A command that calls a function of a module; the function finds the arguments in `sys.argv[1:]`."""
    call = f"from {module} import {function}; sys.exit({function}())"
    return [sys.executable, "-c", _WITHOUT_THIS_FOLDER + call, *arguments]
