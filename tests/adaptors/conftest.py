from __future__ import annotations

import pytest

from salus.adaptors import habits
from salus.adaptors import torch as adaptor
from tests.adaptors.record import Watched


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
