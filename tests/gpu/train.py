"""Ordinary training scripts on a GPU, of every kind that people write; none knows of Salus.

    python train.py KIND ITERATIONS [--go FILE] [--gate FILE --seat N]

Prints one line of JSON: all losses, exactly, the seconds of each iteration, and when the first one began. With --go it
waits for a file; with --gate it looks at a byte of a file before each iteration: rest (0), go on (1), or end (2); and
it tells how long the processor takes for the same little work after each.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import mmap
import os
import time
from collections.abc import Callable, Iterator

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn
from torch.nn import functional as F

from graph_kinds import GRAPHS  # isort: skip
from process_kinds import PROCESSES  # isort: skip
from thread_kinds import THREADS  # isort: skip

DEVICE = "cuda"
RUN, END = 1, 2
"""What may stand in a gate."""
Step = Callable[[], torch.Tensor]


class Ended(Exception):
    """The gate says so."""


def images(batch: int, size: int = 224) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 3, size, size, device=DEVICE), torch.randint(1000, (batch,), device=DEVICE)


def classifier(model: nn.Module, batch: int, size: int = 224, *, zero_last: bool = False) -> Step:
    """zero_grad at the beginning, as most tutorials have it, or at the end: then one that rests has no gradients."""
    model.to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    x, y = images(batch, size)

    def step() -> torch.Tensor:
        if not zero_last:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if zero_last:
            optimizer.zero_grad()
        return loss.detach()

    return step


def resnet50(*, zero_last: bool = False) -> Step:
    import torchvision

    return classifier(torchvision.models.resnet50(), 32, zero_last=zero_last)


def vit() -> Step:
    import torchvision

    return classifier(torchvision.models.vit_b_16(), 16)


class Gpt(nn.Module):
    def __init__(self, layers: int = 12, width: int = 768, words: int = 50304, length: int = 256) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.head(self.layers(self.words(x) + self.places(places), mask=mask, is_causal=True))


def gpt2() -> Step:
    """AdamW, bf16, gradient accumulation, a scheduler."""
    model = Gpt().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    batches = [torch.randint(50304, (4, 257), device=DEVICE) for _ in range(2)]

    def step() -> torch.Tensor:
        total = torch.zeros((), device=DEVICE)
        for batch in batches:
            with torch.autocast("cuda", torch.bfloat16):
                out = model(batch[:, :-1])
                loss = F.cross_entropy(out.flatten(0, 1), batch[:, 1:].flatten()) / len(batches)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def fp16() -> Step:
    """GradScaler; its first scale is far too large, so the first steps are skipped."""
    import torchvision

    model = torchvision.models.resnet18().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)
    x, y = images(32)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def dcgan() -> Step:
    up = [
        layer
        for a, b in ((512, 256), (256, 128), (128, 64))
        for layer in (nn.ConvTranspose2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.ReLU())
    ]
    generator = nn.Sequential(
        nn.ConvTranspose2d(100, 512, 4), nn.ReLU(), *up, nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh()
    )
    down = [
        layer
        for a, b in ((3, 64), (64, 128), (128, 256), (256, 512))
        for layer in (nn.Conv2d(a, b, 4, 2, 1), nn.LeakyReLU(0.2))
    ]
    critic = nn.Sequential(*down, nn.Conv2d(512, 1, 4), nn.Flatten())
    generator.to(DEVICE), critic.to(DEVICE)
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4)
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4)
    real = torch.randn(64, 3, 64, 64, device=DEVICE)

    def step() -> torch.Tensor:
        of_critic.zero_grad()
        fake = generator(torch.randn(64, 100, 1, 1, device=DEVICE))
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        other = F.softplus(-critic(fake)).mean()
        other.backward()
        of_generator.step()
        return torch.stack([loss.detach(), other.detach()])

    return step


def vae() -> Step:
    encoder = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 40)).to(DEVICE)
    decoder = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784)).to(DEVICE)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
    x = torch.rand(128, 784, device=DEVICE)

    def step() -> torch.Tensor:
        mean, log = encoder(x).chunk(2, 1)
        out = decoder(mean + torch.randn_like(mean) * (log / 2).exp())
        loss = F.binary_cross_entropy_with_logits(out, x) - (1 + log - mean**2 - log.exp()).mean() / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def lstm() -> Step:
    """A language model that keeps its hidden state from iteration to iteration."""
    words, cells, head = nn.Embedding(10000, 400), nn.LSTM(400, 800, 2), nn.Linear(800, 10000)
    model = nn.ModuleList([words, cells, head]).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    text = torch.randint(10000, (36, 20), device=DEVICE)
    state: list[tuple[torch.Tensor, torch.Tensor] | None] = [None]

    def step() -> torch.Tensor:
        hidden = None if state[0] is None else (state[0][0].detach(), state[0][1].detach())
        out, state[0] = cells(words(text[:-1]), hidden)
        loss = F.cross_entropy(head(out).flatten(0, 1), text[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        return loss.detach()

    return step


def lbfgs() -> Step:
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)).to(DEVICE)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5, history_size=5)
    x, y = torch.randn(512, 64, device=DEVICE), torch.randn(512, 1, device=DEVICE)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return lambda: torch.as_tensor(optimizer.step(closure)).detach()


def compiled(mode: str) -> Step:
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))
    model.to(DEVICE)
    fast = torch.compile(model, mode=mode)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = torch.randn(256, 512, device=DEVICE), torch.randint(10, (256,), device=DEVICE)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(fast(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach().clone()

    return step


def growing() -> Step:
    """Keeps every loss on the GPU, and streams data in on a stream of its own."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(1568, 10))
    model.to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    host, y = torch.randn(64, 3, 64, 64).pin_memory(), torch.randint(10, (64,), device=DEVICE)
    side = torch.cuda.Stream()
    losses: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        with torch.cuda.stream(side):
            x = host.to(DEVICE, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        x.record_stream(torch.cuda.current_stream())
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        return torch.stack(losses).sum()

    return step


def inference() -> Step:
    import torchvision

    model = torchvision.models.resnet50().to(DEVICE).eval()
    x, _ = images(16)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return model(x + torch.rand((), device=DEVICE)).double().mean()

    return step


def linear(width: int, layers: int, batch: int) -> Step:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    x = torch.randn(batch, width, device=DEVICE)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def large() -> Step:
    """A little more than 4 GiB that stay: a model, the state of its optimizer, and its data, kept on the GPU.

    Its step takes little beside that: eight contexts take 5 of the 16 GiB, and two of these are to fit in what is left.
    """
    width, batch = 6144, 512
    data = torch.randn(200 * batch, width, device=DEVICE)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, foreach=False)
    batches = itertools.cycle(data.split(batch))

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        x = next(batches)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def sized(width: int) -> Step:
    """Jobs of different sizes, by their width."""
    return linear(width, layers=3, batch=512)


