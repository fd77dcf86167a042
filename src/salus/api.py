"""The marks under their longer name: `salus.api.iteration` is `salus.iteration`, `salus.api.step` is `salus.step`."""

from salus.marks import iteration, step

__all__ = ["iteration", "step"]
