"""Compiled functions that contain an optimizer's step: no hook sees it, and each call is an iteration all the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from salus.adaptors import torch as adaptor
from tests.adaptors.graphs import Graph, captured
from tests.adaptors.record import A_WHILE, Watched, batches, evaluate, mlp, sgd, train

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.body(x)


def whole_step(model, optimizer, backend):
    @torch.compile(backend=backend)
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_each_call_of_a_whole_compiled_step_is_an_iteration(watched, make, backend):
    model = Small()
    optimizer = make(model)
    step = whole_step(model, optimizer, backend)
    for done, x in enumerate(batches(8)):
        step(x)
        assert not watched.lease.open and watched.lease.counted == done + 1
    evaluate(model, 2)
    train(model, optimizer, 2)
    step(batches(1)[0])
    watched.expect(13, boundaries=13)


def test_so_it_is_with_the_backend_that_scripts_use(watched):
    model = Small()
    step = whole_step(model, adam(model), "inductor")
    for x in batches(6):
        step(x)
    watched.expect(6, boundaries=6)


def test_after_an_eager_loop_that_followed_itself_each_call_is_an_iteration():
    process = Watched(quick=True, runs_on=True)
    adaptor.install(process.iterations)
    try:
        model = Small()
        optimizer = adam(model)
        step = whole_step(model, optimizer, "eager")
        train(model, optimizer, A_WHILE)
        for x in batches(6):
            step(x)
        process.expect(A_WHILE + 6)
    finally:
        adaptor.uninstall()


def test_a_compiled_step_with_its_scheduler_ends_an_iteration_that_began_eagerly(watched):
    """As torch's tutorial compiles them."""
    model = Small()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)

    @torch.compile(fullgraph=False, backend="eager")
    def update():
        optimizer.step()
        scheduler.step()

    for x in batches(6):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        assert watched.lease.open
        update()
        assert not watched.lease.open
    watched.expect(6, boundaries=6)


def test_a_compiled_loss_with_an_eager_step_is_one_iteration_a_step(watched):
    model = Small()
    optimizer = adam(model)

    @torch.compile(backend="aot_eager")
    def loss_of(x):
        return model(x).square().mean()

    for number, x in enumerate(batches(8), 1):
        loss_of(x).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    watched.expect(4, boundaries=4)


def test_gradients_that_a_compiled_function_accumulates_are_one_iteration_a_step(watched):
    model = Small()
    optimizer = adam(model)

    @torch.compile(backend="eager")
    def micro_step(x):
        loss = model(x).square().mean()
        loss.backward()

    @torch.compile(backend="eager")
    def step():
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    for number, x in enumerate(batches(12), 1):
        micro_step(x)
        if number % 4 == 0:
            step()
    watched.expect(3, boundaries=3)


def test_a_step_that_torch_could_not_compile_is_counted_once(watched):
    model = Small()
    optimizer = adam(model)
    update = torch._dynamo.disable(lambda: optimizer.step())

    @torch.compile(backend="eager")
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        update()
        return loss.detach() * 2

    for x in batches(5):
        step(x)
    assert watched.lease.counted == 5


def test_a_compiled_function_that_calls_a_compiled_step_is_one_iteration(watched):
    model = Small()
    optimizer = adam(model)
    inner = whole_step(model, optimizer, "eager")

    @torch.compile(backend="eager")
    def outer(x):
        torch._dynamo.graph_break()
        return inner(x) + 1

    for x in batches(5):
        outer(x)
    assert watched.lease.counted == 5


@pytest.mark.parametrize("how", ["torch.compile(module)", "module.compile()"])
def test_a_module_with_a_step_in_its_compiled_forward_is_one_iteration_a_call(watched, how):
    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Small()
            self.optimizer = adam(self.model)

        def forward(self, x):
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            return loss.detach()

    compiled = Step()
    if how == "module.compile()":
        compiled.compile(backend="eager")
    else:
        compiled = torch.compile(compiled, backend="eager")
    for x in batches(5):
        compiled(x)
        assert not watched.lease.open
    watched.expect(5, boundaries=5)


def test_what_a_compiled_function_does_to_parameters_after_the_step_is_no_iteration(watched):
    """Clipped weights, as in a WGAN."""
    model = Small()
    optimizer = adam(model)

    @torch.compile(backend="eager")
    def clip():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.01, 0.01)

    for x in batches(5):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        clip()
    assert watched.lease.counted == 5


def test_a_whole_compiled_step_that_was_captured_is_one_iteration_a_replay(cuda_graphs):
    process = Watched()
    adaptor.install(process.iterations)
    Graph.lease = process.lease
    try:
        model, graph = Small(), cuda_graphs()
        optimizer = adam(model)
        step = whole_step(model, optimizer, "eager")
        for x in batches(3):
            step(x)
        with captured(graph):
            step(batches(1)[0])
        for _ in range(6):
            graph.replay()
        process.expect(9, boundaries=9)
    finally:
        adaptor.uninstall()


def test_a_call_that_raises_raises_as_always(watched):
    model = mlp()
    step = whole_step(model, adam(model), "eager")
    with pytest.raises(RuntimeError):
        step(torch.ones(3, 5))
    for x in batches(3):
        step(x)
    watched.expect(3)
