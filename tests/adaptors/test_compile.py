"""torch.compile: no graph breaks, no warnings (pytest makes them errors), no recompiles, the same iterations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from salus.adaptors import habits
from salus.adaptors import torch as adaptor
from tests.adaptors.record import Watched, batches, evaluate, is_usual, mlp, sgd, train


class Backend:
    """Runs the graphs as they are and counts them."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    """With a forward of its own: bare torch compiles no frame of a Sequential's `compile()`."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("how", ["torch.compile(module)", "module.compile()"])
def test_a_compiled_module_trains_and_evaluates_as_a_plain_one(watched, how, fullgraph):
    backend = Backend()
    model = Model()
    optimizer = sgd(model)
    if how == "module.compile()":
        model.compile(backend=backend, fullgraph=fullgraph)
    else:
        model = torch.compile(model, backend=backend, fullgraph=fullgraph)
    for _ in range(3):
        train(model, optimizer, 4)
        evaluate(model, 3)
    watched.expect(21, boundaries=21)
    assert backend.graphs == 2, "one for training, one for evaluation"


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_function_that_calls_modules_is_seen(watched, fullgraph):
    backend = Backend()
    model = Model()
    optimizer = sgd(model)

    @torch.compile(backend=backend, fullgraph=fullgraph)
    def loss_of(x):
        return model(x).square().mean()

    for x in batches(6):
        optimizer.zero_grad()
        loss = loss_of(x)
        assert watched.lease.open
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for x in batches(3):
            loss_of(x)
    watched.expect(9, boundaries=9)
    assert backend.graphs == 2


def test_a_compiled_function_inside_a_compiled_function_breaks_no_graph(watched):
    backend = Backend()
    model = Model()

    @torch.compile(backend=backend, fullgraph=True)
    def inner(x):
        return model(x)

    @torch.compile(backend=backend, fullgraph=True)
    def outer(x):
        return inner(x) + model(x)

    with torch.no_grad():
        for x in batches(3):
            outer(x)
    watched.expect(3, boundaries=3)
    assert backend.graphs == 1


def test_a_plain_module_around_a_compiled_one_compiles_it_once(watched):
    backend = Backend()
    inner = torch.compile(Model(), backend=backend, fullgraph=True)
    model = nn.Sequential(inner, nn.Linear(1, 1))
    whole, part = sgd(model), sgd(inner)
    train(model, whole, 5)
    train(inner, part, 5)
    assert backend.graphs == 1
    watched.expect(5, boundaries=10)


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_a_compiled_step_is_a_boundary(watched):
    model = Model()
    optimizer = sgd(model)
    step = torch.compile(optimizer.step, backend=Backend())
    for x in batches(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        step()
    watched.expect(4, boundaries=4)


def test_graphs_and_losses_are_as_many_and_the_same_as_bare():
    def run():
        torch._dynamo.reset()
        backend = Backend()
        torch.manual_seed(0)
        model = torch.compile(mlp(), backend=backend)
        return train(model, sgd(model), 6), [y.tolist() for y in evaluate(model, 2)], backend.graphs

    bare = run()
    adaptor.install(Watched().iterations)
    try:
        assert run() == bare
    finally:
        adaptor.uninstall()


def test_what_was_compiled_while_watched_works_on_afterwards():
    process = Watched()
    adaptor.install(process.iterations)
    model = Model()
    model.compile(backend=Backend(), fullgraph=True)
    compiled = torch.compile(lambda x: model(x) * 2, backend=Backend())
    adaptor.uninstall()
    assert compiled(batches(1)[0]).shape == model(batches(1)[0]).shape
    assert process.lease.story == []


def test_usual_calls_of_a_compiled_module_are_seen_before_torch_looks_for_hooks(monkeypatch):
    torch._dynamo.reset()
    process, backend = Watched(quick=True), Backend()
    adaptor.install(process.iterations)
    try:
        model = torch.compile(Model(), backend=backend)
        optimizer = sgd(model)
        train(model, optimizer, habits.AFTER + 1)
        assert is_usual()
        in_place = []
        torchs = torch.nn.modules.module
        asked = torchs._has_any_global_hook

        def asks():
            in_place.append(adaptor.installed()._key in torchs._global_forward_pre_hooks)
            return asked()

        with monkeypatch.context() as patched:
            patched.setattr(torchs, "_has_any_global_hook", asks)
            train(model, optimizer, 5)
        assert in_place == [False] * 5 and is_usual()
        process.expect(habits.AFTER + 6)
        process.lease.somebody_waits = True
        train(model, optimizer, 2)
        process.lease.somebody_waits = False
        evaluate(model, 2)
        train(model, optimizer, 2)
        process.expect(habits.AFTER + 12)
        assert backend.graphs == 2
    finally:
        adaptor.uninstall()


def test_a_compiled_module_s_class_is_as_it_was_afterwards_and_is_seen_when_watched_again():
    process = Watched(quick=True)
    adaptor.install(process.iterations)
    watch = adaptor.installed()
    model = torch.compile(Model(), backend=Backend())
    seen = type(model).__call__
    watch.uninstall()
    assert type(model).__call__ is not seen and type(model).__call__ is seen.__wrapped__
    watch.install()
    assert type(model).__call__.__wrapped__ is seen.__wrapped__
    adaptor.uninstall()
    assert type(model).__call__ is seen.__wrapped__


def test_to_export_a_compiled_module_is_no_iteration():
    process = Watched(quick=True)
    adaptor.install(process.iterations)
    try:
        model = torch.compile(Model(), backend=Backend())
        optimizer = sgd(model)
        train(model, optimizer, habits.AFTER + 1)
        assert is_usual()
        torch.export.export(model, (batches(1)[0],))
        process.expect(habits.AFTER + 1)
    finally:
        adaptor.uninstall()
