"""Scripts that iterate in several threads: each counts, and a boundary is where none is inside an iteration."""

from __future__ import annotations

import os
import queue
import threading

import pytest
import torch
from torch import nn

from salus import api
from salus.adaptors import habits, joint
from salus.adaptors import torch as adaptor
from tests.adaptors.record import (
    A_WHILE,
    PagedLease,
    RecordingLease,
    Watched,
    batches,
    evaluate,
    is_usual,
    mlp,
    runs_on,
    sgd,
    train,
)


def in_threads(*functions):
    """Runs them at once, and raises what one of them raises."""
    raised = []

    def run(function):
        try:
            function()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "it hangs"
    if raised:
        raise raised[0]


class Pair:
    """Two models that are trained in two threads, hand in hand: each does a part when it is its turn."""

    def __init__(self):
        self.models = [mlp(), mlp()]
        self.optimizers = [sgd(model) for model in self.models]
        self.losses = [None, None]
        self.tasks = [queue.Queue(), queue.Queue()]
        self.done = queue.Queue()
        self.threads = [threading.Thread(target=self._work, args=(tasks,)) for tasks in self.tasks]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        for tasks, thread in zip(self.tasks, self.threads, strict=True):
            tasks.put(None)
            thread.join(60)

    def _work(self, tasks):
        while (task := tasks.get(timeout=60)) is not None:
            try:
                self.done.put(task())
            except BaseException as error:
                self.done.put(error)

    def in_thread(self, which, task):
        self.tasks[which].put(task)
        result = self.done.get(timeout=60)
        if isinstance(result, BaseException):
            raise result
        return result

    def forward(self, which):
        def task():
            self.losses[which] = self.models[which](batches(1)[0]).square().mean()

        self.in_thread(which, task)

    def backward(self, which):
        self.in_thread(which, lambda: self.losses[which].backward())

    def step(self, which):
        self.in_thread(which, self.optimizers[which].step)

    def train(self, which, count=1):
        self.in_thread(which, lambda: train(self.models[which], self.optimizers[which], count))


@pytest.fixture
def pair(watched):
    with Pair() as both:
        # From here on each is known.
        both.train(0)
        both.train(1)
        watched.expect(2, boundaries=2)
        watched.lease.ends.clear()
        watched.lease.story.clear()
        yield both


def test_two_threads_that_train_two_models_are_both_counted(watched):
    """As Optuna does with `n_jobs=2`: a model and an optimizer for each trial."""

    def trials():
        for _ in range(3):
            model = mlp()
            optimizer = sgd(model)
            train(model, optimizer, 50)
            evaluate(model, 5)

    in_threads(trials, trials)
    assert not watched.lease.open and not watched.iterations.failed
    # (A second thread's first forward may be a part of an iteration of the first thread, if it is no training.)
    assert watched.lease.counted == 2 * 3 * 55


def test_a_boundary_is_where_neither_is_inside_an_iteration(watched, pair):
    pair.forward(0)
    pair.forward(1)
    pair.backward(0)
    pair.step(0)
    assert watched.lease.open and watched.lease.story == ["begin", "count 1"]
    pair.backward(1)
    pair.step(1)
    assert not watched.lease.open and watched.lease.story == ["begin", "count 1", "end 1"]


def test_each_thread_has_an_optimizer_that_leads(watched, pair):
    for _ in range(5):
        pair.train(0)
        pair.train(1)
    watched.expect(10, boundaries=10)


def test_the_forward_of_one_thread_within_an_iteration_of_the_other_begins_its_own(watched, pair):
    pair.forward(0)
    pair.forward(1)
    pair.backward(0)
    pair.step(0)
    pair.in_thread(0, lambda: evaluate(pair.models[0], 3))
    assert watched.lease.open and watched.lease.inside == [1, 1, 1, 1]
    pair.backward(1)
    pair.step(1)
    watched.expect(5, boundaries=1)


