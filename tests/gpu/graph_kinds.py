"""Scripts that capture CUDA graphs themselves, as PyTorch's documentation shows it; none knows of Salus."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

DEVICE = "cuda"
WARM_UP = 3
ANEW = 20
"""The graph is captured anew after so many replays, so that it happens while others want the GPU."""
Step = Callable[[], torch.Tensor]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 10)).to(DEVICE)


def captured() -> Step:
    """Forward, backward and the optimizer's step are one graph."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=True)
    data, labels = torch.randn(8, 256, 512, device=DEVICE), torch.randint(10, (8, 256), device=DEVICE)
    x, y = torch.zeros(256, 512, device=DEVICE), torch.zeros(256, dtype=torch.int64, device=DEVICE)
    side = torch.cuda.Stream()
    numbers = itertools.count()
    kept: list[tuple[torch.cuda.CUDAGraph, torch.Tensor]] = []

    def train() -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def warm_up() -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            optimizer.zero_grad(set_to_none=True)
            loss = train()
        torch.cuda.current_stream().wait_stream(side)
        return loss

    def capture() -> None:
        kept.clear()
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = train()
        kept.append((graph, loss))

    def step() -> torch.Tensor:
        number = next(numbers)
        x.copy_(data[number % 8])
        y.copy_(labels[number % 8])
        if number < WARM_UP:
            return warm_up()
        if (number - WARM_UP) % ANEW == 0:
            capture()
        graph, loss = kept[0]
        graph.replay()
        return loss.clone()

    return step


def graphed() -> Step:
    """Forward and backward are graphs, made by `make_graphed_callables`; the step is not."""
    x, y = torch.randn(256, 512, device=DEVICE), torch.randint(10, (256,), device=DEVICE)
    model = torch.cuda.make_graphed_callables(network(), (torch.randn(256, 512, device=DEVICE),))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


GRAPHS: dict[str, Callable[[], Step]] = {"captured": captured, "graphed": graphed}
