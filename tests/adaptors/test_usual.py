"""Iterations that are all alike: seen in the short way, until something else happens or somebody waits."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import pytest
import torch

from salus import api
from salus.adaptors import habits
from salus.adaptors import torch as adaptor
from tests.adaptors.record import Watched, batches, evaluate, is_usual, mlp, sgd, train
from tests.adaptors.test_both_ways import calls_a_metric


@pytest.fixture
def usual(capfd):
    """A watched process whose script has done the same for a while."""
    process = Watched(quick=True)
    adaptor.install(process.iterations)
    process.model = mlp()
    process.optimizer = sgd(process.model)
    train(process.model, process.optimizer, habits.AFTER + 1)
    process.expect(habits.AFTER + 1)
    assert is_usual()
    yield process
    adaptor.uninstall()
    said = capfd.readouterr()
    assert said.out == "" and "salus:" not in said.err


def test_only_what_was_alike_for_a_while_is_taken_to_go_on_so(usual):
    adaptor.uninstall()
    other = Watched(quick=True)
    adaptor.install(other.iterations)
    train(usual.model, usual.optimizer, habits.AFTER)
    assert not is_usual(), "the first one has nothing before it to be like"
    train(usual.model, usual.optimizer, 1)
    assert is_usual()


def test_every_iteration_is_counted_and_results_are_the_same(usual):
    before = usual.lease.counted
    losses = train(usual.model, usual.optimizer, 20)
    assert usual.lease.counted == before + 20 and is_usual()
    adaptor.uninstall()
    model = mlp()
    optimizer = sgd(model)
    train(model, optimizer, habits.AFTER + 1)
    assert train(model, optimizer, 20) == losses


def test_whoever_waits_is_seen_at_the_end_of_the_iteration_and_at_the_beginning(usual):
    loss = usual.model(batches(1)[0]).sum()
    usual.lease.somebody_waits = True
    loss.backward()
    assert is_usual() and usual.lease.open
    usual.optimizer.step()
    assert not is_usual() and not usual.lease.open
    usual.lease.somebody_waits = False
    train(usual.model, usual.optimizer, habits.AFTER + 1)
    assert is_usual()
    usual.lease.somebody_waits = True
    train(usual.model, usual.optimizer, 1)
    assert not is_usual()
    usual.expect(2 * habits.AFTER + 4)


def test_an_evaluation_is_seen(usual):
    counted = usual.lease.counted
    evaluate(usual.model, 5)
    assert not is_usual()
    usual.expect(counted + 5, boundaries=counted + 5)


def test_an_evaluation_after_a_forward_that_no_backward_followed_is_seen(usual):
    usual.model(batches(1)[0]).sum()
    counted = usual.lease.counted
    evaluate(usual.model, 5)
    usual.expect(counted + 5)


def test_another_module_another_optimizer_and_another_mode_are_seen(usual):
    other = mlp()
    optimizer = sgd(other)
    counted = usual.lease.counted
    train(other, optimizer, 3)
    assert not is_usual() and not usual.lease.open and usual.lease.counted <= counted + 3
    train(usual.model, usual.optimizer, habits.AFTER + 1)
    assert is_usual()
    usual.model.eval()
    usual.model(batches(1)[0])
    assert not is_usual() and not usual.lease.open


def test_gradients_that_are_accumulated_from_now_on_are_one_iteration_a_step(usual):
    counted = usual.lease.counted
    for number, x in enumerate(batches(12), 1):
        (usual.model(x).square().mean() / 4).backward()
        if number % 4 == 0:
            usual.optimizer.step()
            usual.optimizer.zero_grad()
    usual.expect(counted + 3)


def test_explicit_marks_win(usual):
    counted = usual.lease.counted
    with api.iteration():
        train(usual.model, usual.optimizer, 3)
        assert usual.lease.open
    usual.expect(counted + 1)


def test_a_step_without_a_forward_and_one_that_raises_are_as_always(usual):
    counted = usual.lease.counted
    usual.optimizer.step()
    assert not is_usual()
    usual.expect(counted + 1)
    train(usual.model, usual.optimizer, habits.AFTER + 1)
    with pytest.raises(ZeroDivisionError):
        usual.optimizer.step(lambda: 1 / 0)
    train(usual.model, usual.optimizer, 2)
    assert not usual.lease.open


def test_another_thread_that_computes_is_seen(usual):
    counted = usual.lease.counted
    thread = threading.Thread(target=evaluate, args=(mlp(), 3))
    thread.start()
    thread.join()
    assert not is_usual()
    usual.expect(counted + 3)


def test_a_model_that_is_gone_is_not_kept(usual):
    gone = weakref.ref(usual.model)
    del usual.model, usual.optimizer
    gc.collect()
    assert gone() is None
    model = mlp()
    train(model, sgd(model), 2)
    assert not usual.lease.open


def test_what_raises_in_the_forward_leaves_it_open_as_always(usual):
    with pytest.raises(RuntimeError):
        usual.model(torch.ones(3, 5))
    assert usual.lease.open
    counted = usual.lease.counted
    train(usual.model, usual.optimizer, 2)
    usual.expect(counted + 2)


def test_a_capture_that_begins_is_no_iteration_like_the_others(usual):
    assert torch.cuda.CUDAGraph.capture_begin.__wrapped__ is not None
    begin_a_capture()
    assert not is_usual()


def begin_a_capture():
    """Of no graph: there may be no GPU to capture on, and a torch that was built for one makes none without it."""
    with contextlib.suppress(Exception):
        torch.cuda.CUDAGraph.capture_begin(None)


def test_where_captures_are_not_seen_there_is_no_short_way(monkeypatch, capfd):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("CUDAGraph", (), {}))
    process = Watched(quick=True)
    adaptor.install(process.iterations)
    try:
        model = mlp()
        train(model, sgd(model), habits.AFTER + 2)
        assert not is_usual()
    finally:
        adaptor.uninstall()
    assert "captures" in capfd.readouterr().err


def test_a_module_that_owns_nothing_is_no_reason_to_look_closer(usual):
    calls_a_metric(usual)
    assert is_usual()


def test_whoever_waits_for_one_that_serves_is_seen(usual):
    model = mlp().eval()
    counted = usual.lease.counted
    with torch.no_grad():
        for x in batches(habits.AFTER + 2):
            model(x)
        assert is_usual()
        usual.lease.somebody_waits = True
        model(batches(1)[0])
        assert not is_usual()
    usual.expect(counted + habits.AFTER + 3)


def test_who_is_interrupted_on_the_way_out_begins_again(usual):
    """A signal's handler may raise after the lease has been told and before we know."""
    _, end = usual.lease.usual()

    def interrupted(iterations):
        end(iterations)
        raise KeyboardInterrupt

    watch = adaptor.installed()
    watch._usual = watch._usual._replace(end=interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(usual.model, usual.optimizer, 1)
    watch._usual = watch._usual._replace(end=end)
    counted = usual.lease.counted
    usual.model(batches(1)[0])
    assert usual.lease.open, "it must not run without a lease"
    train(usual.model, usual.optimizer, 2)
    usual.expect(counted + 2)


@pytest.mark.parametrize("what", ["built", "moved", "captured"])
def test_what_a_new_model_is_made_of_is_not_left_in_the_lane(usual, what):
    class Memory:
        active = gpu_is_used = True
        rests = 0

        def rest(self):
            self.rests += 1

    adaptor.installed().memory = memory = Memory()
    if what == "built":
        mlp()
    elif what == "moved":
        usual.model.to("cpu")
    else:
        begin_a_capture()
    assert not is_usual() and memory.rests == 1
    adaptor.installed().memory = None


def test_a_step_that_makes_state_is_none_of_the_usual_ones(capfd):
    class Memory:
        active = gpu_is_used = True
        rests = firsts = 0

        def first_step_began(self):
            self.firsts += 1

        def first_step_ended(self):
            pass

        def rest(self):
            pass

    process, memory = Watched(quick=True), Memory()
    adaptor.install(process.iterations, memory)
    try:
        model = mlp()
        optimizer = sgd(model, momentum=0.9)
        train(model, optimizer, habits.AFTER + 2)
        assert is_usual() and memory.firsts == 1
        optimizer.state.clear()
        train(model, optimizer, 1)
        assert not is_usual() and memory.firsts == 2
    finally:
        adaptor.uninstall()


def test_another_thread_does_not_take_the_short_way(usual):
    thread = threading.Thread(target=train, args=(usual.model, usual.optimizer, 2))
    thread.start()
    thread.join()
    assert not is_usual() and not usual.lease.open
