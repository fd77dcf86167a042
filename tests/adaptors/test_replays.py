"""Replays of captured CUDA graphs: as many iterations are counted as the script has, and each is a boundary."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from salus import api
from salus.adaptors import habits, replays
from salus.adaptors import torch as adaptor
from tests.adaptors.graphs import Graph, captured
from tests.adaptors.record import A_WHILE, Watched, batches, evaluate, is_usual, mlp, runs_on, sgd, train


@pytest.fixture(params=["each", "usual", "following"])
def process(request, cuda_graphs, capfd):
    """A watched process with a model and an optimizer, which has warmed up. Three times: in each of the quick ways."""
    watched = Watched(quick=request.param != "each", runs_on=request.param == "following")
    adaptor.install(watched.iterations)
    Graph.lease = watched.lease
    watched.graph = cuda_graphs()
    watched.model = mlp()
    watched.optimizer = sgd(watched.model)
    train(watched.model, watched.optimizer, A_WHILE)
    assert runs_on() == (request.param == "following")
    watched.lease.ends.clear()
    yield watched
    adaptor.uninstall()
    said = capfd.readouterr()
    assert said.out == "" and "salus:" not in said.err


def whole_step(process):
    """As torch's documentation captures it."""
    with captured(process.graph):
        process.optimizer.zero_grad()
        process.model(batches(1)[0]).square().mean().backward()
        process.optimizer.step()


def micro_step(process):
    with captured(process.graph):
        process.model(batches(1)[0]).square().mean().backward()


def test_a_capture_is_no_iteration_and_no_boundary(process):
    before = len(process.lease.story)
    whole_step(process)
    assert process.lease.ends in ([], [0]), "the iterations that followed one another before it may end"
    assert "begin" not in process.lease.story[before + 1 :]


def test_each_replay_of_a_training_step_is_an_iteration(process):
    whole_step(process)
    for done in range(20):
        process.graph.replay()
        assert not process.lease.open and process.lease.counted == done + 1
    assert process.graph.replayed == [True] * 20
    train(process.model, process.optimizer, 3)
    evaluate(process.model, 2)
    process.graph.replay()
    process.expect(26)


def test_whoever_waits_gets_a_boundary_after_each_replay(process):
    whole_step(process)
    process.graph.replay()
    process.lease.somebody_waits = True
    before = process.lease.boundaries
    for _ in range(5):
        process.graph.replay()
    assert process.lease.boundaries == before + 5 and not process.lease.open


def test_a_graph_whose_optimizer_the_script_dropped_still_counts(process):
    whole_step(process)
    process.optimizer = None
    for _ in range(5):
        process.graph.replay()
    process.expect(5)


def test_with_two_optimizers_the_one_that_leads_counts(process, cuda_graphs):
    other, second = mlp(), cuda_graphs()
    optimizer = sgd(other)
    whole_step(process)
    with captured(second):
        other(batches(1)[0]).sum().backward()
        optimizer.step()
    for _ in range(6):
        process.graph.replay()
        second.replay()
    assert process.lease.ends[-12:] == [1, 0] * 6


def test_two_optimizers_in_one_graph_are_one_iteration(process):
    other = mlp()
    optimizer = sgd(other)
    with captured(process.graph):
        for model, one in ((process.model, process.optimizer), (other, optimizer)):
            model(batches(1)[0]).sum().backward()
            one.step()
    for _ in range(6):
        process.graph.replay()
    assert process.lease.ends[-6:] == [1] * 6


def test_gradients_by_replay_and_an_eager_step_are_one_iteration_a_step(process):
    """Whole-network capture with GradScaler, as torch's documentation has it; and accumulated over several replays."""
    micro_step(process)
    for replayed in (1, 4, 4, 20):
        for _ in range(replayed):
            process.graph.replay()
        process.optimizer.step()
    process.expect(4)
    assert process.graph.replayed == [True] * 29


def test_a_scaler_that_skips_the_step_after_a_replay_ends_its_iteration(process):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    micro_step(process)
    for skips in (True, False, False, True):
        process.graph.replay()
        if not skips:
            scaler.scale(torch.ones(1))
            scaler.step(process.optimizer)
        else:
            scaler.scale(torch.ones(1))
            for parameter in process.model.parameters():
                parameter.grad = torch.full_like(parameter, float("inf"))
            scaler.step(process.optimizer)
        scaler.update()
        for parameter in process.model.parameters():
            parameter.grad = torch.ones_like(parameter)
    process.expect(4)