def test_while_somebody_waits_the_thread_that_is_through_waits_for_the_other_and_both_come_to_a_boundary(watched, pair):
    pair.forward(0)
    pair.forward(1)
    pair.backward(0)
    pair.step(0)
    watched.lease.somebody_waits = True
    at_gate = threading.Event()
    wait = threading.Condition.wait

    def waits(condition, timeout=None):
        if threading.current_thread() is pair.threads[0] and timeout is not None and timeout < 20:
            at_gate.set()
        return wait(condition, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Condition, "wait", waits)
        patch.setattr(joint, "UNKNOWN_S", 19.0)
        patch.setattr(joint, "LEAST_S", 19.0)
        patch.setattr(joint, "MOST_S", 19.0)
        pair.tasks[0].put(lambda: train(pair.models[0], pair.optimizers[0], 1))
        assert at_gate.wait(30)
        assert watched.lease.ends == []
        pair.tasks[1].put(lambda: (pair.losses[1].backward(), pair.optimizers[1].step()))
        for _ in range(2):
            assert not isinstance(pair.done.get(timeout=60), BaseException)
    watched.lease.somebody_waits = False
    assert watched.lease.story == ["begin", "count 1", "end 1", "begin", "end 1"]


def test_threads_whose_iterations_overlap_for_ever_come_to_boundaries_while_somebody_waits(watched):
    ends = []

    def trains():
        model = mlp()
        train(model, sgd(model), 150)

    watched.lease.somebody_waits = True
    in_threads(trains, trains, trains)
    ends = watched.lease.ends
    assert watched.lease.counted == 450 and len(ends) > 50 and not watched.lease.open


def test_a_thread_that_waits_for_the_other_in_the_middle_of_its_iteration_goes_on(watched, monkeypatch):
    """A queue between them: the gate opens again, and nobody hangs."""
    monkeypatch.setattr(joint, "UNKNOWN_S", 0.05)
    monkeypatch.setattr(joint, "MOST_S", 0.05)
    made = queue.Queue(maxsize=1)
    producer, consumer = mlp(), mlp()
    optimizers = sgd(producer), sgd(consumer)

    def produces():
        for x in batches(30):
            out = producer(x)
            made.put(out.detach(), timeout=30)
            out.sum().backward()
            optimizers[0].step()

    def consumes():
        for _ in range(30):
            loss = consumer(batches(1)[0]).sum()
            loss = loss + made.get(timeout=30).sum()
            loss.backward()
            optimizers[1].step()

    watched.lease.somebody_waits = True
    in_threads(produces, consumes)
    assert watched.lease.counted == 60 and not watched.lease.open


def test_a_model_that_the_main_thread_has_called_and_never_stepped_keeps_nobody_waiting_for_long(watched, monkeypatch):
    """A summary of the model, say, and then workers."""
    monkeypatch.setattr(joint, "OVERDUE_S", 0.0)
    model = mlp()
    optimizer = sgd(model)
    model(batches(1)[0])
    assert watched.lease.open
    in_threads(lambda: train(model, optimizer, 30))
    assert not watched.lease.open and watched.lease.counted == 30 and watched.lease.boundaries > 15


def test_a_thread_that_ends_in_the_middle_of_an_iteration_keeps_nobody_waiting(watched):
    model, other = mlp(), mlp()
    optimizer, unused = sgd(model), sgd(other)
    train(model, optimizer, 1)
    in_threads(lambda: other(batches(1)[0]))
    train(model, optimizer, 3)
    assert watched.lease.counted == 4 and not watched.lease.open
    assert unused is not None


def test_a_loss_of_one_thread_that_another_steps_on_comes_to_boundaries(watched, monkeypatch):
    monkeypatch.setattr(joint, "OVERDUE_S", 0.0)
    model = nn.Linear(4, 1)
    optimizer = sgd(model)
    losses = queue.Queue(maxsize=1)

    def computes():
        for x in batches(60):
            losses.put(model(x).square().mean(), timeout=30)

    def steps():
        for _ in range(60):
            optimizer.zero_grad()
            losses.get(timeout=30).backward()
            optimizer.step()

    in_threads(computes, steps)
    assert watched.lease.counted == 60 and watched.lease.boundaries >= 3


def test_a_step_in_a_gradient_hook_belongs_to_the_thread_whose_backward_it_is(watched, pair):
    def one(which):
        model, optimizer = pair.models[which], pair.optimizers[which]
        handle = model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        for x in batches(5):
            model(x).square().mean().backward()
        handle.remove()

    in_threads(lambda: one(0), lambda: one(1))
    watched.expect(10)


