"""What a script does is seen in the short way (iterations that are all alike) as in the long one, call by call."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from salus import api
from salus.adaptors import habits
from salus.adaptors import torch as adaptor
from tests.adaptors.record import Watched, batches, evaluate, is_usual, mlp, sgd, train


def both_ways(whole):
    """Runs it in a process that is watched. If it gives back a script, iterations are all alike by then."""
    stories = []
    for quick in (False, True):
        process = Watched(quick=quick)
        adaptor.install(process.iterations)
        try:
            process.model = mlp()
            process.optimizer = sgd(process.model)
            script = whole(process)
            if script is not None:
                assert is_usual() == quick
                process.lease.story.clear()
                script(process)
        finally:
            adaptor.uninstall()
        assert not process.iterations.failed
        stories.append(process.lease.story)
    assert stories[0] == stories[1]


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


def raises_in_its_step(process):
    """In its closure after the backward; in a plain step; and then an evaluation, each time."""

    def closure():
        process.model(batches(1)[0]).square().mean().backward()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        process.optimizer.step(closure)
    of_a_copy(process)
    process.rounds(adaptor_rounds())
    handle = process.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    process.model(batches(1)[0]).square().mean().backward()
    with pytest.raises(ZeroDivisionError):
        process.optimizer.step()
    handle.remove()
    without_a_mode(process)
    process.rounds(2)


def asks_a_teacher(process):
    """Another one that it has trained before, in eval mode and between two backwards."""
    teacher = mlp()
    for x in batches(2):
        (teacher(x) + process.model(x)).square().mean().backward()
        process.optimizer.step()
    process.rounds(adaptor_rounds())
    for x in batches(2):
        process.model(x).square().mean().backward()
        with torch.no_grad():
            teacher.eval()(x)
            process.note("taught")
        process.model(x).square().mean().backward()
        process.optimizer.step()


def loses_its_leader(process):
    """The optimizer that is counted is gone; the next one is from then on."""
    other = mlp()
    optimizer = sgd(other)
    for _ in range(adaptor_rounds()):
        train(process.model, process.optimizer, 1)
        train(other, optimizer, 1)
    process.optimizer = None
    gc.collect()
    train(other, optimizer, 5)


def adaptor_rounds():
    return habits.AFTER + 3


@pytest.mark.parametrize(
    "script", [goes_on, steps_once_more, evaluates_in_between, serves_something_else, trains_alone, looks_closer]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_iterations_of_every_shape_are_seen_as_always(shape, script, capfd):
    def whole(process):
        shape(process)
        process.rounds(habits.AFTER + 3)
        return script

    both_ways(whole)
    assert "salus:" not in capfd.readouterr().err


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
        raises_in_its_step,
        asks_a_teacher,
        loses_its_leader,
    ],
)
def test_whatever_comes_then_is_seen_as_always(script, capfd):
    def whole(process):
        plain(process)
        process.rounds(habits.AFTER + 1)
        return script

    both_ways(whole)
    assert "salus:" not in capfd.readouterr().err


# Any order of anything.

FORWARD, ACCUMULATE, STEP = "forward", "backward", "step"
LOOPS = {
    "plain": [(ACCUMULATE, 0), (STEP, 0)],
    "in turns": [(ACCUMULATE, 0), (STEP, 0), (FORWARD, 0), (ACCUMULATE, 1), (STEP, 1)],
    "accumulates": [(ACCUMULATE, 0), (ACCUMULATE, 0), (STEP, 0)],
    "closure": [("closure", 0)],
    "serves": [("serve", 0)],
}
OTHERS = [
    FORWARD, ACCUMULATE, STEP, "closure", "serve", "evaluate", "evaluate a copy", "keep the graph", "mark", "skip",
    "raise in backward", "raise in closure", "somebody waits", "nobody waits", "train again",
]  # fmt: skip


class Anything:
    def __init__(self, process):
        self.process = process
        self.models = [mlp(), mlp()]
        self.copy = mlp().eval()
        self.optimizers = [sgd(model) for model in self.models]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.x = batches(1)[0]

    def do(self, what, which):
        model, optimizer = self.models[which], self.optimizers[which]
        self.process.note(what)
        with contextlib.suppress(ZeroDivisionError):
            if what == FORWARD:
                model(self.x)
            elif what in (ACCUMULATE, "keep the graph"):
                model(self.x).square().mean().backward(retain_graph=what != ACCUMULATE)
            elif what == STEP:
                optimizer.step()
            elif what in ("closure", "raise in closure"):
                optimizer.step(lambda: self.closure(model, what != "closure"))
            elif what == "serve":
                with torch.no_grad():
                    self.copy(self.x)
            elif what == "evaluate":
                evaluate(model, 1 + 9 * which)
            elif what == "evaluate a copy":
                of_a_copy(self.process)
            elif what == "mark":
                with api.iteration():
                    self.do(ACCUMULATE, which)
            elif what == "skip":
                loss = model(self.x).square().mean() * float("inf")
                self.scaler.scale(loss).backward()
                self.scaler.step(optimizer)
                self.scaler.update()
            elif what == "raise in backward":
                handle = model[0].weight.register_post_accumulate_grad_hook(lambda _: 1 / 0)
                try:
                    model(self.x).square().mean().backward()
                finally:
                    handle.remove()
            elif what.endswith("waits"):
                self.process.lease.somebody_waits = what.startswith("somebody")
            else:
                model.train()

    def closure(self, model, raises):
        loss = model(self.x).square().mean()
        loss.backward()
        return 1 / 0 if raises else loss


@given(
    st.sampled_from(sorted(LOOPS)),
    st.lists(st.tuples(st.sampled_from(OTHERS), st.integers(0, 1)), max_size=10),
    st.lists(st.tuples(st.sampled_from(OTHERS), st.integers(0, 1)), max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_whatever_a_script_does_is_seen_as_always(loop, then, before):
    def whole(process):
        script = Anything(process)
        for what in [*before, *LOOPS[loop] * (habits.AFTER + 3), *then, *LOOPS[loop] * 3]:
            script.do(*what)

    both_ways(whole)
