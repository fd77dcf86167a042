"""While iterations follow one another next to no hooks are there: whatever comes then is seen all the same.

Here are the odd moments: another thread that comes in between, a script that has looked functions up, or put its own in
the place of torch's; what is under way when it is let go of.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading

import pytest
import torch

from salus.adaptors import habits
from salus.adaptors import torch as adaptor
from tests.adaptors.record import A_WHILE, Watched, batches, evaluate, mlp, runs_on, sgd, sits, train
from tests.adaptors.test_runs_on import counted


class At:
    """Calls something at the n-th moment of this thread at which another one could come in: Python hands its lock on
    where a function begins or ends, and after a call of what is not written in Python."""

    def __init__(self, number, do):
        self._left, self._do = number, do

    def __enter__(self):
        sys.setprofile(self._look)

    def __exit__(self, *_):
        sys.setprofile(None)

    def _look(self, _frame, what, _):
        if what in ("call", "return", "c_return"):
            self._left -= 1
            if self._left < 0:
                sys.setprofile(None)
                self._do()

    @property
    def came(self):
        return self._left < 0


@contextlib.contextmanager
def looks_in_backward(process):
    """What the lease was while the gradient of the first weight was made."""
    seen: list[bool] = []
    handle = process.model[0].weight.register_hook(lambda _: seen.append(process.lease.open))
    train(process.model, process.optimizer, A_WHILE)
    assert runs_on()
    seen.clear()
    yield seen
    handle.remove()
    process.optimizer.step()


def test_whenever_it_is_let_go_of_no_backward_and_no_step_is_without_a_lease(following):
    """At every moment of an iteration at which the other thread could come in."""
    seen: list[bool] = []

    def look(*_):
        seen.append(following.lease.open)

    following.model[0].weight.register_post_accumulate_grad_hook(look)
    following.optimizer.register_step_pre_hook(look)
    for number in itertools.count():
        train(following.model, following.optimizer, A_WHILE)
        assert runs_on()
        before = following.lease.counted
        seen.clear()
        at = At(number, lambda: sits(following))
        with at:
            train(following.model, following.optimizer, 1)
        assert seen == [True, True] and following.lease.counted == before + 1, number
        if not at.came:
            break
    assert number > 50


def test_nor_where_it_is_let_go_of_while_hooks_are_exchanged(following, monkeypatch):
    known = adaptor.installed()._following
    begin, at = known.begin, At(0, None)

    def begins(*args):
        with at:
            begin(*args)

    monkeypatch.setattr(known, "begin", begins)
    for number in itertools.count():
        evaluate(following.model, 1)
        assert not runs_on()
        at = At(number, lambda: sits(following))
        train(following.model, following.optimizer, habits.AFTER)
        for _ in range(A_WHILE):
            if at._left == number:
                train(following.model, following.optimizer, 1)
        assert at._left < number, "it began to run on"
        assert runs_on() != at.came
        before, seen = following.lease.counted, []
        handles = (
            following.model[0].weight.register_hook(lambda _, seen=seen: seen.append(following.lease.open)),
            following.optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append(following.lease.open)),
        )
        train(following.model, following.optimizer, 1)
        for handle in handles:
            handle.remove()
        assert seen == [True, True] and following.lease.counted == before + 1
        if not at.came:
            break
    assert number > 5


@pytest.mark.parametrize("what", ["backward", "step"])
def test_nor_is_one_that_begins_at_any_moment_while_it_is_let_go_of(following, what, monkeypatch):
    """The other way round: the script's thread comes in at every moment of the other one."""
    monkeypatch.setattr(adaptor, "ALONE", 1)
    for number in itertools.count():
        train(following.model, following.optimizer, A_WHILE)
        assert runs_on()
        loss = following.model(batches(1)[0]).sum()
        if what == "step":
            loss.backward()
        seen: list[bool] = []
        go, is_in, goes_on = threading.Event(), threading.Event(), threading.Event()

        def look(*_, seen=seen, is_in=is_in, goes_on=goes_on):
            is_in.set()
            goes_on.wait(5)
            seen.append(following.lease.open)

        where = (
            following.model[0].weight.register_hook
            if what == "backward"
            else following.optimizer.register_step_post_hook
        )
        handle = where(look)

        def script(go=go, loss=loss):
            go.wait(5)
            loss.backward() if what == "backward" else following.optimizer.step()

        def comes_in(go=go, is_in=is_in):
            go.set()
            is_in.wait(0.2)

        at = At(number, comes_in)

        def helper(at=at):
            with at:
                following.lease.sits()

        threads = [threading.Thread(target=script), threading.Thread(target=helper)]
        for thread in threads:
            thread.start()
        threads[1].join()
        go.set()
        goes_on.set()
        threads[0].join()
        handle.remove()
        assert seen == [True], number
        if what == "backward":
            following.optimizer.step()
        if not at.came:
            break
    assert number > 20


