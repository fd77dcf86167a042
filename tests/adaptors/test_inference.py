"""Iterations of inference, and of evaluation between, beside and after training."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from tests.adaptors.record import batches, evaluate, mlp, sgd, train


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_every_top_level_forward_is_one_iteration_where_nothing_trains(watched, context, training):
    model = mlp().train(training)
    with context():
        for x in batches(4):
            model(x)
            assert not watched.lease.open
    watched.expect(4, boundaries=4)


def test_the_iteration_is_open_during_the_forward(watched):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x):
            seen.append(watched.lease.open)
            return self.layer(self.layer(x).expand(-1, 4))

    seen = []
    evaluate(Model(), 3)
    assert seen == [True] * 3
    watched.expect(3, boundaries=3)


def test_a_forward_that_raises_ends_its_iteration_and_leaves_the_module_as_it_was(watched):
    model = mlp().eval()
    called = []
    model.register_forward_hook(lambda *_: called.append(1), always_call=True)
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(torch.zeros(3, 5))
            model(torch.zeros(3, 4))
    watched.expect(4, boundaries=4)
    assert len(called) == 4 and len(model._forward_hooks) == len(model._forward_hooks_always_called) == 1


def test_a_module_outside_a_call_can_be_copied_and_pickled(watched):
    model = mlp()
    train(model, sgd(model), 1)
    evaluate(model, 1)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not twin._forward_hooks and not twin._forward_pre_hooks and not twin._forward_hooks_always_called


def test_a_module_that_copies_itself_in_its_forward_still_can(watched):
    class Copying(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x, deep=True):
            return self.layer(x) + (copy.deepcopy(self)(x, deep=False) if deep else 0)

    evaluate(Copying(), 3)
    watched.expect(3, boundaries=3)


def test_a_module_that_calls_itself_is_one_iteration_a_call(watched):
    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, depth=3):
            x = self.layer(x)
            return x if depth == 0 else self(x, depth - 1) + self(x, depth - 1)

    evaluate(Tree(), 3)
    watched.expect(3, boundaries=3)


@pytest.mark.parametrize("place", ["before the forward", "after the forward", "after the backward"])
def test_a_teacher_inside_an_open_iteration_changes_nothing(watched, place):
    student, teacher = mlp(), mlp().eval()
    optimizer = sgd(student)

    def teach(where):
        if where == place:
            with torch.no_grad():
                teacher(x)

    for x in batches(4):
        teach("before the forward")
        out = student(x)
        teach("after the forward")
        out.square().mean().backward()
        teach("after the backward")
        optimizer.step()
    # Before the forward no iteration is open: there it is one of its own, as any other inference.
    assert watched.lease.ends == ([1, 1] * 4 if place == "before the forward" else [1] * 4)
    watched.expect(sum(watched.lease.ends))


def test_many_forwards_of_a_target_network_before_the_backward_end_nothing(watched):
    model, target = mlp(), mlp()
    optimizer = sgd(model)
    for x in batches(3):
        loss = model(x).square().mean()
        with torch.no_grad():
            for _ in range(20):
                target(x)
        loss.backward()
        optimizer.step()
    watched.expect(3, boundaries=3)


def test_evaluation_between_epochs_counts_every_forward(watched):
    model = mlp()
    optimizer = sgd(model)
    for _ in range(2):
        train(model, optimizer, 5)
        evaluate(model, 3)
    watched.expect(16, boundaries=16)


def test_the_rest_of_an_accumulation_ends_uncounted_where_the_model_is_evaluated(watched):
    model = mlp()
    optimizer = sgd(model)
    train(model, optimizer, 2)
    model(batches(1)[0]).sum().backward()
    evaluate(model, 3)
    assert watched.lease.ends == [1, 1, 0, 1, 1, 1]
    watched.expect(5)


def test_the_rest_of_an_accumulation_ends_where_another_model_is_evaluated_for_long(watched):
    model, average = mlp(), mlp()
    optimizer = sgd(model)
    train(model, optimizer, 2)
    model(batches(1)[0]).sum().backward()
    evaluate(average, 10)
    assert watched.lease.ends == [1, 1, 0, 1, 1, 1]
    watched.expect(5)


def test_a_forward_whose_result_was_dropped_ends_uncounted_where_the_model_is_evaluated(watched):
    model = mlp()
    optimizer = sgd(model)
    train(model, optimizer, 2)
    model(batches(1)[0])
    evaluate(model, 3)
    assert watched.lease.ends == [1, 1, 0, 1, 1, 1]
    watched.expect(5)


@pytest.mark.parametrize("wrap", [lambda y: y, lambda y: (y, None), lambda y: {"y": [y]}], ids=["one", "tuple", "deep"])
def test_a_forward_whose_result_still_waits_for_its_backward_is_never_ended(watched, wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return wrap(self.body(x))

    def only(y):
        return y if isinstance(y, torch.Tensor) else only(y[0] if isinstance(y, (tuple, list)) else y["y"])

    model = Model()
    optimizer = sgd(model)
    train(model.body, optimizer, 1)
    loss = only(model(batches(1)[0])).sum()
    evaluate(model, 20)
    assert watched.lease.ends == [1] and watched.lease.open
    loss.backward()
    optimizer.step()
    watched.expect(2, boundaries=2)


def test_a_backward_that_keeps_its_graph_does_not_allow_an_end(watched):
    model = mlp()
    optimizer = sgd(model)
    loss = model(batches(1)[0]).sum()
    loss.backward(retain_graph=True)
    evaluate(model, 9)
    loss.backward()
    optimizer.step()
    watched.expect(1, boundaries=1)


def test_many_calls_of_a_cell_before_one_backward_are_one_iteration(watched):
    cell = nn.LSTMCell(4, 4)
    optimizer = sgd(cell)
    for x in batches(3):
        state = None
        for _ in range(30):
            state = cell(x, state)
        state[0].sum().backward()
        optimizer.step()
    watched.expect(3, boundaries=3)
    assert not cell._forward_hooks


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_works(watched):
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    evaluate(model, 3)
    watched.expect(3, boundaries=3)
    train(model, sgd(model), 3)
    watched.expect(6, boundaries=6)


def known_to_serve(watched, model):
    """In two threads. Before that, a forward of the second within one of the first is a part of that."""
    serve = torch.no_grad()(lambda: model(batches(1)[0]))
    serve()
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    watched.expect(2, boundaries=2)


def test_a_forward_within_the_forward_of_another_thread_counts_and_is_no_boundary(watched):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x, hold=False):
            if hold:
                inside.set()
                assert done.wait(10)
            return self.layer(x)

    inside, done = threading.Event(), threading.Event()
    model = Model().eval()
    x = batches(1)[0]
    with torch.no_grad():
        known_to_serve(watched, model)
        before = len(watched.lease.ends)
        first = threading.Thread(target=model, args=(x, True))
        first.start()
        assert inside.wait(10)
        model(x)
        assert watched.lease.open and len(watched.lease.ends) == before and watched.lease.inside == [1]
        done.set()
        first.join()
    watched.expect(before + 2, boundaries=before + 1)
    assert not model._forward_hooks


def test_threads_that_serve_at_once_keep_begin_and_end_in_turn(watched):
    model = mlp().eval()

    @torch.no_grad()
    def serve():
        for x in batches(200):
            model(x)

    known_to_serve(watched, model)
    before = watched.lease.counted
    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not watched.lease.open
    assert watched.lease.counted == before + 800
    assert set(watched.lease.ends) == {1}
    serve()
    assert watched.lease.counted == before + 1000
    assert not model._forward_hooks
