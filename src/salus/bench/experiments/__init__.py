"""The experiments of the paper, each a small file: `run` does it, `verdicts` says how it went, `draw` shows it."""

from __future__ import annotations

import importlib
from typing import Any

EXPERIMENTS: dict[str, tuple[str, str, str, str]] = {
    "overhead": ("overhead", "run", "verdicts", "draw"),
    "fairness": ("fairness", "run", "verdicts", "draw"),
    "jct": ("jct", "run", "verdicts", "draw"),
    "preemption": ("preemption", "run", "verdicts", "draw"),
    "pair": ("packed", "run_pair", "verdicts_pair", "draw"),
    "memory": ("memory", "run", "verdicts", "draw"),
    "paging": ("paging", "run", "verdicts", "draw"),
    "tuning": ("packed", "run_tuning", "verdicts_tuning", "draw"),
}
"""By name: the file, and in it what does the experiment, what judges it and what draws it."""


def find(name: str) -> tuple[Any, str, str, str]:
    """The module of an experiment, and the names of its three parts."""
    file, run, judge, draw = EXPERIMENTS[name]
    return importlib.import_module(f"salus.bench.experiments.{file}"), run, judge, draw
