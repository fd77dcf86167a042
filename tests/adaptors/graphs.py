"""Made-up CUDA graphs: what is captured runs on the processor, and a replay notes what the lease was meanwhile."""

from __future__ import annotations

import contextlib


class Graph:
    """As `torch.cuda.CUDAGraph`, where there is no GPU."""

    under_way: Graph | None = None
    lease = None
    """Of the process that is watched."""

    def __init__(self):
        self.replayed: list[bool] = []
        """For each replay, whether an iteration was open."""
        self.on_replay = lambda: None

    def capture_begin(self, *_args, **_kwargs):
        assert Graph.under_way is None
        Graph.under_way = self

    def capture_end(self):
        Graph.under_way = None

    def replay(self):
        self.replayed.append(Graph.lease.open)
        self.on_replay()


@contextlib.contextmanager
def captured(graph):
    """As `torch.cuda.graph`."""
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()