def test_marks_of_two_threads_are_iterations_of_each(watched):
    model, other = mlp(), mlp()
    optimizer, of_other = sgd(model), sgd(other)

    def marked(model, optimizer):
        for _ in range(20):
            with api.iteration():
                train(model, optimizer, 2)

    in_threads(lambda: marked(model, optimizer), lambda: marked(other, of_other))
    watched.expect(40)


def test_a_mark_in_one_thread_does_not_hide_the_iterations_of_another(watched, pair):
    with api.iteration():
        pair.train(0, 3)
        pair.train(1, 2)
        assert watched.lease.open and watched.lease.inside == [1] * 5
    watched.expect(6, boundaries=1)


def test_a_thread_that_iterates_alone_again_for_long_has_the_quick_ways(monkeypatch):
    monkeypatch.setattr(adaptor, "ALONE", 20)
    process = Watched(quick=True, runs_on=True)
    adaptor.install(process.iterations)
    try:
        model, other = mlp(), mlp()
        optimizer, of_other = sgd(model), sgd(other)
        in_threads(lambda: train(other, of_other, 3))
        train(model, optimizer, A_WHILE)
        assert not is_usual()
        train(model, optimizer, 20 + habits.AFTER)
        assert is_usual() and runs_on()
        in_threads(lambda: train(other, of_other, 3))
        assert not is_usual()
        train(model, optimizer, 3)
        process.expect(3 + A_WHILE + 20 + habits.AFTER + 3 + 3)
    finally:
        adaptor.uninstall()


@pytest.mark.parametrize("lease", [RecordingLease, PagedLease], ids=["in Python", "in C"])
def test_a_second_thread_is_seen_while_iterations_of_the_first_follow_one_another(lease):
    process = Watched(quick=True, runs_on=True, lease=lease)
    adaptor.install(process.iterations)
    try:
        model, other = mlp(), mlp()
        optimizer, of_other = sgd(model), sgd(other)
        train(model, optimizer, A_WHILE)
        assert runs_on()
        in_threads(lambda: train(other, of_other, 5))
        assert not runs_on()
        train(model, optimizer, 5)
        assert process.lease.counted == A_WHILE + 10 and not process.lease.open
    finally:
        adaptor.uninstall()


def test_results_of_both_threads_are_those_of_the_bare_script():
    def run():
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)) for _ in range(2)]
        losses = [[], []]

        def one(which):
            losses[which] = train(models[which], sgd(models[which]), 20)

        in_threads(lambda: one(0), lambda: one(1))
        return losses, [p.tolist() for model in models for p in model.parameters()]

    bare = run()
    process = Watched()
    adaptor.install(process.iterations)
    try:
        assert run() == bare
    finally:
        adaptor.uninstall()
    process.expect(40)


def test_an_error_in_one_thread_is_told_once_and_all_threads_go_on(capfd, monkeypatch):
    process = Watched()
    adaptor.install(process.iterations)
    try:
        models = [mlp(), mlp()]

        def broken(*_):
            raise OSError("the socket is gone")

        def one(model):
            optimizer = sgd(model)
            train(model, optimizer, 5)
            monkeypatch.setattr(process.lease, "end", broken)
            train(model, optimizer, 20)

        in_threads(lambda: one(models[0]), lambda: one(models[1]))
        with api.iteration():
            pass
        assert process.iterations.failed
    finally:
        adaptor.uninstall()
    said = capfd.readouterr()
    assert said.err.count("salus:") == 1 and said.out == ""


def test_the_child_of_a_fork_in_a_script_with_threads_begins_with_one(watched, pair):
    pair.forward(0)
    child = os.fork()
    if child == 0:
        process = watched.iterations.process
        free = process.lock.acquire(blocking=False)
        os._exit(0 if free and len(process._machines) < 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pair.backward(0)
    pair.step(0)
    watched.expect(1)


def test_many_threads_one_after_the_other_leave_nothing_behind(watched):
    model = mlp().eval()
    for _ in range(60):
        in_threads(torch.no_grad()(lambda: model(batches(1)[0])))
    watched.expect(60)
    process = watched.iterations.process
    assert len(process._machines) <= 2 and not model._forward_hooks
