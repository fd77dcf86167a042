"""Iterations that follow one another: only their ends are looked at, and as many are counted as always."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from salus import api
from salus.adaptors import torch as adaptor
from tests.adaptors.record import (
    A_WHILE,
    PagedLease,
    RecordingLease,
    Watched,
    batches,
    evaluate,
    mlp,
    runs_on,
    sgd,
    sits,
    train,
)
from tests.adaptors.test_both_ways import (
    LOOPS,
    OTHERS,
    SHAPES,
    Anything,
    a_penalty,
    a_second_backward,
    asks_a_teacher,
    calls_a_metric,
    evaluates_in_between,
    goes_on,
    looks_closer,
    raises_in_its_backward,
    raises_in_its_step,
    serves,
    steps_in_its_backward,
    steps_once_more,
    trains_alone,
    updates_its_scaler_late,
)

UNSEEN = {"serve", "evaluate a copy", "evaluate"}
"""What a module that is in eval mode already computes between two iterations is part of the next one. And of a forward
that no backward followed it is not known any more, when an evaluation comes: it begins at once."""


def counted(whole, *, follow: bool, lease=RecordingLease) -> list[int]:
    """What was counted at each end."""
    process = Watched(quick=follow, runs_on=follow, lease=lease)
    adaptor.install(process.iterations)
    try:
        process.model = mlp()
        process.optimizer = sgd(process.model)
        whole(process)
    finally:
        adaptor.uninstall()
    assert not process.iterations.failed
    return [end for end in process.lease.ends if end]


@pytest.mark.parametrize("script", [goes_on, steps_once_more, evaluates_in_between, trains_alone, looks_closer])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape is not serves])
def test_as_many_are_counted_as_always(shape, script, capfd):
    def whole(process):
        shape(process)
        process.rounds(A_WHILE)
        assert runs_on() == process.lease.runs_on
        script(process)

    as_always = counted(whole, follow=False)
    assert counted(whole, follow=True) == as_always
    assert counted(whole, follow=True, lease=PagedLease) == as_always
    assert "salus:" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "script",
    [
        a_penalty,
        a_second_backward,
        steps_in_its_backward,
        updates_its_scaler_late,
        calls_a_metric,
        asks_a_teacher,
    ],
)
def test_whatever_comes_then_is_counted_as_always(script, capfd):
    def whole(process):
        process.rounds = lambda count: train(process.model, process.optimizer, count)
        process.rounds(A_WHILE)
        script(process)

    as_always = counted(whole, follow=False)
    assert counted(whole, follow=True) == as_always
    assert counted(whole, follow=True, lease=PagedLease) == as_always
    assert "salus:" not in capfd.readouterr().err


@pytest.mark.parametrize("script", [raises_in_its_backward, raises_in_its_step])
def test_what_raises_raises_as_always_and_leaves_nothing_open(script, capfd):
    def whole(process):
        process.rounds = lambda count: train(process.model, process.optimizer, count)
        process.rounds(A_WHILE)
        script(process)

    counted(whole, follow=True)
    assert "salus:" not in capfd.readouterr().err


@given(
    st.sampled_from(sorted(set(LOOPS) - {"serves"})),
    st.lists(st.tuples(st.sampled_from([one for one in OTHERS if one not in UNSEEN]), st.integers(0, 1)), max_size=10),
)
@settings(max_examples=100, deadline=None)
def test_whatever_a_script_does_is_counted_as_always(loop, then):
    def whole(process):
        script = Anything(process)
        for what in [*LOOPS[loop] * A_WHILE, *then, *LOOPS[loop] * 3]:
            script.do(*what)

    as_always = counted(whole, follow=False)
    assert counted(whole, follow=True) == as_always
    assert counted(whole, follow=True, lease=PagedLease) == as_always


def test_results_are_the_same(following):
    losses = train(following.model, following.optimizer, 20)
    assert runs_on() and following.lease.counted == A_WHILE + 20
    adaptor.uninstall()
    model = mlp()
    optimizer = sgd(model)
    train(model, optimizer, A_WHILE)
    assert train(model, optimizer, 20) == losses


def test_no_forward_is_looked_for(following):
    watch = adaptor.installed()
    assert watch._key not in watch._looking
    following.model(batches(1)[0]).sum().backward()
    assert watch._key not in watch._looking
    following.optimizer.step()
    assert watch._key not in watch._looking and runs_on()


def test_whoever_waits_is_seen_at_the_end_of_the_iteration(following):
    following.lease.somebody_waits = True
    following.model(batches(1)[0]).sum().backward()
    assert runs_on()
    following.optimizer.step()
    assert not runs_on() and not following.lease.open
    following.lease.somebody_waits = False
    train(following.model, following.optimizer, A_WHILE)
    assert runs_on()


def test_an_evaluation_is_seen_and_so_is_a_model_that_is_built(following):
    evaluate(following.model, 5)
    assert not runs_on() and not following.lease.open and following.lease.counted == A_WHILE + 5
    train(following.model, following.optimizer, A_WHILE)
    assert runs_on()
    mlp()
    assert not runs_on() and not following.lease.open


def test_a_step_of_another_optimizer_is_one_like_any_other(following):
    other = sgd(following.model)
    following.model(batches(1)[0]).sum().backward()
    other.step()
    assert not runs_on() and not following.lease.open


def test_one_that_sits_is_let_go_of(following):
    sits(following)
    assert not runs_on() and not following.lease.open
    train(following.model, following.optimizer, 1)
    assert following.lease.counted == A_WHILE + 1


def test_but_not_in_its_backward_or_its_step(following):
    seen = []

    def look(*_):
        sits(following)
        seen.append(following.lease.open)

    weight = following.model[0].weight
    handles = weight.register_post_accumulate_grad_hook(look), following.optimizer.register_step_pre_hook(look)
    train(following.model, following.optimizer, 1)
    for handle in handles:
        handle.remove()
    assert seen == [True, True] and following.lease.counted == A_WHILE + 1


def test_an_explicit_mark_wins(following):
    with api.iteration():
        assert following.lease.went_on == 1, "it is known that it does not sit"
        sits(following)
        assert following.lease.open
        train(following.model, following.optimizer, 3)
    assert not following.lease.open and following.lease.counted == A_WHILE + 1


def test_a_step_that_the_scaler_skips_is_an_iteration(following):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = following.lease.counted
    for factor in (1.0, float("inf"), 1.0):
        following.optimizer.zero_grad()
        scaler.scale(following.model(batches(1)[0]).square().mean() * factor).backward()
        scaler.step(following.optimizer)
        scaler.update()
    assert following.lease.counted == before + 3


def test_a_step_of_another_thread_is_one_of_them(following):
    other = threading.Thread(target=train, args=(following.model, following.optimizer, 3))
    other.start()
    other.join()
    assert runs_on() and following.lease.counted == A_WHILE + 3


def test_after_a_mark_without_a_step_backward_and_step_are_seen(following):
    with api.iteration():
        loss = following.model(batches(1)[0]).sum()
    assert not following.lease.open
    seen = []
    following.optimizer.register_step_pre_hook(lambda *_: seen.append(following.lease.open))
    loss.backward()
    assert following.lease.open
    following.optimizer.step()
    assert seen == [True] and following.lease.counted == A_WHILE + 2
    with api.iteration():
        pass
    following.optimizer.step()
    assert seen == [True, True] and following.lease.counted == A_WHILE + 4


def test_a_step_that_raised_is_not_taken_for_one_that_is_under_way(following):
    handle = following.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(following.model, following.optimizer, 1)
    handle.remove()
    sits(following)
    assert not following.lease.open
    train(following.model, following.optimizer, 1)
    assert following.lease.counted == A_WHILE + 1


def test_a_lease_that_fails_does_not_raise_into_the_script(following, monkeypatch, capfd):
    monkeypatch.setattr(following.lease, "end", lambda *_: 1 / 0)
    sits(following)
    assert following.lease.open and not following.iterations.failed
    monkeypatch.undo()
    following.lease.open = False  # for the next one
    train(following.model, following.optimizer, A_WHILE)
    assert runs_on()
    monkeypatch.setattr(following.lease, "end", lambda *_: 1 / 0)
    following.model.eval()
    assert following.iterations.failed and "iterations are no longer found" in capfd.readouterr().err
    monkeypatch.undo()
    following.lease.open = False


def test_the_rest_of_a_forward_in_which_it_was_let_go_of_is_no_iteration(following):
    teacher = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(10))).eval()
    train(following.model, following.optimizer, A_WHILE)
    assert runs_on()
    before, boundaries = following.lease.counted, following.lease.boundaries
    handle = teacher[2].register_forward_pre_hook(lambda *_: sits(following))
    with torch.no_grad():
        teacher(batches(1)[0])
        handle.remove()
        assert following.lease.counted == before and following.lease.boundaries == boundaries + 1
        teacher(batches(1)[0])
    assert following.lease.counted == before + 1


def test_a_skipped_step_whose_backward_was_not_seen_is_counted(following):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loss = scaler.scale(following.model(batches(1)[0]).sum() * float("inf"))
    parameters = list(following.model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    scaler.step(following.optimizer)
    assert following.lease.counted == A_WHILE + 1 and not following.lease.open
    scaler.update()


def test_a_step_that_makes_state_is_seen(following):
    class Memory:
        active, stays, gpu_is_used, firsts = True, True, False, 0

        def first_step_began(self):
            self.firsts += 1

        def first_step_ended(self):
            pass

        def rest(self):
            pass

    watch, memory = adaptor.installed(), Memory()
    watch.memory = memory
    optimizer = torch.optim.SGD(following.model.parameters(), lr=0.1, momentum=0.9)
    train(following.model, optimizer, A_WHILE)
    assert runs_on()
    firsts = memory.firsts
    optimizer.state.clear()
    train(following.model, optimizer, 1)
    assert memory.firsts == firsts + 1 and not runs_on()
    watch.memory = None


def test_one_that_was_interrupted_when_it_began_to_run_on_is_let_go_of(following):
    adaptor.installed()._following.end()
    sits(following)
    assert not following.lease.open
    train(following.model, following.optimizer, 1)
    assert following.lease.counted == A_WHILE + 1
