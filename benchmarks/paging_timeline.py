"""A picture of paging, from the committed result: who computed, and whose memory was on its way, when.

python benchmarks/paging_timeline.py [benchmarks/results/gpu-pressure.json] [--out docs/pictures/paging.png]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

HERE = Path(__file__).parent
COLOURS = {"computes": "#4c78a8", "PageIn": "#54a24b", "PageOut": "#e45756"}
NAMES = {"computes": "computes", "PageIn": "comes in from the host", "PageOut": "goes to the host"}


def draw(path: Path, policies: dict[str, dict[str, object]]) -> None:
    figure = Figure(figsize=(11, 3.2 * len(policies)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (policy, row) in zip(figure.subplots(len(policies), squeeze=False)[:, 0], policies.items(), strict=True):
        timeline = row["timeline"]
        assert isinstance(timeline, dict)
        spans = [("computes", job, start, end) for job, _, start, end in timeline["leases"]]
        spans += [(kind, job, start, end) for kind, job, start, end in timeline["moves"]]
        began = min(start for _, _, start, _ in spans)
        jobs = sorted({job for _, job, _, _ in spans}, key=int)
        for kind, job, start, end in spans:
            # What moves lies in the lower half of its job's row, so that both can be seen.
            top, height = (0.0, 0.42) if kind == "computes" else (0.44, 0.3)
            at = jobs.index(job) + top
            axes.broken_barh([(start - began, end - start)], (at, height), facecolors=COLOURS[kind])
        axes.set_yticks([number + 0.37 for number in range(len(jobs))], [f"job {job}" for job in jobs])
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        hidden, copies = row["hidden"], row["copies"]
        assert isinstance(copies, list)
        told = (
            f"{hidden:.0%} of a page-in, at the median, is behind the computation of others"
            if copies
            else "nothing moves"
        )
        axes.set_title(f"{policy}: {told}")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=name) for kind, name in NAMES.items()],
        loc="outside lower center", ncols=len(NAMES), frameon=False,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path, nargs="?", default=HERE / "results" / "gpu-pressure.json")
    parser.add_argument("--out", type=Path, default=HERE.parent / "docs" / "pictures" / "paging.png")
    options = parser.parse_args()
    draw(options.out, json.loads(options.result.read_text())["paging"]["policies"])
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
