"""A lease that records its calls and insists that they alternate, and the small scripts' parts."""

from __future__ import annotations

import os
import threading
import time

import torch
from torch import nn

from salus.adaptors import habits
from salus.adaptors import torch as adaptor
from salus.adaptors.iterations import Iterations
from salus.client.turns import Turn, on_page
from salus.protocol.page import JobState, Page, Word

A_WHILE = 2 * habits.AFTER + 3
"""So many iterations that are alike, and they follow one another."""


class RecordingLease:
    def __init__(self, quick=False, runs_on=False):
        self.quick = quick
        """Whether iterations that are all alike begin and end in the short way, while nobody waits."""
        self.runs_on = runs_on
        """And whether they follow one another after that; if not, the story can be compared call by call."""
        self.sits = None
        self.went_on = 0
        self.somebody_waits = False
        self.ends: list[int] = []
        self.inside: list[int] = []
        """What ended while another thread was inside an iteration."""
        self.open = False
        self.story: list[str] = []
        """Notes of a test, in order with the calls."""

    def begin(self):
        assert not self.open, "begin in an open iteration"
        self.open = True
        self.story.append("begin")

    def end(self, iterations=1):
        assert self.open, "end without a begin"
        self.open = False
        self.ends.append(iterations)
        self.story.append(f"end {iterations}")

    def count(self, iterations):
        self.inside.append(iterations)
        self.story.append(f"count {iterations}")

    def is_wanted(self):
        return bool(self.somebody_waits)

    def usual(self):
        return (lambda: self._quickly(self.begin), lambda n: self._quickly(self.end, int(n))) if self.quick else None

    def run_on(self, sits):
        if not self.runs_on or self.somebody_waits:
            return None
        self.sits = sits
        self.begin()
        return Turn(lambda n: self._quickly(self._turn, int(n)), 0)

    def _turn(self, iterations):
        self.end(iterations)
        self.begin()

    def goes_on(self):
        assert self.open
        self.went_on += 1

    def _quickly(self, do, *args):
        if not self.somebody_waits:
            do(*args)
        return not self.somebody_waits

    @property
    def counted(self):
        return sum(self.ends) + sum(self.inside)

    @property
    def boundaries(self):
        return len(self.ends)


class PagedLease(RecordingLease):
    """The same for iterations that follow one another on a real page: their ends are counted in C, where they can."""

    def __init__(self, quick=False, runs_on=False):
        self._page, descriptor = Page.create()
        os.close(descriptor)
        super().__init__(quick, runs_on)

    @property
    def somebody_waits(self):
        return bool(self._page.words[Word.REVOKE])

    @somebody_waits.setter
    def somebody_waits(self, waits):
        self._page.words[Word.REVOKE] = waits

    def run_on(self, sits):
        if super().run_on(sits) is None:
            return None
        self._page.words[Word.STATE] = JobState.RUNNING_ON
        self._page.words[Word.BEGAN_NS] = time.monotonic_ns()
        return on_page(self._page.words, self._page.address())

    def end(self, iterations=1):
        self._runs_no_more()
        super().end(iterations)

    def goes_on(self):
        self._runs_no_more()
        super().goes_on()

    def _runs_no_more(self):
        words = self._page.words
        if words[Word.STATE] == JobState.RUNNING_ON:
            words[Word.STATE] = JobState.ITERATING
            self.ends += [1] * words[Word.ITERATIONS] + [0] * (words[Word.BOUNDARIES] - words[Word.ITERATIONS])
            words[Word.ITERATIONS] = words[Word.BOUNDARIES] = 0

    @property
    def counted(self):
        return super().counted + self._page.words[Word.ITERATIONS]

    @property
    def boundaries(self):
        return super().boundaries + self._page.words[Word.BOUNDARIES]


class Watched:
    """A watched process: its lease and its iterations."""

    def __init__(self, quick=False, runs_on=False, lease=RecordingLease):
        self.lease = lease(quick, runs_on)
        self.iterations = Iterations(self.lease)

    def note(self, text):
        self.lease.story.append(text)

    def expect(self, counted, *, boundaries=None):
        """Nothing is open, this many iterations were counted, at this many boundaries."""
        assert not self.lease.open
        assert self.lease.counted == counted, self.lease.story
        if boundaries is not None:
            assert len(self.lease.ends) == boundaries, self.lease.story


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=generator) for _ in range(count)]


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def train(model, optimizer, count=5):
    """The plain loop."""
    losses = []
    for x in batches(count):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def evaluate(model, count=5):
    model.eval()
    with torch.no_grad():
        outputs = [model(x) for x in batches(count)]
    model.train()
    return outputs


def is_usual() -> bool:
    watch = adaptor.installed()
    return watch is not None and (watch._usual is not None or watch._serving is not None)


def runs_on() -> bool:
    watch = adaptor.installed()
    return watch is not None and watch.follows


def sits(process) -> None:
    """The helper of its lease finds that no iteration has ended for long."""
    thread = threading.Thread(target=process.lease.sits)
    thread.start()
    thread.join()
