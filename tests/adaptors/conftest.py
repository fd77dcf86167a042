from __future__ import annotations

import pytest

from salus.adaptors import torch as adaptor
from tests.adaptors.record import Watched


@pytest.fixture
def watched(capfd):
    """This process, watched; afterwards nothing may have been said and nothing left behind."""
    process = Watched()
    adaptor.install(process.iterations)
    yield process
    adaptor.uninstall()
    said = capfd.readouterr()
    assert said.out == "" and "salus:" not in said.err