def too_large() -> Step:
    """Takes more and more, until there is no more."""
    kept: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        kept.append(torch.ones(1 << 28, device=DEVICE))
        return kept[-1][0]

    return step


KINDS: dict[str, Callable[[], Step]] = {
    "resnet50": resnet50,
    "resnet50-zero-last": lambda: resnet50(zero_last=True),
    "vit": vit,
    "gpt2": gpt2,
    "fp16": fp16,
    "dcgan": dcgan,
    "vae": vae,
    "lstm": lstm,
    "lbfgs": lbfgs,
    "compile": lambda: compiled("default"),
    "compile-reduce": lambda: compiled("reduce-overhead"),
    "growing": growing,
    "inference": inference,
    "large": large,
    "too-large": too_large,
    **GRAPHS,
    **THREADS,
    **{f"sized-{width}": lambda width=width: sized(width) for width in (1024, 2048, 3072, 4096)},
}


def lightning(on_batch: Callable[[], None], report: Callable[[torch.Tensor], None], iterations: int) -> None:
    import lightning as L

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            report(loss.detach())
            return loss

        def on_train_batch_start(self, batch: object, index: int) -> None:
            on_batch()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    data = torch.utils.data.TensorDataset(torch.randn(64 * iterations, 256), torch.randint(10, (64 * iterations,)))
    trainer = L.Trainer(
        max_steps=iterations,
        accelerator="gpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=64))


def trainer(on_batch: Callable[[], None], report: Callable[[torch.Tensor], None], iterations: int) -> None:
    import tempfile

    import transformers

    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=128, vocab_size=1000, n_positions=64)
    model = transformers.GPT2LMHeadModel(config)

    class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 8 * iterations

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            words = torch.arange(index, index + 64) % 1000
            return {"input_ids": words, "labels": words}

    class Reporter(transformers.Trainer):
        def compute_loss(self, *args: object, **kwargs: object) -> object:
            loss = super().compute_loss(*args, **kwargs)
            report(loss.detach())
            return loss

        def training_step(self, *args: object, **kwargs: object) -> object:
            on_batch()
            return super().training_step(*args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=iterations, per_device_train_batch_size=8, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        Reporter(model=model, args=arguments, train_dataset=Data()).train()


FRAMEWORKS = {"lightning": lightning, "trainer": trainer, **PROCESSES}
ALL = [*KINDS, *FRAMEWORKS]


def run(
    kind: str, iterations: int, on_batch: Callable[[], None], report: Callable[[torch.Tensor], None], seed: int = 0
) -> None:
    """Calls `on_batch` before each iteration, and `report` with each loss."""
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    if kind in FRAMEWORKS:
        FRAMEWORKS[kind](on_batch, report, iterations)
        return
    step = KINDS[kind]()
    for _ in range(iterations):
        on_batch()
        report(step())


def little_work() -> None:
    """A quarter of a millisecond of what Python does all the time."""
    names = {str(number): number for number in range(600)}
    for name in names:
        names[name] += len(name)
    sorted(names.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=ALL)
    parser.add_argument("iterations", type=int)
    parser.add_argument("--go")
    parser.add_argument("--gate", type=argparse.FileType("r+b"))
    parser.add_argument("--seat", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # Whatever a library prints must not be in the way of what we say.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    losses: list[torch.Tensor] = []
    began: list[float] = []
    ended: list[float] = []
    gate = mmap.mmap(options.gate.fileno(), 0) if options.gate else None
    processor: list[float] = []

    def on_batch() -> None:
        index = len(began)
        if index:
            ended.append(time.perf_counter())
            if gate is not None:
                little_work()
                processor.append(time.perf_counter() - ended[-1])
        if index == 0 and options.go:
            torch.cuda.synchronize()
            print("ready", file=out, flush=True)
            while not os.path.exists(options.go):
                time.sleep(0.01)
        while gate is not None and gate[options.seat] != RUN:
            if gate[options.seat] == END:
                raise Ended
            time.sleep(0.001)
        began.append(time.perf_counter())

    def report(loss: torch.Tensor) -> None:
        losses.append(loss.cpu())

    def times() -> Iterator[float]:
        for this, following in zip(began, [*began[1:], time.perf_counter()], strict=True):
            yield following - this

    with contextlib.suppress(Ended):
        run(options.kind, options.iterations, on_batch, report, options.seed)
    torch.cuda.synchronize()
    seconds = list(times())
    values = [loss.double().flatten().tolist() for loss in losses]
    peak = torch.cuda.max_memory_allocated()
    if len(ended) < len(began):
        ended.append(began[0] + sum(seconds))
    told = {
        "losses": values, "seconds": seconds, "began_s": began[0], "ended_s": ended, "processor_s": processor,
        "peak_bytes": peak,
    }  # fmt: skip
    print(json.dumps(told), file=out, flush=True)


if __name__ == "__main__":
    main()