def test_gradients_by_replay_and_a_step_by_replay_are_one_iteration_a_step(process, cuda_graphs):
    steps = cuda_graphs()
    micro_step(process)
    with captured(steps):
        process.optimizer.step()
    for _ in range(5):
        for _ in range(3):
            process.graph.replay()
        steps.replay()
    process.expect(5)
    assert steps.replayed == [True] * 5


def test_a_part_that_no_step_follows_is_a_boundary_after_a_while_and_counts_when_none_ever_comes(process):
    micro_step(process)
    for _ in range(replays.IN_A_ROW + 2):
        process.graph.replay()
    assert process.lease.ends[-3:] == [0, 0, 0] and not process.lease.open
    for _ in range(replays.WITHOUT_A_STEP):
        process.graph.replay()
    assert process.lease.counted == replays.IN_A_ROW + 3
    process.optimizer.step()
    process.expect(replays.IN_A_ROW + 4)


def test_a_long_accumulation_by_replay_counts_its_steps_and_no_more(process):
    micro_step(process)
    for _ in range(2):
        for _ in range(replays.WITHOUT_A_STEP // 2 + 20):
            process.graph.replay()
        process.optimizer.step()
    process.expect(2)


class Graphed(torch.autograd.Function):
    """As `make_graphed_callables` makes it: a graph for the forward, and one for the backward."""

    @staticmethod
    def forward(ctx, forwards, backwards, x):
        ctx.graph = backwards
        forwards.replay()
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.graph.replay()
        return None, None, gradient * 2


def graphed(process, cuda_graphs, model):
    """Two graphs, captured as `make_graphed_callables` captures them."""
    forwards, backwards = cuda_graphs(), cuda_graphs()
    x = batches(1)[0].requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    with captured(forwards):
        out = model(x)
    with captured(backwards):
        torch.autograd.grad(out.sum(), x)
    return forwards, backwards


def test_a_graphed_module_in_an_ordinary_loop_is_one_iteration_a_step(process, cuda_graphs):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = mlp(), torch.nn.Linear(4, 1)

        def forward(self, x):
            for _ in range(12):
                x = Graphed.apply(*graphs, x)
            return self.head(x)

    model = Model()
    graphs = graphed(process, cuda_graphs, model.body)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    before = len(process.lease.ends)
    for x in batches(A_WHILE):
        optimizer.zero_grad()
        model(x.requires_grad_()).sum().backward()
        assert process.lease.open
        optimizer.step()
    # The first one closes what the warm-up of the graphs had begun.
    assert len(process.lease.ends) == before + A_WHILE
    assert all(graph.replayed == [True] * 12 * A_WHILE for graph in graphs)
    assert process.lease.open == runs_on()


def test_a_graphed_function_in_an_ordinary_loop_is_one_iteration_a_step(process, cuda_graphs):
    graphs = graphed(process, cuda_graphs, process.model)
    weight = torch.ones(3, 4, requires_grad=True)
    optimizer = process.optimizer
    optimizer.add_param_group({"params": [weight]})
    optimizer.step()
    process.lease.ends.clear()
    for _ in range(10):
        optimizer.zero_grad()
        for _ in range(3):
            loss = Graphed.apply(*graphs, weight).sum()
        assert process.lease.open
        loss.backward()
        optimizer.step()
    process.expect(10, boundaries=10)


@pytest.mark.parametrize("what", ["a module", "a function"])
def test_each_replay_of_inference_is_an_iteration(process, what):
    model = mlp().eval()
    with torch.no_grad(), captured(process.graph):
        model(batches(1)[0]) if what == "a module" else torch.ones(3).sum()
    before = process.lease.counted
    for _ in range(20):
        process.graph.replay()
        assert not process.lease.open
    process.expect(before + 20)
    assert process.graph.replayed == [True] * 20


def test_where_nothing_trains_each_replay_is_an_iteration_whatever_was_captured(cuda_graphs):
    """A server that does not say `no_grad`."""
    watched = Watched()
    adaptor.install(watched.iterations)
    Graph.lease = watched.lease
    try:
        model, graph = mlp(), cuda_graphs()
        with captured(graph):
            model(batches(1)[0])
        for _ in range(20):
            graph.replay()
        watched.expect(20, boundaries=20)
    finally:
        adaptor.uninstall()


def test_an_update_by_hand_that_was_captured_is_one_iteration_a_replay(cuda_graphs):
    watched = Watched()
    adaptor.install(watched.iterations)
    Graph.lease = watched.lease
    try:
        model, graph = mlp(), cuda_graphs()
        with captured(graph):
            model(batches(1)[0]).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        for _ in range(20):
            graph.replay()
        watched.expect(20, boundaries=20)
    finally:
        adaptor.uninstall()


def test_a_teacher_by_replay_inside_an_open_iteration_changes_nothing(process):
    teacher = mlp().eval()
    with torch.no_grad(), captured(process.graph):
        teacher(batches(1)[0])
    before = process.lease.counted
    for x in batches(5):
        loss = process.model(x).square().mean()
        for _ in range(12):
            process.graph.replay()
        loss.backward()
        process.optimizer.step()
    process.expect(before + 5)


def test_parts_of_a_forward_by_replay_do_not_end_its_iteration(process):
    """Frozen layers, captured: replayed before anything that trains was computed."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(4, 1)

        def forward(self, x):
            for _ in range(12):
                process.graph.replay()
            return self.head(x)

    with torch.no_grad(), captured(process.graph):
        torch.ones(3).sum()
    model = Model()
    optimizer = sgd(model)
    before = len(process.lease.ends)
    train(model, optimizer, 12)
    assert len(process.lease.ends) == before + 12 and not process.lease.open


def test_a_mark_around_replays_is_one_iteration(process):
    whole_step(process)
    before = process.lease.counted
    for _ in range(3):
        with api.iteration():
            for _ in range(10):
                process.graph.replay()
    process.expect(before + 3)


def test_a_replay_within_a_backward_is_a_part_of_it(process):
    whole_step(process)
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda _: process.graph.replay())
    before = process.lease.counted
    weight.square().sum().backward()
    process.expect(before + 1)


def test_graphs_of_torch_compile_are_parts_of_a_compiled_call(process, cuda_graphs):
    """Its `reduce-overhead` mode replays several in each forward and backward. They must cost nothing."""
    code = compile("def capture(graph):\n with captured(graph): pass", "torch/_inductor/cudagraph_trees.py", "exec")
    scope = {"captured": captured}
    exec(code, scope)
    scope["capture"](process.graph)
    assert "replay" not in vars(process.graph)


def test_a_loop_that_replays_parts_within_its_calls_may_still_be_a_usual_one(cuda_graphs):
    watched = Watched(quick=True)
    adaptor.install(watched.iterations)
    Graph.lease = watched.lease
    try:
        model = mlp()
        optimizer = sgd(model)
        graph = cuda_graphs()
        with torch.no_grad(), captured(graph):
            torch.ones(1)
        model[1].register_forward_hook(lambda *_: graph.replay())
        train(model, optimizer, habits.AFTER + 3)
        assert is_usual()
        watched.expect(habits.AFTER + 3)
    finally:
        adaptor.uninstall()


def test_a_capture_that_failed_and_was_never_ended_is_over(process):
    process.graph.capture_begin()
    process.model(batches(1)[0])
    Graph.under_way = None
    train(process.model, process.optimizer, 3)
    process.expect(3)


def test_what_another_thread_does_during_a_capture_is_its_own(process, monkeypatch):
    main = threading.get_ident()
    capturing = torch.cuda.is_current_stream_capturing
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: capturing() and threading.get_ident() == main
    )
    other = mlp()
    optimizer = sgd(other)
    with captured(process.graph):
        thread = threading.Thread(target=train, args=(other, optimizer, 3))
        thread.start()
        thread.join()
        process.model(batches(1)[0]).sum().backward()
        process.optimizer.step()
    assert len(process.lease.ends) in (3, 4)
    process.graph.replay()
    assert not process.lease.open


def test_a_user_who_interrupts_the_wait_for_a_lease_gets_no_replay(process, monkeypatch):
    whole_step(process)

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(process.lease, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.graph.replay()
    assert process.graph.replayed == []
    process.graph.replay()
    process.expect(1)


def test_a_replay_that_raises_raises_as_always(process):
    whole_step(process)
    process.graph.on_replay = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        process.graph.replay()
    process.graph.on_replay = lambda: None
    process.graph.replay()
    process.expect(2)


def test_graphs_work_on_after_salus_was_taken_out(cuda_graphs):
    watched = Watched()
    adaptor.install(watched.iterations)
    Graph.lease = watched.lease
    graph, model = cuda_graphs(), mlp()
    with captured(graph):
        model(batches(1)[0])
    adaptor.uninstall()
    graph.replay()
    assert graph.replayed == [False] and watched.lease.story == []
    assert "__wrapped__" not in vars(type(graph).capture_begin)
    with contextlib.suppress(AttributeError):
        assert not hasattr(type(graph).capture_end, "__wrapped__")
