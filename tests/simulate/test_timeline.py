"""The timeline as a page: what it says and shows, run in Node with a made-up browser that notes what is drawn."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from salus.core.model import Footprint
from salus.simulate import report
from salus.simulate.engine import Hardware, JobRecord, Outcome, Segment
from salus.simulate.metrics import summarize
from salus.simulate.trace import TraceJob

BROWSER = Path(__file__).with_name("browser.js")


def outcome(count: int, gpus: int = 1) -> Outcome:
    """One job after the other, each for a second."""
    records, segments = [], []
    for number in range(count):
        job = TraceJob(str(number + 1), float(number), 10, 0.1, Footprint(0, 0), name=f"job{number}")
        records.append(JobRecord(job, number % gpus, number + 0.25, number + 1.0, 1))
        segments.append(Segment(job.job_id, number % gpus, 1, number + 0.25, number + 1.0))
    return Outcome("fifo", Hardware(gpus, 1 << 30), records, 0.75 * count, segments)


def shown(tmp_path: Path, made: Outcome, view: str = "jobs", **how: str) -> dict:
    """What a person sees."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node, to run the program of the page")
    page = tmp_path / "timeline.html"
    report.write_timeline(page, {"fifo": made}, {"fifo": summarize(made)}, **how)
    done = subprocess.run([node, BROWSER, page, view], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_page_has_a_legend_with_every_job_and_its_colour(tmp_path):
    legend = shown(tmp_path, outcome(3))["legend"]
    assert legend == [
        [report.colour_of(0), "1 job0"],
        [report.colour_of(1), "2 job1"],
        [report.colour_of(2), "3 job2"],
        ["var(--wait)", "waits (by job)"],
    ]


def test_a_legend_of_many_jobs_names_the_first_and_says_how_many_more_there_are(tmp_path):
    legend = shown(tmp_path, outcome(100))["legend"]
    assert len(legend) == 26
    assert legend[-2] == [None, "and 76 more: point at a bar"]


@pytest.mark.parametrize("view", ["jobs", "lanes"])
def test_bars_have_the_colours_of_the_legend(tmp_path, view):
    drawn = shown(tmp_path, outcome(3), view)["rectangles"]
    colours = [colour for colour in drawn if colour != report.WAITS]
    assert colours == [report.colour_of(rank) for rank in range(3)]
    assert (report.WAITS in drawn) == (view == "jobs")


def test_the_page_and_the_picture_have_the_same_colours(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    used: list[str] = []
    draw = Axes.broken_barh

    def noted(self: Axes, spans: object, place: object, **how: object) -> object:
        used.append(str(how["color"]))
        return draw(self, spans, place, **how)

    monkeypatch.setattr(Axes, "broken_barh", noted)
    report.write_timeline_picture(tmp_path / "p.png", {"fifo": outcome(3)})
    told = shown(tmp_path, outcome(3))
    assert used == [each for rank in range(3) for each in (report.WAITS, told["legend"][rank][0])]


def test_a_hundred_jobs_have_a_hundred_colours():
    colours = [report.colour_of(rank) for rank in range(100)]
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)
    assert len(set(colours)) == 100


def test_on_a_processor_the_page_does_not_say_gpu(tmp_path):
    told = shown(tmp_path, outcome(3), device="processor")
    assert "processor utilization" in told["text"]
    assert "GPU" not in told["text"] and "GPU" not in told["tip"]


def test_on_gpus_the_page_says_which(tmp_path):
    told = shown(tmp_path, outcome(4, gpus=2), "lanes")
    assert "GPU utilization" in told["text"]
    assert "GPU 0, lane 1" in told["text"] and "GPU 1, lane 1" in told["text"]
    assert "GPU 0, lane 1" in told["tip"]
