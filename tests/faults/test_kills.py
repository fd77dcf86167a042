"""Random kills of jobs and of the service, under load. `make soak` does a thousand."""

from __future__ import annotations

from tests.faults.soak import Soak


def test_whoever_is_not_killed_ends_well_and_nothing_is_left(tmp_path):
    soak = Soak(kills=200, seed=1, folder=tmp_path)
    soak.run()
    assert soak.killed == 200 and soak.restarts > 20
