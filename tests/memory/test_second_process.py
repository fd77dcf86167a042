"""A second process of a job that uses the device: it is turned away, says so once, and runs on."""

from __future__ import annotations

import pytest

from salus.client.lease import Lease
from salus.protocol import messages as msg
from tests.memory.host_memory import HostMemory


class NeverOpened(HostMemory):
    def __init__(self) -> None:
        self.stays = False

    def open(self, page_address: int, channel: int) -> None:
        pytest.fail("there is no memory for it")


def test_a_second_process_iterates_without_the_service_and_without_an_error(serve, capsys):
    service = serve()
    with service.connect() as launcher:
        job = launcher.request(msg.Register("twice", ["x"], "/"))
        first, second = (Lease(service.socket, job.job_id, job.token) for _ in range(2))
        first.begin()
        first.end()
        assert not second.attach(NeverOpened())
        for _ in range(3):
            second.begin()
            assert second.is_iterating()
            second.end()
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("salus: ")]
        assert len(said) == 1 and "another process" in said[0] and said[0].endswith("goes on unmanaged")
        first.begin()
        first.end()
        assert service.jobs()["twice"]["iterations"] == 2, "the first one is managed as before"


def test_a_job_that_attached_before_it_had_memory_is_told_that_it_takes_turns_only(serve, capsys):
    """Its first iteration, or a mark, came before the first use of the GPU."""
    service = serve()
    with service.connect() as launcher:
        job = launcher.request(msg.Register("early", ["x"], "/"))
        lease = Lease(service.socket, job.job_id, job.token)
        lease.begin()
        lease.end()
        assert not lease.attach(NeverOpened())
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("salus: ")]
        assert len(said) == 1 and said[0].endswith("shares the GPU by turns, not its memory")
        lease.begin()
        lease.end()
        assert service.jobs()["early"]["iterations"] == 2
