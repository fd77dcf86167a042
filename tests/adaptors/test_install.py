"""Going in and out, failing quietly, and the explicit marks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from salus import api
from salus.adaptors import iterations as neutral
from salus.adaptors import torch as adaptor
from tests.adaptors.record import RecordingLease, Watched, batches, evaluate, mlp, runs_on, sgd, train


def patched():
    from torch.nn.modules import module
    from torch.optim import optimizer

    return (
        list(module._global_forward_pre_hooks),
        list(optimizer._global_optimizer_pre_hooks),
        list(optimizer._global_optimizer_post_hooks),
        module._has_any_global_hook,
        torch.compile,
        torch.autograd._engine_run_backward,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.optim.Optimizer.__init__,
        torch.amp.GradScaler.scale,
        torch.amp.GradScaler.step,
        torch.amp.GradScaler.update,
        neutral.installed,
    )


def test_uninstall_takes_everything_out():
    before = patched()
    process = Watched()
    adaptor.install(process.iterations)
    assert all(a != b for a, b in zip(before, patched(), strict=True))
    model = mlp()
    train(model, sgd(model), 1)
    adaptor.uninstall()
    assert patched() == before
    train(model, sgd(model), 1)
    process.expect(1)


def test_a_second_install_changes_nothing(watched):
    other = Watched()
    before = patched()
    adaptor.install(other.iterations)
    assert patched() == before
    model = mlp()
    train(model, sgd(model), 2)
    watched.expect(2)
    assert other.lease.story == []


def test_while_an_iteration_is_open_inner_modules_see_no_global_hook(watched):
    from torch.nn.modules import module as torch_module

    class Look(torch.nn.Module):
        def forward(self, x):
            seen.append(len(torch_module._global_forward_pre_hooks))
            return x

    seen = []
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Look())
    train(model, sgd(model), 2)
    evaluate(model, 2)
    assert seen == [0] * 4


@pytest.mark.parametrize("call", ["begin", "end"])
def test_a_lease_that_fails_is_told_once_and_the_script_goes_on(capfd, call):
    process = Watched()
    before = patched()

    def broken(*_):
        raise OSError("the socket\nis gone")

    setattr(process.lease, call, broken)
    adaptor.install(process.iterations)
    model = mlp()
    assert len(train(model, sgd(model), 4)) == 4
    evaluate(model, 2)
    with api.iteration():
        pass
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err == (
        "salus: iterations are no longer found (OSError: the socket is gone); the rest of this run is one iteration\n"
    )
    assert patched() == before


@pytest.mark.parametrize("call", ["step_began", "step_ended"])
def test_an_error_in_a_step_does_not_disturb_the_hooks_of_others(capfd, monkeypatch, call):
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    process = Watched()
    adaptor.install(process.iterations)
    called = []
    handles = [
        register(lambda *_: called.append(1))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    monkeypatch.setattr(process.iterations, call, lambda *_: 1 / 0)
    model = mlp()
    train(model, sgd(model), 3)
    assert len(called) == 6
    assert capfd.readouterr().err.count("salus:") == 1
    for handle in handles:
        handle.remove()
    # What had to stay, inactive, is no business of the next test.
    from torch.optim import optimizer

    optimizer._global_optimizer_pre_hooks.clear()
    optimizer._global_optimizer_post_hooks.clear()


def test_after_an_error_in_the_adaptor_the_rest_of_the_run_is_one_iteration(capfd, monkeypatch):
    process = Watched()
    adaptor.install(process.iterations)
    model = mlp()
    optimizer = sgd(model)
    train(model, optimizer, 2)

    def broken(*_):
        raise ValueError("ours")

    monkeypatch.setattr(process.iterations, "forward", broken)
    train(model, optimizer, 3)
    assert process.lease.ends == [1, 1] and process.lease.open
    assert capfd.readouterr().err.count("salus:") == 1


def test_a_torch_that_lacks_something_is_told_once_and_done_without(capfd, monkeypatch):
    monkeypatch.delattr(torch.autograd, "backward")
    monkeypatch.delattr(torch.nn.modules.module, "_has_any_global_hook")
    process = Watched()
    adaptor.install(process.iterations)
    monkeypatch.undo()
    model = mlp()
    train(model, sgd(model), 3)
    adaptor.uninstall()
    process.expect(3)
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "backwards" in err and "compile's warnings" in err


def test_an_interrupt_while_waiting_for_the_lease_reaches_the_script(watched, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    model = mlp()
    optimizer = sgd(model)
    with monkeypatch.context() as patch:
        patch.setattr(watched.lease, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, 1)
    train(model, optimizer, 2)
    watched.expect(2)


def test_an_interrupted_evaluation_ends_with_the_next_call(watched):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x):
            if interrupt:
                raise KeyboardInterrupt
            return self.layer(x)

    model = Model()
    optimizer = sgd(model)
    interrupt = True
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, 1)
    interrupt = False
    evaluate(model, 2)
    train(model, optimizer, 3)
    # The interrupted call and the one after it are one.
    watched.expect(5)
    assert not model._forward_hooks


def in_a_child(do) -> None:
    """Forks, and expects that it returns true there."""
    child = os.fork()
    if child == 0:
        done = False
        try:
            done = do()
        finally:
            os._exit(0 if done else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("during", ["between iterations", "an iteration", "a mark", "a forward", "a step"])
def test_the_child_of_a_fork_begins_anew_whatever_is_open_in_the_parent(watched, during):
    torch.set_num_threads(1)  # torch's thread pool does not survive a fork
    model = mlp()
    optimizer = sgd(model)
    train(model, optimizer, 3)

    def child():
        if handle is not None:
            handle.remove()
        lease = RecordingLease()
        watched.iterations.take_lease(lease)
        train(model, optimizer, 4)
        with api.iteration():
            train(model, optimizer, 2)
        return lease.ends == [1] * 5 and not lease.open

    def fork(*_):
        in_a_child(child)

    handle = None

    x = batches(1)[0]
    if during == "between iterations":
        fork()
    elif during == "an iteration":
        loss = model(x).sum()
        fork()
        loss.backward()
        optimizer.step()
    elif during == "a mark":
        with api.iteration():
            fork()
    else:
        if during == "a forward":
            handle = model[0].register_forward_hook(fork)
        else:
            handle = optimizer.register_step_pre_hook(fork)
        train(model, optimizer, 1)
        handle.remove()
    counted = watched.lease.counted
    train(model, optimizer, 1)
    watched.expect(counted + 1)
    assert counted == 3 + (during != "between iterations")


def test_the_child_of_a_fork_begins_anew_where_iterations_follow_one_another(following):
    torch.set_num_threads(1)
    before = following.lease.counted

    def child():
        lease = RecordingLease()
        following.iterations.take_lease(lease)
        train(following.model, following.optimizer, 4)
        return lease.ends == [1] * 4

    in_a_child(child)
    train(following.model, following.optimizer, 2)
    assert runs_on() and following.lease.counted == before + 2


def test_a_worker_of_a_data_loader_takes_no_part_whatever_its_transforms_are_made_of(watched):
    torch.set_num_threads(1)
    feature, model = mlp().eval(), mlp()
    optimizer = sgd(model)

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            with torch.no_grad():
                made = feature(torch.ones(4))
            assert watched.lease.story == [] and neutral.installed is None
            return torch.ones(4) * made

    for x in list(torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1)):
        model(x).sum().backward()
        optimizer.step()
    watched.expect(3)


# Explicit marks.


def test_a_mark_is_one_iteration_whatever_hooks_would_see_inside(watched):
    model = mlp()
    optimizer = sgd(model)

    @api.step
    def epoch():
        train(model, optimizer, 3)
        evaluate(model, 3)
        with api.iteration():
            train(model, optimizer, 1)

    epoch()
    epoch()
    watched.expect(2, boundaries=2)
    train(model, optimizer, 2)
    watched.expect(4, boundaries=4)


def test_a_mark_inside_an_iteration_that_hooks_opened_takes_it_over(watched):
    model = mlp()
    optimizer = sgd(model)
    loss = model(batches(1)[0]).sum()
    with api.iteration():
        loss.backward()
        optimizer.step()
        assert watched.lease.open
    watched.expect(1, boundaries=1)


def test_an_exception_in_a_mark_propagates_and_ends_it(watched):
    with pytest.raises(ZeroDivisionError), api.iteration():
        1 / 0  # noqa: B018
    watched.expect(1)


def test_marks_of_several_threads_each_count(watched):
    first_in, second_done = threading.Event(), threading.Event()

    def first():
        with api.iteration():
            first_in.set()
            assert second_done.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    assert first_in.wait(10)
    with api.iteration():
        pass
    assert watched.lease.open
    assert watched.lease.inside == [1] and watched.lease.ends == []
    second_done.set()
    thread.join()
    assert watched.lease.ends == [1]


def test_outside_salus_marks_do_nothing_and_need_no_torch():
    script = """
import sys
from salus import api
with api.iteration():
    pass
@api.step
def f(a, b=1):
    "doc"
    return a + b
assert f(1, b=2) == 3 and f.__doc__ == "doc"
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == done.stderr == ""


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_makes_its_state_once_or_has_none(momentum):
    class Memory:
        active = gpu_is_used = True

        def __init__(self):
            self.story = []

        def first_step_began(self):
            self.story.append("began")

        def first_step_ended(self):
            self.story.append("ended")

    memory, process = Memory(), Watched()
    adaptor.install(process.iterations, memory)
    try:
        for _ in range(2):
            model = mlp()
            train(model, sgd(model, momentum=momentum), 4)
    finally:
        adaptor.uninstall()
    assert memory.story == 2 * ["began", "ended"]
