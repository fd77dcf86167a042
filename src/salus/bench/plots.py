"""The figures of the experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from salus.simulate.report import writing


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    writing(path, lambda: figure.savefig(path, dpi=130))


WIDEST = 12.0
MOST_LABELS = 20


def bars(path: Path, series: Mapping[str, Mapping[str, float]], what: str) -> None:
    """A group of bars for each name, one for each series."""
    names = list(next(iter(series.values())))
    count = len(names) * len(series)
    figure = _figure(min(WIDEST, max(5.0, 0.6 * count + 2)), 4.0)
    axes = figure.subplots()
    width = 0.8 / len(series)
    for number, (label, values) in enumerate(series.items()):
        at = [index + (number - (len(series) - 1) / 2) * width for index in range(len(names))]
        drawn = axes.bar(at, [values.get(name, 0.0) for name in names], width * 0.94, label=label)
        if count <= MOST_LABELS:
            axes.bar_label(drawn, fmt=lambda value: f"{value:.3g}" if value < 1000 else f"{value:.0f}", fontsize=8)
    _name_below(axes, names)
    axes.set_ylabel(what)
    axes.margins(y=0.12)
    if len(series) > 1:
        axes.legend(frameon=False)
    _save(figure, path)


def ratios(path: Path, series: Mapping[str, Mapping[str, tuple[float, float]]], what: str, target: float) -> None:
    """For each name, how far each series is from 1, and how well that is known."""
    names = list(next(iter(series.values())))
    figure = _figure(min(WIDEST, max(5.0, 0.6 * len(names) + 2)), 4.0)
    axes = figure.subplots()
    for number, (label, values) in enumerate(series.items()):
        at = [index + 0.25 * (number - (len(series) - 1) / 2) for index in range(len(names))]
        off, error = zip(*((100 * (values[name][0] - 1), 100 * values[name][1]) for name in names), strict=True)
        axes.errorbar(at, off, yerr=error, fmt="os"[number % 2], markersize=4, capsize=2, linewidth=1, label=label)
    axes.axhline(0.0, color="black", linewidth=0.8)
    limit = 100 * (target - 1)
    axes.axhline(limit, color="gray", linewidth=0.8, linestyle="--", label=f"at most {limit:+.0f}%")
    axes.set_ylim(-1.5 * limit, 1.5 * limit)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:+.0f}%")
    _name_below(axes, names)
    axes.set_ylabel(what)
    axes.legend(frameon=False, ncols=3, loc="upper left")
    _save(figure, path)


def _name_below(axes: Any, names: Sequence[str]) -> None:
    many = len(names) > 4
    axes.set_xticks(range(len(names)), names, rotation=30 if many else 0, ha="right" if many else "center")


def lines(path: Path, charts: Mapping[str, Sequence[Sequence[float]]], across: str, up: str) -> None:
    """A chart for each name, a line for each job."""
    figure = _figure(9.0, 2.8 * len(charts))
    for axes, (name, jobs) in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts.items(), strict=True):
        for number, values in enumerate(jobs):
            axes.step(range(len(values)), values, where="post", label=f"job {number + 1}")
        axes.set_title(name)
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.legend(frameon=False)
    _save(figure, path)


def timeline(path: Path, jobs: Mapping[str, tuple[float, Sequence[tuple[float, float]]]]) -> None:
    """For each job, when it arrived, how long it was there, and when it computed."""
    figure = _figure(9.0, 0.45 * len(jobs) + 1.4)
    axes = figure.subplots()
    for row, (arrived, spans) in enumerate(jobs.values()):
        axes.broken_barh([(arrived, spans[-1][1] - arrived)], (row - 0.3, 0.6), facecolors="#dddddd")
        axes.broken_barh([(begin, end - begin) for begin, end in spans], (row - 0.3, 0.6), facecolors="#4c78a8")
    axes.set_yticks(range(len(jobs)), list(jobs))
    axes.invert_yaxis()
    axes.set_xlabel("seconds; grey: waits, blue: computes")
    _save(figure, path)
