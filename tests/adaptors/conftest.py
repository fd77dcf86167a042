from __future__ import annotations

import pytest
import torch

from salus.adaptors import habits
from salus.adaptors import torch as adaptor
from tests.adaptors.graphs import Graph
from tests.adaptors.record import A_WHILE, PagedLease, RecordingLease, Watched, mlp, runs_on, sgd, train


@pytest.fixture(params=["each", "usual"])
def watched(request, capfd, monkeypatch):
    """This process, watched; afterwards nothing may have been said and nothing left behind.

    Each time twice: as always, and with iterations that are taken to be all alike after the first one.
    """
    monkeypatch.setattr(habits, "AFTER", 1)
    process = Watched(quick=request.param == "usual")
    adaptor.install(process.iterations)
    yield process
    adaptor.uninstall()
    said = capfd.readouterr()
    assert said.out == "" and "salus:" not in said.err


@pytest.fixture(params=[RecordingLease, PagedLease], ids=["in Python", "in C"])
def following(request, capfd):
    """A watched process whose iterations follow one another."""
    process = Watched(quick=True, runs_on=True, lease=request.param)
    adaptor.install(process.iterations)
    process.model = mlp()
    process.optimizer = sgd(process.model)
    train(process.model, process.optimizer, A_WHILE)
    assert runs_on() and process.lease.open and process.lease.counted == A_WHILE
    yield process
    adaptor.uninstall()
    assert not process.lease.open
    said = capfd.readouterr()
    assert said.out == "" and "salus:" not in said.err


@pytest.fixture
def cuda_graphs(monkeypatch):
    """To be asked for before `watched`: what is in `torch.cuda` when a process begins to be watched is wrapped."""
    made = type("CUDAGraph", (Graph,), {})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", made)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Graph.under_way is not None)
    yield made
    Graph.under_way = Graph.lease = None
