"""What the options of several commands have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer

from salus.config.schema import SWITCH, Setting
from salus.errors import RequestRejected
from salus.plugins import policy_classes

T = TypeVar("T")


def option_of(setting: Setting[Any], *, short: str | None = None, **more: Any) -> Any:
    """The option of a setting: it says the same in `--help` as in `salus config`.

    Its default is None, so that it is known whether it was given; the value in force is the setting's.
    """
    name = f"--{setting.keys[-1]}"
    switch = setting.kind is SWITCH
    default = setting.if_unset if setting.default is None else setting.default
    shown = "" if not default or default == "false" else f" Default: {default}."
    names = [f"{name}/--no-{setting.keys[-1]}" if switch else name, *([] if short is None else [short])]
    metavar = None if switch else setting.kind.metavar or setting.kind.expected
    return typer.Option(*names, help=setting.help + shown, metavar=metavar, show_default=False, **more)


def parsed(option: str, parse: Callable[[str], T], text: str) -> T:
    """The value of an option; what is wrong with it is said with the option's name."""
    try:
        return parse(text)
    except RequestRejected as error:
        raise RequestRejected(f"{option}: {error}") from None


def complete_policy(incomplete: str) -> list[str]:
    """For the shell."""
    return sorted(name for name in policy_classes() if name.startswith(incomplete))
