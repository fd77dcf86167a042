from __future__ import annotations

import pytest

from salus.adaptors import habits
from salus.adaptors import torch as adaptor
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
