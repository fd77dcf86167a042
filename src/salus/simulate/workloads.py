"""The models of the Salus paper as workloads, and traces made of them.

The numbers are a rough model in round figures, not measurements: memory is a base and a part for each sample of the
batch, near what a 16 GB card of 2016 shows; utilization is an estimate, set so that packing the whole mix gains about
what the paper saw (5 %). To simulate what you measured, pass a profile or a trace of your own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from salus.core.model import Footprint

if TYPE_CHECKING:
    from salus.simulate.trace import TraceJob

MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Workload:
    """A model at one batch size."""

    name: str
    persistent_bytes: int
    ephemeral_bytes: int
    utilization: float
    iteration_s: float


# model: batch sizes; persistent MB, and more a sample; ephemeral MB, and more a sample; ms a sample; utilization at
# the smallest and the largest batch.
_MODELS = {
    "alexnet": ((25, 50, 100), 240, 1.1, 600, 6.5, 0.5, 0.80, 0.95),
    "googlenet": ((25, 50, 100), 40, 1.8, 750, 23, 2.2, 0.85, 0.95),
    "inception3": ((25, 50, 100), 110, 5, 2100, 90, 7.5, 0.92, 0.98),
    "inception4": ((25, 50, 75), 180, 7.5, 3500, 140, 16, 0.94, 0.98),
    "overfeat": ((25, 50, 100), 560, 1.2, 2900, 7, 1.5, 0.90, 0.98),
    "resnet50": ((25, 50, 75), 115, 4.5, 2400, 76, 5, 0.90, 0.95),
    "resnet101": ((25, 50, 75), 150, 7, 2600, 110, 8, 0.92, 0.97),
    "resnet152": ((25, 50, 75), 200, 8, 3000, 150, 11.5, 0.93, 0.98),
    "speech": ((25, 50, 75), 490, 0.1, 0, 70, 10, 0.85, 0.95),
    "superres": ((32, 64, 128), 3, 0.45, 10, 7.7, 1.5, 0.60, 0.80),
    "vae": ((64, 128, 256), 20, 0.01, 0, 0.055, 0.05, 0.55, 0.65),
    "vgg11": ((25, 50, 100), 510, 1.1, 2700, 40, 4, 0.95, 0.99),
    "vgg16": ((25, 50, 100), 530, 1.1, 2900, 62, 7, 0.96, 0.99),
    "vgg19": ((25, 50, 100), 550, 1.1, 3000, 62, 8.5, 0.96, 0.99),
}
# Sizes rather than batches: persistent MB, ephemeral MB, seconds an iteration, utilization.
_SEQ2SEQ = {"small": (22, 60, 0.05, 0.60), "medium": (80, 960, 0.12, 0.80), "large": (260, 4900, 0.35, 0.95)}


def _catalogue() -> Iterator[Workload]:
    for model, (batches, fixed, fixed_more, lane, lane_more, ms, low, high) in _MODELS.items():
        for rank, batch in enumerate(batches):
            yield Workload(
                name=f"{model}_{batch}",
                persistent_bytes=int((fixed + fixed_more * batch) * MB),
                ephemeral_bytes=int((lane + lane_more * batch) * MB),
                utilization=low + (high - low) * rank / (len(batches) - 1),
                iteration_s=ms * batch / 1000,
            )
    for size, (fixed_mb, lane_mb, iteration_s, utilization) in _SEQ2SEQ.items():
        yield Workload(f"seq2seq_{size}", fixed_mb * MB, lane_mb * MB, utilization, iteration_s)


CATALOGUE: dict[str, Workload] = {workload.name: workload for workload in _catalogue()}
"""The paper's 15 models at 3 batch sizes each: 45 workloads by name."""


def pick_workload(workloads: Mapping[str, Workload], model: str) -> Workload | None:
    """The workload of a model for which no batch size is given: the one in the middle, by ephemeral memory."""
    sizes = [workload for name, workload in workloads.items() if name.partition("_")[0] == model]
    sizes.sort(key=lambda workload: workload.ephemeral_bytes)
    return sizes[len(sizes) // 2] if sizes else None


MEDIAN_S = 60.0
SPREAD = 1.5
"""Standard deviation of the logarithm of durations."""
SHORTEST_S = 10.0
LONGEST_S = 2 * 3600.0
DEFAULT_LOAD = 10.0


def generate(count: int, *, seed: int = 0, gpus: int = 1, load: float = DEFAULT_LOAD) -> list[TraceJob]:
    """A trace of the paper's kind: its workloads at random, heavy-tailed durations, jobs that arrive as time goes by.

    `load` is the work that arrives in a second, in seconds of GPU time for each GPU: above 1 a queue builds up. In the
    paper's trace nearly all jobs arrive while the first few run, hence the default.
    """
    from salus.simulate.trace import TraceJob

    rng = random.Random(seed)
    workloads = list(CATALOGUE.values())
    mean_s = MEDIAN_S * math.exp(SPREAD**2 / 2)
    gap_s = mean_s / (load * gpus)
    submit_s = 0.0
    jobs = []
    for number in range(count):
        workload = rng.choice(workloads)
        duration_s = min(LONGEST_S, max(SHORTEST_S, rng.lognormvariate(math.log(MEDIAN_S), SPREAD)))
        jobs.append(
            TraceJob(
                job_id=f"{number:0{len(str(max(count - 1, 0)))}d}",
                submit_s=submit_s,
                iterations=max(1, round(duration_s / workload.iteration_s)),
                iteration_s=workload.iteration_s,
                footprint=Footprint(workload.persistent_bytes, workload.ephemeral_bytes),
                utilization=workload.utilization,
                name=workload.name,
            )
        )
        submit_s += rng.expovariate(1 / gap_s)
    return jobs
