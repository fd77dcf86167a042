"""Salus: many deep-learning jobs share one GPU.

For loops that no hook can see, `salus.iteration` and `salus.step` mark iterations; outside Salus they do nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from salus.marks import iteration, step

__version__ = "0.1.0.dev0"

__all__ = ["__version__", "iteration", "step"]


def __getattr__(name: str) -> Any:
    # Loaded when first used: importing `salus` must stay next to free in every process of a job.
    if name in ("iteration", "step"):
        from salus import marks

        # The next time it is found at once: a mark stands in every iteration.
        return globals().setdefault(name, getattr(marks, name))
    raise AttributeError(f"module 'salus' has no attribute {name!r}")
