"""An ordinary PyTorch training script: it knows nothing of Salus. The demo and the benchmarks run it as their jobs.

It trains a small model on made-up data and prints one line of JSON: the seconds of each iteration, when it was done
(on the clock of the machine) and a digest of all losses. With --go it says that it is ready, waits until that file is
there (so that start-up is over for everybody before the clock starts), and then --delay seconds more.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time

import torch
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", choices=("mlp", "convnet", "transformer", "lstm"), default="convnet")
parser.add_argument("--iterations", type=int, default=200)
parser.add_argument("--warm-up", type=int, default=5)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--go")
parser.add_argument("--delay", type=float, default=0.0)
parser.add_argument("--block", type=int, help="after each block of iterations, say so and wait for a line of input")


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(64, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.cells(x)[0][:, -1]))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.layers(x).mean(1)))


def build(model: str) -> tuple[nn.Module, tuple[int, ...]]:
    """The model, and the shape of one example."""
    if model == "mlp":
        return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)), (
            512,
        )
    if model == "convnet":
        layers = (nn.Conv2d(3, 24, 3, 2, 1), nn.ReLU(), nn.Conv2d(24, 48, 3, 2, 1), nn.ReLU())
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(768, 10)), (3, 64, 64)
    return (Transformer(), (32, 64)) if model == "transformer" else (Lstm(), (16, 64))


def main() -> None:
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    if options.device == "cpu":
        torch.set_num_threads(1)
    model, shape = build(options.model)
    model.to(options.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(options.batch, *shape, device=options.device)
    y = torch.randint(10, (options.batch,), device=options.device)
    if options.go:
        print("ready", flush=True)
        while not os.path.exists(options.go):
            time.sleep(0.02)
        time.sleep(options.delay)
    seconds: list[float] = []
    losses = []
    for index in range(options.warm_up + options.iterations):
        if options.block and index >= options.warm_up and (index - options.warm_up) % options.block == 0:
            print("block", flush=True)
            input()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if index >= options.warm_up:
            seconds.append(time.perf_counter() - start)
    ended_s = time.monotonic()
    digest = hashlib.sha256(repr(losses).encode()).hexdigest()
    print(json.dumps({"seconds": seconds, "ended_s": ended_s, "digest": digest}))


if __name__ == "__main__":
    main()
