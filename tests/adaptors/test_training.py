"""Iterations of training loops: real scripts on the CPU, the exact number of iterations, strict alternation."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn

from salus.adaptors import torch as adaptor
from tests.adaptors.record import Watched, batches, evaluate, mlp, sgd, train


def test_a_plain_loop_is_one_iteration_a_step(watched):
    model = mlp()
    train(model, sgd(model), 5)
    watched.expect(5, boundaries=5)


def test_zero_grad_at_the_end_changes_nothing(watched):
    model = mlp()
    optimizer = sgd(model)
    for x in batches(5):
        nn.MSELoss()(model(x), torch.zeros(3, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    watched.expect(5, boundaries=5)


def test_an_iteration_begins_at_the_forward_and_ends_after_the_step(watched):
    model = mlp()
    optimizer = sgd(model)
    watched.note("data")
    loss = model(batches(1)[0]).sum()
    watched.note("forward")
    loss.backward()
    watched.note("backward")
    optimizer.step()
    watched.note("step")
    assert watched.lease.story == ["data", "begin", "forward", "backward", "end 1", "step"]


def test_without_a_module_it_begins_at_the_backward_or_else_at_the_step(watched):
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])
    for _ in range(4):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
    weight.grad = torch.ones(3)
    optimizer.step()
    watched.expect(5, boundaries=5)


def test_accumulated_gradients_are_one_iteration_a_step(watched):
    model = mlp()
    optimizer = sgd(model)
    for number, x in enumerate(batches(12), 1):
        (model(x).square().mean() / 4).backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    watched.expect(3, boundaries=3)


def test_a_step_that_the_scaler_skips_ends_its_iteration_and_counts_once(watched):
    model = mlp()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number, x in enumerate(batches(6)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).square().mean()
        if number in (0, 3):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = model[0].weight.clone()
        scaler.step(optimizer)
        assert torch.equal(before, model[0].weight) == (number in (0, 3))
        assert not watched.lease.open
        scaler.update()
    watched.expect(6, boundaries=6)


def test_a_step_that_the_script_skips_itself_ends_at_the_scalers_update(watched):
    model = mlp()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number, x in enumerate(batches(4)):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if number != 2:
            scaler.step(optimizer)
        scaler.update()
        assert not watched.lease.open
    watched.expect(4, boundaries=4)


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.Adam, torch.optim.SGD], ids=lambda c: c.__name__)
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_forward_and_backward_inside_the_step_are_one_iteration(watched, make, mode):
    model = mlp().train(mode)
    optimizer = make(model.parameters(), lr=0.01)
    calls = 0
    for x in batches(3):

        def closure(x=x):
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    watched.expect(3, boundaries=3)
    assert calls > 3 or make is not torch.optim.LBFGS


def gan_round(generator, discriminator, d_step, g_step):
    noise = torch.randn(3, 4)
    (discriminator(torch.randn(3, 4)) - discriminator(generator(noise).detach())).mean().backward()
    d_step()
    discriminator(generator(noise)).mean().backward()
    g_step()


def test_with_two_optimizers_every_step_is_a_boundary_and_the_first_one_counts(watched):
    generator, discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
    d, g = sgd(discriminator), sgd(generator)
    for _ in range(5):
        gan_round(generator, discriminator, d.step, g.step)
    watched.expect(5, boundaries=10)
    assert watched.lease.ends == [1, 0] * 5


def test_a_leader_that_is_gone_is_followed_by_the_next(watched):
    generator, discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
    d, g = sgd(discriminator), sgd(generator)
    gan_round(generator, discriminator, d.step, g.step)
    del d
    gc.collect()
    train(generator, g, 3)
    assert watched.lease.ends == [1, 0, 1, 1, 1]


def test_a_leader_that_stopped_stepping_is_followed_by_the_next(watched):
    model = nn.Linear(4, 4)
    warmup, main = sgd(model), sgd(model)
    train(model, warmup, 2)
    train(model, main, 110)
    assert watched.lease.ends == [1, 1] + [0] * 99 + [1] * 11


def test_an_optimizer_that_is_made_after_the_leaders_last_step_leads(watched):
    """Folds, or trials, one after the other; the optimizers of those before are still alive."""
    kept = []
    for _ in range(4):
        model = nn.Linear(4, 4)
        kept.append(sgd(model))
        train(model, kept[-1], 5)
    assert watched.lease.ends == [1] * 20


def test_an_optimizer_that_is_made_late_and_then_steps_in_turns_with_the_leader_does_not_count(watched):
    generator, discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
    d = sgd(discriminator)
    train(discriminator, d, 3)
    g = sgd(generator)
    for _ in range(5):
        gan_round(generator, discriminator, d.step, g.step)
    assert watched.lease.ends == [1] * 3 + [1, 0] * 5


class Twice(torch.optim.SGD):
    """A subclass as many packages write it."""

    fail = False

    def step(self, closure=None):
        result = super().step(closure)
        if self.fail:
            raise RuntimeError("the user's own")
        return result


class Catching(Twice):
    def step(self, closure=None):
        try:
            return super().step(closure)
        except RuntimeError:
            return None


def test_a_subclass_that_calls_super_is_one_iteration_a_step(watched):
    model = mlp()
    train(model, Catching(model.parameters(), lr=0.1), 4)
    watched.expect(4, boundaries=4)


def test_an_exception_in_a_step_propagates_and_the_next_step_is_a_boundary_again(watched):
    model = mlp()
    optimizer = Twice(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    optimizer.fail = True
    with pytest.raises(RuntimeError, match="the user's own"):
        train(model, optimizer, 1)
    optimizer.fail = False
    train(model, optimizer, 2)
    watched.expect(4, boundaries=4)


def test_an_exception_that_an_outer_step_catches_leaves_it_one_iteration(watched):
    model = mlp()
    optimizer = Catching(model.parameters(), lr=0.1)
    optimizer.fail = True
    train(model, optimizer, 3)
    watched.expect(3, boundaries=3)


def test_a_backward_whose_wait_for_a_lease_is_interrupted_is_over(watched, monkeypatch):
    weight = torch.ones(1, requires_grad=True)
    begin = watched.lease.begin

    def interrupted():
        monkeypatch.setattr(watched.lease, "begin", begin)
        raise KeyboardInterrupt

    monkeypatch.setattr(watched.lease, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        (weight * 2).sum().backward()
    model = mlp()
    train(model, sgd(model), 2)
    watched.expect(2, boundaries=2)


class Around(torch.optim.SGD):
    """An optimizer that lets another step, and has something to do after that."""

    def __init__(self, inner, watched):
        super().__init__([torch.zeros(1, requires_grad=True)], lr=0.1)
        self.inner, self.watched = inner, watched

    def step(self, closure=None):
        self.inner.step()
        self.watched.note("inner is done")
        return super().step(closure)


def test_an_optimizer_around_another_is_one_iteration_a_step(watched):
    model = mlp()
    optimizer = Around(torch.optim.SGD(model.parameters(), lr=0.1), watched)
    train(model, optimizer, 3)
    watched.expect(3, boundaries=3)
    assert watched.lease.story == ["begin", "inner is done", "end 1"] * 3


def test_a_step_within_the_step_of_another_thread_counts_and_is_no_boundary(watched):
    models = [mlp(), mlp()]
    other = torch.optim.SGD(models[1].parameters(), lr=0.1)
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)

    def closure():
        thread = threading.Thread(target=train, args=(models[1], other, 1))
        thread.start()
        thread.join()
        watched.note("the other is done")
        return

    train(models[0], optimizer, 1)
    optimizer.step(closure)
    train(models[0], optimizer, 1)
    watched.expect(4, boundaries=3)
    assert watched.lease.story[2:] == ["begin", "count 1", "the other is done", "end 1", "begin", "end 1"]


def test_an_exception_in_a_forward_propagates_and_the_next_step_ends_the_iteration(watched):
    model = mlp()
    optimizer = sgd(model)
    train(model, optimizer, 2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.zeros(3, 5))
    train(model, optimizer, 2)
    watched.expect(4, boundaries=4)
    assert not model._forward_hooks


def test_an_optimizer_that_steps_in_gradient_hooks_ends_the_iteration_after_the_backward(watched):
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    inside = []

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()
        inside.append(watched.lease.open)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for x in batches(3):
        model(x).square().mean().backward()
    watched.expect(3, boundaries=3)
    assert inside == [True] * 12


def test_an_update_by_hand_is_one_iteration_from_forward_to_forward(watched):
    model = mlp()
    for x in batches(4):
        model(x).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    assert watched.lease.ends[:1] == [1] and watched.lease.counted == 3 and watched.lease.open


def test_a_module_trained_in_eval_mode_is_trained(watched):
    model = mlp().eval()
    train(model, sgd(model), 4)
    # Its first forward had to be taken for inference; no later one is, and none is counted twice.
    watched.expect(4, boundaries=5)


def test_reentrant_checkpointing_is_one_iteration_a_step(watched):
    from torch.utils.checkpoint import checkpoint

    model = mlp()
    optimizer = sgd(model)
    for x in batches(3):
        x.requires_grad_()
        checkpoint(model, x, use_reentrant=True).square().mean().backward()
        optimizer.step()
    # The first pass runs without gradients, which looks like inference.
    assert watched.lease.ends == [1, 1] * 3


def test_a_loss_or_a_transform_of_the_data_begins_nothing(watched):
    model = mlp()
    optimizer = sgd(model)
    nn.ReLU()(torch.ones(1))
    assert watched.lease.story == []
    train(model, optimizer, 1)
    watched.expect(1)


def run_everything():
    torch.manual_seed(3)
    model = mlp()
    adam = torch.optim.Adam(model.parameters())
    losses = train(model, adam, 5)
    outputs = evaluate(model, 3)
    losses += train(model, sgd(model, momentum=0.9), 5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for x in batches(4):
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(adam)
        scaler.update()
        losses.append(loss.item())
    return losses, [o.tolist() for o in outputs], [p.tolist() for p in model.parameters()]


def test_results_are_those_of_the_bare_script():
    bare = run_everything()
    process = Watched()
    adaptor.install(process.iterations)
    try:
        assert run_everything() == bare
    finally:
        adaptor.uninstall()
    # The second optimizer was made after the first one's last step. Then the first one goes on.
    process.expect(5 + 3 + 5 + 4)