def test_a_backward_that_was_looked_up_before_its_forward_ran_has_a_lease(following):
    def forward():
        loss = following.model(batches(1)[0]).sum()
        sits(following)
        return loss

    with looks_in_backward(following) as seen:
        torch.autograd.backward(forward())
        assert seen == [True]


def test_so_has_one_that_was_imported_or_replaced_meanwhile(following, monkeypatch):
    with looks_in_backward(following) as seen:
        from torch.autograd import backward

        loss = following.model(batches(1)[0]).sum()
        sits(following)
        backward(loss)
        assert seen == [True]
    with looks_in_backward(following) as seen:
        monkeypatch.setattr(torch.autograd, "backward", lambda *args, **kwargs: backward(*args, **kwargs))
        loss = following.model(batches(1)[0]).sum()
        sits(following)
        loss.backward()
        assert seen == [True]


def test_what_is_evaluated_within_a_step_does_not_end_it(following):
    seen = []

    def look(*_):
        evaluate(following.model, 5)
        seen.append(following.lease.open)

    handle = following.optimizer.register_step_pre_hook(look)
    before = following.lease.counted
    train(following.model, following.optimizer, 1)
    handle.remove()
    assert seen == [True] and following.lease.counted == before + 1


def test_nor_what_a_closure_evaluates_after_it_was_let_go_of_in_there(following):
    seen, lets_go = [], []

    def closure():
        following.optimizer.zero_grad()
        if lets_go:
            sits(following)
        loss = following.model(batches(1)[0]).square().mean()
        loss.backward()
        if lets_go:
            with torch.no_grad():
                for x in batches(10):
                    following.model(x)
            seen.append(following.lease.open)
        return loss

    for _ in range(2 * A_WHILE):
        following.optimizer.step(closure)
    assert runs_on()
    lets_go.append(True)
    following.optimizer.step(closure)
    assert seen == [True]


def loses_its_leader(process):
    other = mlp()
    optimizer = sgd(other)
    for _ in range(A_WHILE):
        train(process.model, process.optimizer, 1)
        train(other, optimizer, 1)
    process.optimizer = None
    gc.collect()
    train(other, optimizer, 50)


def steps_without_its_scaler(process):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for x in batches(60):
        process.optimizer.zero_grad()
        scaler.scale(process.model(x).square().mean()).backward()
        scaler.unscale_(process.optimizer)
        process.optimizer.step()
        scaler.update()


def is_waited_for_after_a_step_that_raised(process):
    handle = process.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(process.model, process.optimizer, 1)
    handle.remove()
    train(process.model, process.optimizer, 2 * A_WHILE)
    process.lease.somebody_waits = True
    train(process.model, process.optimizer, 3)
    process.lease.somebody_waits = False
    train(process.model, process.optimizer, 3)


@pytest.mark.parametrize("script", [loses_its_leader, steps_without_its_scaler, is_waited_for_after_a_step_that_raised])
def test_as_many_are_counted_as_always(script):
    assert sum(counted(script, follow=True)) == sum(counted(script, follow=False))


def test_an_optimizer_whose_state_cannot_be_looked_at_does_not_stop_the_script(following, capfd):
    class Memory:
        active, stays, gpu_is_used = True, True, False

        def rest(self):
            pass

    class State(dict):
        def __bool__(self):
            raise RuntimeError("it cannot be looked at")

    watch = adaptor.installed()
    watch.memory = Memory()
    optimizer = torch.optim.SGD(following.model.parameters(), lr=0.1, momentum=0.9)
    watch.memory.first_step_began = watch.memory.first_step_ended = lambda: None
    train(following.model, optimizer, A_WHILE)
    assert runs_on()
    optimizer.state = State(optimizer.state)
    train(following.model, optimizer, 1)
    watch.memory = None
    if following.iterations.failed:
        assert "iterations are no longer found" in capfd.readouterr().err
        following.lease.open = False


def test_who_is_interrupted_while_hooks_are_exchanged_is_let_go_of():
    process = Watched(quick=True, runs_on=True)
    adaptor.install(process.iterations)
    try:
        process.model = mlp()
        process.optimizer = sgd(process.model)
        known = adaptor.installed()._following

        class Interrupted(list):
            def __iter__(self):
                raise KeyboardInterrupt

        functions, known._functions = known._functions, Interrupted()
        with pytest.raises(KeyboardInterrupt):
            train(process.model, process.optimizer, A_WHILE)
        known._functions = functions
        seen: list[bool] = []
        process.optimizer.register_step_pre_hook(lambda *_: seen.append(process.lease.open))
        sits(process)
        process.optimizer.step()
        assert seen == [True]
    finally:
        adaptor.uninstall()
