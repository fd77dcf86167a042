"""The whole adaptor around captures: who holds the lease, what is counted, and that nothing ends within a capture."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from salus.adaptors import habits
from salus.adaptors import torch as adaptor
from salus.adaptors.captures import Captures
from salus.adaptors.iterations import Iterations
from salus.adaptors.torch_memory import RoutedLease
from tests.adaptors.graphs import Graph
from tests.adaptors.record import RecordingLease, batches, mlp, sgd, train


class Lease(RecordingLease):
    def is_iterating(self) -> bool:
        return self.open

    def end(self, iterations: int = 1) -> None:
        assert Graph.under_way is None, "a boundary within a capture"
        super().end(iterations)

    def begin(self) -> None:
        assert Graph.under_way is None, "a wait for the lease within a capture"
        super().begin()


class Memory:
    active = False
    gpu_is_used = True

    def __init__(self) -> None:
        self.rests = 0

    def capture_began(self) -> None:
        self.rests += 1

    def capture_ended(self) -> None:
        self.rests -= 1

    def rest(self) -> None:
        pass


@pytest.fixture(params=["hooks first", "captures first"])
def job(request, cuda_graphs):
    """A process that is watched; the two that stand in front of a capture in both orders."""
    lease, memory = Lease(), Memory()
    memory.captures = Captures(lease, memory)
    graphs = cuda_graphs
    if request.param == "captures first":
        memory.captures.install(torch.cuda.CUDAGraph)
    adaptor.install(Iterations(RoutedLease(lease, memory)))
    if request.param == "hooks first":
        memory.captures.install(torch.cuda.CUDAGraph)
    Graph.lease = lease
    model = mlp()
    yield SimpleNamespace(
        lease=lease, memory=memory, captures=memory.captures, model=model, optimizer=sgd(model), graph=graphs
    )
    adaptor.uninstall()


def step(job, x) -> None:
    job.optimizer.zero_grad()
    job.model(x).square().mean().backward()
    job.optimizer.step()


def capture(job, graph, *, also=lambda: None) -> None:
    graph.capture_begin()
    try:
        assert job.lease.open and job.memory.rests == 1
        step(job, batches(1)[0])
        also()
        assert job.lease.open and job.memory.rests == 1
    finally:
        graph.capture_end()


@pytest.mark.parametrize("warm_up", [0, 3, 3 * habits.AFTER])
def test_a_whole_step_is_captured_with_the_lease_and_each_replay_is_an_iteration(job, warm_up):
    train(job.model, job.optimizer, warm_up)
    graph = job.graph()
    capture(job, graph)
    assert not job.lease.open and job.lease.counted == warm_up
    for _ in range(5):
        graph.replay()
    assert graph.replayed == [True] * 5 and not job.lease.open
    assert job.lease.counted == warm_up + 5


def test_a_capture_that_fails_leaves_a_job_that_trains_on(job):
    train(job.model, job.optimizer, 2)

    def fails() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        capture(job, job.graph(), also=fails)
    assert not job.lease.open and job.memory.rests == 0
    train(job.model, job.optimizer, 2)
    assert job.lease.counted == 4 and not job.lease.open


def test_captures_between_eager_iterations(job):
    for number in range(1, 4):
        graph = job.graph()
        capture(job, graph)
        graph.replay()
        train(job.model, job.optimizer, 2)
        assert job.lease.counted == 3 * number and not job.lease.open


def test_a_capture_within_an_iteration_is_a_part_of_it(job):
    train(job.model, job.optimizer, 1)
    x = batches(1)[0]
    job.optimizer.zero_grad()
    loss = job.model(x).square().mean()
    graph = job.graph()
    graph.capture_begin()
    loss.sin()
    graph.capture_end()
    assert job.lease.open, "the iteration goes on"
    loss.backward()
    job.optimizer.step()
    assert not job.lease.open and job.lease.counted == 2
