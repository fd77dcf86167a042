"""A whole step compiled with its optimizer, and two threads that train; none knows of Salus.

What two threads compute depends on nothing but their own data, so their losses are the same in every run.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

DEVICE = "cuda"
ANSWER_S = 120.0
Step = Callable[[], torch.Tensor]


def whole_step() -> Step:
    """Forward, backward and the optimizer's step are one compiled function."""
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 10)).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = torch.randn(256, 512, device=DEVICE), torch.randint(10, (256,), device=DEVICE)

    @torch.compile
    def train() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return lambda: train().clone()


class Trainer(threading.Thread):
    """A thread that trains a model of its own, as a trial of Optuna's does."""

    def __init__(self, seed: int) -> None:
        super().__init__(daemon=True)
        generator = torch.Generator().manual_seed(seed)
        self._model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        self._model.to(DEVICE)
        self._x = torch.randn(128, 256, generator=generator).to(DEVICE)
        self._y = torch.randint(10, (128,), generator=generator).to(DEVICE)
        self.asked: queue.Queue[bool] = queue.Queue()
        self.losses: queue.Queue[torch.Tensor | Exception] = queue.Queue()

    def run(self) -> None:
        optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-3)
        while self.asked.get():
            try:
                optimizer.zero_grad()
                loss = F.cross_entropy(self._model(self._x), self._y)
                loss.backward()
                optimizer.step()
                self.losses.put(loss.detach())
            except Exception as error:
                self.losses.put(error)
                return


def two_threads() -> Step:
    """Both do an iteration at the same time. Each uses the default stream, as threads do unless told otherwise."""
    trainers = [Trainer(seed) for seed in (1, 2)]
    for trainer in trainers:
        trainer.start()

    def step() -> torch.Tensor:
        for trainer in trainers:
            trainer.asked.put(True)
        losses = []
        for trainer in trainers:
            loss = trainer.losses.get(timeout=ANSWER_S)
            if isinstance(loss, Exception):
                raise loss
            losses.append(loss)
        return torch.stack(losses)

    return step


THREADS: dict[str, Callable[[], Step]] = {"whole-step": whole_step, "two-threads": two_threads}
