"""What the options of several commands have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from salus.errors import RequestRejected
from salus.plugins import policy_classes

T = TypeVar("T")


def parsed(option: str, parse: Callable[[str], T], text: str) -> T:
    """The value of an option; what is wrong with it is said with the option's name."""
    try:
        return parse(text)
    except RequestRejected as error:
        raise RequestRejected(f"{option}: {error}") from None


def complete_policy(incomplete: str) -> list[str]:
    """For the shell."""
    return sorted(name for name in policy_classes() if name.startswith(incomplete))
