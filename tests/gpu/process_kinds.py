"""Scripts of several processes that share CUDA tensors by torch.multiprocessing; none knows of Salus.

The processes take turns, so that what they compute is the same in every run. Each ends when the script does, however.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from typing import Any

import torch
from torch import multiprocessing, nn
from torch.nn import functional as F

DEVICE = "cuda"
WORKERS = 3
ANSWER_S, LOOK_S = 60.0, 1.0


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(64, 256, generator=generator), torch.randint(10, (64,), generator=generator)
    return x.to(DEVICE), y.to(DEVICE)


def be_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def train(seed: int, model: nn.Module, turn: Any, done: Any, stop: Any, parent: int) -> None:
    be_deterministic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = batch(seed)
    while True:
        while not turn.acquire(timeout=LOOK_S):
            if os.getppid() != parent:
                return
        if stop.is_set():
            return
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        torch.cuda.synchronize()
        done.release()


def hogwild(on_batch: Callable[[], None], report: Callable[[torch.Tensor], None], iterations: int) -> None:
    """Three processes train one shared model; this one looks at its loss after each round."""
    context = multiprocessing.get_context("spawn")
    model = network().to(DEVICE)
    model.share_memory()
    x, y = batch(0)
    stop = context.Event()
    turns = [(context.Semaphore(0), context.Semaphore(0)) for _ in range(WORKERS)]
    workers = [
        context.Process(target=train, args=(1 + seed, model, turn, done, stop, os.getpid()), daemon=True)
        for seed, (turn, done) in enumerate(turns)
    ]
    for worker in workers:
        worker.start()
    try:
        for _ in range(iterations):
            on_batch()
            for turn, done in turns:
                turn.release()
                if not done.acquire(timeout=ANSWER_S):
                    raise TimeoutError("a worker does not answer")
            with torch.no_grad():
                report(F.cross_entropy(model(x), y))
    finally:
        stop.set()
        for turn, _ in turns:
            turn.release()
        for worker in workers:
            worker.join(ANSWER_S)


def teach(inputs: Any, outputs: Any, parent: int) -> None:
    be_deterministic()
    torch.manual_seed(7)
    network = nn.Linear(256, 256).to(DEVICE)
    kept: list[torch.Tensor] = []
    while True:
        try:
            received = inputs.get(timeout=LOOK_S)
        except queue.Empty:
            if os.getppid() != parent:
                return
            continue
        if received is None:
            return
        with torch.no_grad():
            answer = network(received)
        del received
        # Who sends a tensor keeps it for as long as the other side uses it.
        kept = [*kept[-3:], answer]
        outputs.put(answer)


def through_queues(on_batch: Callable[[], None], report: Callable[[torch.Tensor], None], iterations: int) -> None:
    """Sends tensors to another process and trains with those that come back."""
    context = multiprocessing.get_context("spawn")
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs, outputs = context.Queue(), context.Queue()
    teacher = context.Process(target=teach, args=(inputs, outputs, os.getpid()), daemon=True)
    teacher.start()
    try:
        for _ in range(iterations):
            on_batch()
            x = torch.randn(64, 256, device=DEVICE)
            inputs.put(x)  # made between two iterations
            target = outputs.get(timeout=ANSWER_S)
            out = model(x)
            inputs.put(out.detach())  # made within one
            again = outputs.get(timeout=ANSWER_S)
            loss = F.mse_loss(out, target) + again.square().mean() * out.square().mean()
            del target, again
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report(loss.detach())
    finally:
        inputs.put(None)
        teacher.join(ANSWER_S)


PROCESSES: dict[str, Callable[[Callable[[], None], Callable[[torch.Tensor], None], int], None]] = {
    "hogwild": hogwild,
    "queue": through_queues,
}
