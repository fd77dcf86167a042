"""Iterations that are all alike: seen in the short way, until something else happens or somebody waits."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from salus import api
from salus.adaptors import habits
from salus.adaptors import torch as adaptor
from tests.adaptors.record import Watched, batches, evaluate, mlp, sgd, train


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


def is_usual() -> bool:
    watch = adaptor.installed()
    return watch is not None and (watch._usual is not None or watch._serving is not None)


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
    import gc
    import weakref

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


# What comes after a while of the same: each is seen as if there had been no short way.


def left_over_then(evaluates):
    """A forward and a backward that no step follows, and then an evaluation."""

    def script(process):
        loss = process.model(batches(1)[0]).square().mean()
        loss.backward()
        evaluates(process)
        train(process.model, process.optimizer, 2)
        return loss

    return script


def of_a_copy(process):
    copied = mlp().eval()
    with torch.no_grad():
        for x in batches(20):
            copied(x)


def without_a_mode(process):
    with torch.no_grad():
        for x in batches(20):
            process.model(x)


def with_a_mode(process):
    evaluate(process.model, 12)


def a_penalty(process):
    """A backward of no forward, before the iteration."""
    for _ in range(3):
        process.note("before")
        process.model[0].weight.square().sum().backward()
        process.note("after")
        train(process.model, process.optimizer, 1)


def a_second_backward(process):
    for x in batches(3):
        loss = process.model(x).square().mean()
        loss.backward(retain_graph=True)
        process.optimizer.step()
        process.note("again")
        process.model(x).sum().backward()
        process.note("done")


def steps_in_its_backward(process):
    handle = process.model[0].weight.register_post_accumulate_grad_hook(lambda _: process.optimizer.step())
    for x in batches(3):
        process.model(x).square().mean().backward()
        process.note("backward is over")
    handle.remove()


def raises_in_its_backward(process):
    handle = process.model[0].weight.register_post_accumulate_grad_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        process.model(batches(1)[0]).square().mean().backward()
    handle.remove()
    of_a_copy(process)
    train(process.model, process.optimizer, 2)


def updates_its_scaler_late(process):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number, x in enumerate(batches(4)):
        loss = process.model(x).square().mean()
        if number:
            scaler.update()
        process.note("forward is over")
        scaler.scale(loss).backward()
        process.note("backward is over")
        scaler.step(process.optimizer)


def calls_a_metric(process):
    metric = torch.nn.MSELoss()
    for x in batches(4):
        output = process.model(x)
        metric(output, torch.zeros_like(output)).backward()
        metric(output.detach(), torch.zeros_like(output))
        process.optimizer.step()


def goes_on(process):
    process.rounds(6)


def steps_once_more(process):
    process.rounds(2)
    process.optimizer.step()
    process.note("once more")
    process.rounds(3)


def evaluates_in_between(process):
    process.rounds(3)
    evaluate(process.model, 3)
    process.rounds(3)


def trains_alone(process):
    """The leader, and then the other one, for longer than a leader may be silent."""
    train(process.model, process.optimizer, 3)
    other = mlp()
    train(other, sgd(other), 120)


def serves_something_else(process):
    """Others, with gradients, in another thread, and one that raises."""
    other = mlp().eval()
    process.rounds(2)
    with torch.no_grad():
        other(batches(1)[0])
    other(batches(1)[0])
    process.rounds(2)
    thread = threading.Thread(target=process.rounds, args=(3,))
    thread.start()
    thread.join()
    process.rounds(2)
    with pytest.raises(RuntimeError), torch.no_grad():
        other(torch.ones(3, 5))
    process.rounds(12)


def looks_closer(process):
    with api.iteration():
        process.rounds(1)
    with api.iteration():
        pass
    process.rounds(2)


def plain(process):
    """One forward, one backward, one step."""
    process.rounds = lambda count: train(process.model, process.optimizer, count)


def gan(process):
    """Two modules and two optimizers, in turns."""
    judge, maker = process.model, mlp()
    both = process.optimizer, sgd(maker)

    def rounds(count):
        for x in batches(count):
            for module, optimizer in zip((judge, maker), both, strict=True):
                optimizer.zero_grad()
                judge(x.detach())
                module(x).square().mean().backward()
                process.note("backward is over")
                optimizer.step()

    process.rounds = rounds


def accumulates(process):
    def rounds(count):
        for x in batches(count):
            for _ in range(3):
                process.model(x).square().mean().backward()
                process.note("backward is over")
            process.optimizer.step()
            process.optimizer.zero_grad()

    process.rounds = rounds


def in_its_step(process, evaluations=1):
    """As Lightning does; and, with more of them, as LBFGS."""

    def rounds(count):
        for x in batches(count):

            def closure(x=x):
                for _ in range(evaluations):
                    process.optimizer.zero_grad()
                    loss = process.model(x).square().mean()
                    loss.backward()
                return loss

            process.optimizer.step(closure)
            process.note("step is over")

    process.rounds = rounds


def in_its_step_often(process):
    in_its_step(process, 4)


def says_that_there_is_no_closure(process):
    """As Accelerate does."""

    def rounds(count):
        for x in batches(count):
            process.model(x).square().mean().backward()
            process.optimizer.step(None)

    process.rounds = rounds


def serves(process):
    model = mlp().eval()

    def rounds(count):
        with torch.inference_mode():
            for x in batches(count):
                model(x)
                process.note("served")

    process.rounds = rounds


SHAPES = [serves, plain, gan, accumulates, in_its_step, in_its_step_often, says_that_there_is_no_closure]


@pytest.mark.parametrize(
    "script", [goes_on, steps_once_more, evaluates_in_between, serves_something_else, trains_alone, looks_closer]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_iterations_of_every_shape_are_seen_as_always(shape, script, capfd):
    stories = []
    for quick in (False, True):
        process = Watched(quick=quick)
        adaptor.install(process.iterations)
        try:
            process.model = mlp()
            process.optimizer = sgd(process.model)
            shape(process)
            process.rounds(habits.AFTER + 3)
            assert is_usual() == quick
            process.lease.story.clear()
            script(process)
        finally:
            adaptor.uninstall()
        stories.append(process.lease.story)
    assert stories[0] == stories[1]
    assert "salus:" not in capfd.readouterr().err


def test_a_capture_that_begins_is_no_iteration_like_the_others(usual):
    graph = torch.cuda.CUDAGraph
    assert graph.capture_begin.__wrapped__ is not None
    with contextlib.suppress(Exception):  # there may be no GPU to capture on
        graph.capture_begin(object.__new__(graph))
    assert not is_usual()


def test_where_captures_are_not_seen_there_is_no_short_way(monkeypatch, capfd):
    monkeypatch.delattr(torch.cuda.CUDAGraph, "capture_begin")
    process = Watched(quick=True)
    adaptor.install(process.iterations)
    try:
        model = mlp()
        train(model, sgd(model), habits.AFTER + 2)
        assert not is_usual()
    finally:
        adaptor.uninstall()
    assert "captures" in capfd.readouterr().err


@pytest.mark.parametrize(
    "script",
    [
        *(left_over_then(what) for what in (of_a_copy, without_a_mode, with_a_mode)),
        a_penalty,
        a_second_backward,
        steps_in_its_backward,
        raises_in_its_backward,
        updates_its_scaler_late,
        calls_a_metric,
    ],
)
def test_whatever_comes_then_is_seen_as_always(script, capfd):
    stories = []
    for quick in (False, True):
        process = Watched(quick=quick)
        adaptor.install(process.iterations)
        try:
            process.model = mlp()
            process.optimizer = sgd(process.model)
            train(process.model, process.optimizer, habits.AFTER + 1)
            assert is_usual() == quick
            process.lease.story.clear()
            script(process)
        finally:
            adaptor.uninstall()
        stories.append(process.lease.story)
    assert stories[0] == stories[1]
    assert "salus:" not in capfd.readouterr().err


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
